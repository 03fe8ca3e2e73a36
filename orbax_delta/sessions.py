"""Between the adapters and the flows: what is remembered from save to save.

One state per item and root, whichever API of Orbax the calls come through and from
whichever thread. Does not belong here: Orbax, and what a save or a restore does.
"""

import collections
import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Iterator

from orbax_delta import fallback, keys, monitoring, owners, save, upkeep
from orbax_delta.blocking import SaveRequest
from orbax_delta.fallback import OnCorruption
from orbax_delta.history import RestoreCost
from orbax_delta.hosts import ALONE, Job, Round
from orbax_delta.live import Live
from orbax_delta.options import DeltaOptions
from orbax_delta.places import Place
from orbax_delta.reports import SaveReport
from orbax_delta.restore import Restored, Target
from orbax_delta.selection import Stored
from orbax_delta.upkeep import ItemState


@dataclasses.dataclass(slots=True, kw_only=True)
class _Session:
    """The state of one item of one root.

    Attributes:
        state: What is remembered.
        options: Of the last save.
        users: Calls that work with it now; nothing is taken from it meanwhile.
        held: Bytes of its contents when last nobody worked with it.
    """

    state: ItemState = dataclasses.field(default_factory=ItemState)
    options: DeltaOptions = dataclasses.field(default_factory=DeltaOptions)
    users: int = 0
    held: int = 0


class Sessions:
    """States by root and item, the one used last at the end.

    What falls out costs the next save of that item something, never an error: without
    contents it reads what it compares with from the store, without a state it writes
    everything in full.

    Args:
        held_bytes: Contents that roots other than the one used last may hold.
        states: Most states; those of the root used last may be more.
    """

    def __init__(self, *, held_bytes: float = math.inf, states: float = math.inf):
        self._held_bytes = held_bytes
        self._most = states
        self._sessions: collections.OrderedDict[tuple[str, str], _Session] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()
        self._process = os.getpid()

    @contextlib.contextmanager
    def known(self, place: Place) -> Iterator[Stored | None]:
        """What a save that begins may rely on; none begins to write meanwhile.

        None: nothing, because nothing is stored there, or by a save that is not done.
        """
        if place.root_url is None:
            yield None
            return
        with self._using(place) as session:
            state = session.state
            if not state.lock.acquire(blocking=False):
                yield None
                return
            try:
                yield state.stored()
            finally:
                state.lock.release()

    def save(self, request: SaveRequest) -> SaveReport:
        """Write one step; on return it is durable and committed.

        Raises:
            StorageError: The storage refused something; nothing of this save counts.
            ConflictError: A prune took this save for dead; nothing of it counts.
            PeerError: Another process did not answer; nothing of this save counts.
            DisagreementError: The processes do not save the same; nothing of it counts.
            DeltaError: What another process failed with, of the class it had there.
        """
        if request.place.root_url is None:
            report = save.run(request, ItemState())
        else:
            with self._using(request.place) as session:
                session.options = request.options
                report = save.run(request, session.state)
        monitoring.saved(report)
        return report

    def restore(
        self,
        place: Place,
        target: Target | None,
        options: DeltaOptions,
        *,
        on_corruption: OnCorruption = "raise",
        job: Job = ALONE,
        live: Live | None = None,
    ) -> Restored:
        """Restore an item of a step; what is stored of it is the next save's base.

        What was stored last, or restored, is where `live` may come from.

        Raises:
            NotFoundError: The step, or the store it needs, is not there.
            StructureError: The target does not fit the step.
            CorruptionError: Something stored is damaged past healing.
            DeltaError: What another process of `job` failed with.
        """
        started = time.time()
        keys.remember(options.encryption)
        session = self._sessions.get(_key(place))
        if live is not None and session is not None:
            # A save may change it meanwhile. Then less of it is found, and nothing
            # wrong: what rows say is held against what is live, and what comes of it
            # against the rows of the step.
            live = dataclasses.replace(live, known=session.state.base)
        result = fallback.run(
            place, target, options, on_corruption=on_corruption, job=job, live=live
        )
        if place.root_url is not None and result.base.store_uuid:
            with self._using(place) as used, used.state.lock:
                used.state.base = result.base
                if job.primary:
                    cost = RestoreCost.of(
                        result.report,
                        started=started,
                        host=owners.this_process().host_name,
                    )
                    used.state.history.restored(cost)
        monitoring.restored(result.report)
        return result

    def confirm(self, place: Place, job: Job) -> None:
        """Check that the step that was saved last is there and this job's.

        Args:
            place: The item of the step.
            job: The processes that have saved it; all of them have ended their part.

        Raises:
            NotFoundError: It is not there.
            ConflictError: Another job saved into the same folder.
        """
        Round.clear_ended(job)
        session = self._sessions.get(_key(place))
        upkeep.confirm(place, session.state if session else None)

    def close(self) -> None:
        """Release all pins and sweep; the states stay, and may be used again."""
        for session in list(self._sessions.values()):
            upkeep.close(session.state, session.options)

    def forget(self, root: str | None = None) -> None:
        """Release and sweep, and give back the memory; not what is in use now.

        Args:
            root: Only what belongs to this root; None: everything.
        """
        with self._lock:
            gone = [
                self._sessions.pop(key)
                for key, session in list(self._sessions.items())
                if root in (None, key[0]) and not session.users
            ]
        for session in gone:
            upkeep.close(session.state, session.options)

    def release(self) -> None:
        """Release the pins, for the end of the process: no threads, no sweep.

        A child made by `fork` has a copy of everything; the pins are its parent's.
        """
        if os.getpid() != self._process:
            return
        for session in list(self._sessions.values()):
            if not session.users:
                upkeep.release(session.state)

    @contextlib.contextmanager
    def _using(self, place: Place) -> Iterator[_Session]:
        key = _key(place)
        with self._lock:
            session = self._sessions.setdefault(key, _Session())
            session.users += 1
        try:
            yield session
        finally:
            with self._lock:
                session.users -= 1
                if not session.users and self._held_bytes < math.inf:
                    session.held = session.state.base.held_bytes
                self._sessions.move_to_end(key)
                gone = self._evicted(key[0])
            for old in gone:
                upkeep.release(old.state)

    def _evicted(self, last_root: str) -> list[_Session]:
        """Drop contents down to the bound; take out what are too many states."""
        others = [key for key in self._sessions if key[0] != last_root]
        held = sum(self._sessions[key].held for key in others)
        idle = [key for key in others if not self._sessions[key].users]
        for session in map(self._sessions.__getitem__, idle):
            if held <= self._held_bytes:
                break
            session.state.base.drop_contents()
            session.state.digests = None
            held, session.held = held - session.held, 0
        gone = []
        for key in idle:
            if len(self._sessions) <= self._most:
                break
            gone.append(self._sessions.pop(key))
        return gone


def _key(place: Place) -> tuple[str, str]:
    return place.root_url or "", place.item
