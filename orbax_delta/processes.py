"""What Orbax and JAX know of the processes of this job, for both adapters.

Does not belong here: how the processes agree (`hosts`).
"""

import jax
import orbax.checkpoint as ocp

from orbax_delta.errors import InvalidInputError
from orbax_delta.hosts import Job
from orbax_delta.options import DeltaOptions
from orbax_delta.places import Place


def job(options: DeltaOptions) -> Job:
    """The processes that save together with this one.

    Raises:
        InvalidInputError: This process is none of those that the options name.
    """
    own = jax.process_index()
    together = tuple(options.processes or range(jax.process_count()))
    if own not in together or max(together) >= jax.process_count():
        raise InvalidInputError(
            f"this is process {own} of {jax.process_count()}; DeltaOptions.processes "
            f"is {together}. A process that saves must be one of them"
        )
    if len(together) == 1:
        return Job(process=own, processes=together)
    client = ocp.multihost.get_jax_distributed_client()
    return Job(process=own, processes=together, client=client)


def preempted(place: Place) -> bool:
    """Whether this step is saved because a machine is about to be taken away.

    Orbax has asked the same of the same step when it decided to save it, so that all
    processes get the same answer.
    """
    return place.step is not None and bool(ocp.multihost.reached_preemption(place.step))
