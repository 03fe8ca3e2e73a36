"""What stays on disk after a long run, against what its steps and bases need of it."""

import dataclasses
import itertools
import pathlib

from counting import raw_bytes
from measure import Root
from rich.console import Console
from rich.progress import Progress
from workloads import WORKLOADS, Setup

from orbax_delta import listing, steps

LOOK_EVERY = 10


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DiskResult:
    """A run with default options and `max_to_keep=3`, looked at every tenth save.

    Attributes:
        workload: Name of the workload.
        scale: Its scale.
        saves: How many there were.
        state_bytes: Bytes of one state in memory.
        root_bytes: Bytes of all files of the root.
        live_bytes: Bytes of the records that rows of its steps and kept bases name,
            each counted once.
    """

    workload: str
    scale: str
    saves: int
    state_bytes: int
    root_bytes: tuple[int, ...]
    live_bytes: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Bytes on disk over bytes of live records, after the last save."""
        return self.root_bytes[-1] / self.live_bytes[-1]


def live_record_bytes(root: pathlib.Path) -> int:
    """Returns the bytes of the records that anything in a root still needs.

    Raises:
        DeltaError: Something of the root cannot be read.
    """
    lengths = {}
    for item in listing.read_root(str(root)).everything:
        if item.error is not None:
            raise item.error
        for row in steps.open_step(item.place).rows:
            for ref in row.refs:
                if ref.pack:
                    lengths[ref.pack, ref.offset] = ref.length
    return sum(lengths.values())


def measure_disk(
    name: str, setup: Setup, folder: pathlib.Path, saves: int, console: Console
) -> DiskResult:
    """Saves a live run after each of its steps and looks at the disk now and then.

    Raises:
        AssertionError: The last state came back changed.
    """
    root = Root(folder / "disk", delta=True, max_to_keep=3)
    root_bytes, live_bytes = [], []
    states = itertools.islice(WORKLOADS[name](setup), saves)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"disk after a long run: {name}", total=saves)
        for step, state in enumerate(states):
            root.save(step, state)
            if (step + 1) % LOOK_EVERY == 0 or step + 1 == saves:
                root_bytes.append(root.size_bytes())
                live_bytes.append(live_record_bytes(root.path))
            progress.advance(task)
    root.check(saves - 1, state)
    root.close()
    return DiskResult(
        workload=name,
        scale=setup.scale,
        saves=saves,
        state_bytes=raw_bytes(state),
        root_bytes=tuple(root_bytes),
        live_bytes=tuple(live_bytes),
    )
