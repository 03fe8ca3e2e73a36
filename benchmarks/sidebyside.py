"""One pair of states through all handlers and all peers, in turn, again and again."""

import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import outside
import pagecache
from contenders import HANDLERS, Sample, alternate
from counting import (
    State,
    added_bytes,
    bits,
    compare_states,
    files_on_disk,
    raw_bytes,
)

SLOW_SECONDS = 5.0
"""A peer whose save takes longer than this is measured once."""

Seconds = tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PeerResult:
    """The second save of a pair by something outside Orbax.

    Attributes:
        name: Its name.
        install: How to get it, if it is not at hand; then nothing else is known.
        added_bytes: Bytes of files that are new or were written anew.
        save_seconds: Of each repetition, in order.
        restore_seconds: The same, files in the page cache.
    """

    name: str
    install: str = ""
    added_bytes: int = 0
    save_seconds: Seconds = ()
    restore_seconds: Seconds = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """What the handlers and peers made of a few successive states, in one folder.

    Attributes:
        workload: Name of the workload.
        scale: Its scale.
        folder: Where the roots lay.
        in_memory: Whether that is a file system without a disk.
        raw_bytes: Bytes of a state in memory.
        changed: Share of the elements that differ from the first state to the second;
            1 where there is one state only.
        samples: Repetitions in order, by handler.
        peers: Peers outside Orbax; measured in the first folder only.
    """

    workload: str
    scale: str
    folder: str
    in_memory: bool
    raw_bytes: int
    changed: float
    samples: Mapping[str, tuple[Sample, ...]]
    peers: tuple[PeerResult, ...] = ()

    @property
    def title(self) -> str:
        """Workload, scale and place in words."""
        place = "memory" if self.in_memory else "disk"
        return f"{self.workload}, {self.scale}, {place}"

    def added_bytes(self, handler: str) -> int:
        """Returns what the second save added, or the only one."""
        saves = self.samples[handler][0].saves
        return saves[min(1, len(saves) - 1)].added_bytes

    def total_seconds(self, handler: str) -> Seconds:
        """Returns what the second save took, or the only one, of each repetition."""
        return tuple(
            sample.saves[min(1, len(sample.saves) - 1)].total_seconds
            for sample in self.samples[handler]
        )

    def later_seconds(self, handler: str) -> Seconds:
        """Returns what each save after the second took, of all repetitions."""
        return tuple(
            saving.total_seconds
            for sample in self.samples[handler]
            for saving in sample.saves[2:]
        )

    def blocking_seconds(self, handler: str) -> Seconds:
        """Returns how long saves after the first, or the only one, kept the caller."""
        return tuple(
            saving.blocking_seconds
            for sample in self.samples[handler]
            for saving in sample.saves[1:] or sample.saves
        )

    def restore_seconds(self, handler: str) -> Seconds:
        """Returns what restores from the page cache took."""
        return tuple(sample.restore_seconds for sample in self.samples[handler])

    def cold_seconds(self, handler: str) -> Seconds:
        """Returns what restores from the disk took; empty where there is none."""
        found = (sample.cold_seconds for sample in self.samples[handler])
        return tuple(seconds for seconds in found if seconds is not None)

    def warm_seconds(self, handler: str) -> Seconds:
        """Returns what a follower's restores took; empty if there were none."""
        found = (sample.warm_seconds for sample in self.samples[handler])
        return tuple(seconds for seconds in found if seconds is not None)


def median(values: Sequence[float]) -> float:
    """Returns the median, or not-a-number of nothing."""
    return statistics.median(values) if values else float("nan")


def measure_handlers(
    workload: str,
    scale: str,
    states: Sequence[State],
    folder: pathlib.Path,
    repetitions: int,
    done: Callable[[], None],
) -> Pair:
    """Measures the handlers in turn in a folder.

    Args:
        workload: Name, for the result.
        scale: Name, for the result.
        states: Successive states.
        folder: Where a temporary folder is made.
        repetitions: How often each handler has its turn.
        done: Called after each turn.

    Raises:
        AssertionError: A restored state differs from the saved one.
    """
    samples: dict[str, list[Sample]] = {handler: [] for handler in HANDLERS}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for handler, sample in alternate(states, pathlib.Path(temporary), repetitions):
            samples[handler].append(sample)
            done()
    return Pair(
        workload=workload,
        scale=scale,
        folder=str(folder),
        in_memory=pagecache.in_memory(folder),
        raw_bytes=raw_bytes(states[-1]),
        changed=changed_share(states),
        samples={handler: tuple(found) for handler, found in samples.items()},
    )


def changed_share(states: Sequence[State]) -> float:
    """Returns the share of elements that differ in the second state; 1 of one state."""
    if len(states) == 1:
        return 1.0
    changes = compare_states(*states[:2])
    return sum(c.changed for c in changes) / sum(c.elements for c in changes)


def measure_peers(
    states: Sequence[State],
    folder: pathlib.Path,
    repetitions: int,
    done: Callable[[str], None],
) -> tuple[PeerResult, ...]:
    """Measures the second save of a pair by each peer that is at hand.

    Args:
        states: Two states.
        folder: Where a temporary folder is made.
        repetitions: How often, unless it is slow.
        done: Told each peer's name when its turn comes.

    Raises:
        AssertionError: A peer gave back other bits than it was given.
    """
    leaves = [jtu.tree_leaves(state) for state in states[:2]]
    results = []
    for name, peer in outside.PEERS.items():
        done(name)
        if outside.missing(peer):
            results.append(PeerResult(name=name, install=peer.install))
            continue
        if repetitions > 1:  # the first use loads its libraries
            small = [[jnp.zeros(8192)], [jnp.ones(8192)]]
            _peer_once(peer, small, folder)
        runs: list[tuple[int, float, float]] = []
        while len(runs) < repetitions and (not runs or runs[0][1] < SLOW_SECONDS):
            runs.append(_peer_once(peer, leaves, folder))
        added, saves, restores = zip(*runs, strict=True)
        results.append(
            PeerResult(
                name=name,
                added_bytes=added[0],
                save_seconds=saves,
                restore_seconds=restores,
            )
        )
    return tuple(results)


def _peer_once(
    peer: type[outside.Peer], leaves: Sequence[outside.Leaves], folder: pathlib.Path
) -> tuple[int, float, float]:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        kept, scratch = pathlib.Path(temporary, "kept"), pathlib.Path(temporary, "rest")
        kept.mkdir()
        scratch.mkdir()
        used = peer(kept, scratch)
        used.put(0, leaves[0])
        before = files_on_disk(kept)
        begin = time.perf_counter()
        used.put(1, leaves[1])
        saved = time.perf_counter()
        added = added_bytes(before, files_on_disk(kept))
        again = time.perf_counter()
        found = used.get(1)
        restored = time.perf_counter()
        for wanted, given in zip(leaves[1], found, strict=True):
            if not np.array_equal(bits(wanted), given):
                raise AssertionError(f"{peer.__name__} gave back other bits")
    return added, saved - begin, restored - again
