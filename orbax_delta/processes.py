"""The blocking phase of both adapters: which processes save or restore, and why now.

All that has to be asked of Orbax and JAX before that. Does not belong here: how the
processes agree (`hosts`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import orbax.checkpoint as ocp

from orbax_delta import blocking, places
from orbax_delta.blocking import SaveRequest
from orbax_delta.errors import InvalidInputError
from orbax_delta.hosts import Job
from orbax_delta.manifests import Json
from orbax_delta.options import DeltaOptions
from orbax_delta.places import Place
from orbax_delta.selection import Stored


def prepare(
    tree: Any,
    directory: str,
    options: DeltaOptions,
    *,
    known: Callable[[Place], AbstractContextManager[Stored | None]],
    custom_metadata: Json = None,
) -> SaveRequest:
    """The blocking phase of a save into an item's directory.

    Args:
        tree: The state.
        directory: The item's directory.
        options: Options in force.
        known: Says what is stored of a place already, and holds it meanwhile.
        custom_metadata: JSON to keep with the step.

    Raises:
        InvalidInputError: A leaf or the metadata cannot be stored, on any process.
    """
    place = places.locate_save(directory)
    # Orbax has asked the same of the same step when it decided to save it, so that all
    # processes get the same answer.
    preempted = place.step is not None and ocp.multihost.reached_preemption(place.step)
    with known(place) as stored:
        return blocking.prepare(
            tree,
            place,
            options,
            custom_metadata=custom_metadata,
            job=job(options),
            hurried=bool(preempted),
            stored=stored,
        )


def job(options: DeltaOptions) -> Job:
    """The processes that save together with this one.

    Raises:
        InvalidInputError: This process is none of those that the options name.
    """
    own = jax.process_index()
    together = _named(options.processes)
    if own not in together or max(together) >= jax.process_count():
        raise InvalidInputError(
            f"this is process {own} of {jax.process_count()}; DeltaOptions.processes "
            f"is {together}. A process that saves must be one of them"
        )
    return _joined(own, together)


def restoring(named: Sequence[int] | None) -> Job:
    """The processes that restore together with this one.

    Args:
        named: Those that save together. One that is none of them restores by itself.
    """
    own = jax.process_index()
    together = _named(named)
    return _joined(own, together if own in together else (own,))


def _named(processes: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(processes or range(jax.process_count()))


def _joined(own: int, together: tuple[int, ...]) -> Job:
    if len(together) == 1:
        return Job(process=own, processes=together)
    client = ocp.multihost.get_jax_distributed_client()
    return Job(process=own, processes=together, client=client)
