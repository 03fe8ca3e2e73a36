"""The blocking phase of a save: the state comes to the host, nothing touches a file.

What is wrong with the state on all processes is raised here; what is wrong on one of
them alone goes along in the request. Does not belong here: comparing, writing.
"""

import dataclasses
import json
import time
from typing import Any

from orbax_delta import fields, keys, lossy, selection
from orbax_delta.base import Base
from orbax_delta.errors import InvalidInputError
from orbax_delta.hosts import ALONE, Job, Round
from orbax_delta.leaves import Snapshot
from orbax_delta.lossy import Plan
from orbax_delta.manifests import Json
from orbax_delta.options import DeltaOptions
from orbax_delta.places import Place
from orbax_delta.sealing import Key, fingerprint
from orbax_delta.selection import Selection, Stored


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One save, as fixed in the blocking phase.

    Attributes:
        taken: The state; or why this process could not take it though others could.
        selection: What of it was left where it is, because it has not changed.
        lossy: Leaves that are stored within a bound.
        custom_metadata: JSON to keep with the step.
        round: Where the processes agree on this save.
        hurried: The machine is about to be taken away: only what must be done.
        place: Where the step goes.
        options: Options in force.
        key: What the step is sealed with; None: nothing.
        started: `time.perf_counter()` at the call.
        wall_time: Seconds since 1970 at the call.
        blocking_seconds: How long the caller was kept.
    """

    taken: Snapshot | Exception
    selection: Selection
    lossy: Plan
    custom_metadata: Json
    round: Round
    hurried: bool
    place: Place
    options: DeltaOptions
    key: Key | None
    started: float
    wall_time: float
    blocking_seconds: float

    def waited_seconds(self) -> float:
        """Seconds since the blocking phase ended."""
        return time.perf_counter() - self.started - self.blocking_seconds


def prepare(
    tree: Any,
    place: Place,
    options: DeltaOptions,
    *,
    custom_metadata: Json = None,
    job: Job = ALONE,
    hurried: bool = False,
    stored: Stored | None = None,
) -> SaveRequest:
    """The blocking phase: what has to be looked at comes to the host.

    No file is used but that of the key.

    Args:
        tree: The state.
        place: Where it goes.
        options: Options in force.
        custom_metadata: JSON to keep with the step.
        job: The processes that save it together; all of them come by here.
        hurried: Whether to leave out what can wait for the next save.
        stored: What is stored of it already; None: nothing may be relied on.

    Raises:
        InvalidInputError: A leaf or the metadata cannot be stored, on any process.
        WrongKeyError: There is no key to encrypt with, on any process.
    """
    started, wall_time = time.perf_counter(), time.time()
    name = f"{place.step_name}/{place.item}"
    agreed = Round(job, name, timeout=options.vote_timeout)
    taken: Snapshot | Exception
    selected = selection.EVERYTHING
    rounded: Plan = {}
    key: Key | None = None
    try:
        metadata, key = _metadata(custom_metadata), options.writing_key()
        keys.remember(options.encryption)
        if stored is not None and stored.base.key != fingerprint(key):
            # The save will not build on that.
            stored = dataclasses.replace(stored, base=Base())
        taken, selected = selection.take(tree, job, options, stored, hurried=hurried)
        rounded = lossy.plan(taken.leaves, options.lossy)
    except Exception as error:  # noqa: BLE001 # raised by every process, here or later
        # One process alone must not raise here: the others wait in Orbax's barriers.
        agreed.declare(error)
        metadata, taken = None, error
    else:
        agreed.declare(None)
    return SaveRequest(
        taken=taken,
        selection=selected,
        lossy=rounded,
        custom_metadata=metadata,
        round=agreed,
        hurried=hurried,
        place=place,
        options=options,
        key=key,
        started=started,
        wall_time=wall_time,
        blocking_seconds=time.perf_counter() - started,
    )


def _metadata(custom_metadata: Json) -> Json:
    """A copy: the caller may change the object as soon as save returns."""
    try:
        text = json.dumps(custom_metadata, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"custom_metadata is not JSON: {error}") from error
    if not fields.is_shallow(metadata := json.loads(text)):
        raise InvalidInputError(
            "custom_metadata is not JSON that a MANIFEST holds: it is nested more than "
            f"{fields.MAX_METADATA_DEPTH} deep; flatten it"
        )
    return metadata
