"""A run in a bucket, saved and restored as Orbax asks a handler to, without Orbax.

A manager reaches a bucket only with s3fs installed; what it asks of the handler is the
same. Does not belong here: the bucket (`buckets`, `gcs`), and what must hold.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath
from strategies import LITTLE_OPTIONS, assert_same_tree, little_state

import orbax_delta
from orbax_delta import check, prune
from orbax_delta.store import DeltaStore, Folder


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A run.

    Attributes:
        url: Its root.
        options: What its handlers need to be told, whatever is tried.
    """

    url: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def handler(self, **options: Any) -> orbax_delta.DeltaCheckpointHandler:
        """A handler with many small chunks and packs."""
        settings = {**LITTLE_OPTIONS, **self.options, **options}
        return orbax_delta.DeltaCheckpointHandler(orbax_delta.DeltaOptions(**settings))

    def item(self, step: int) -> epath.Path:
        """Folder of a step's item, as a manager that commits by marker names it."""
        return epath.Path(f"{self.url}/{step}/default")

    def save(
        self, saver: orbax_delta.DeltaCheckpointHandler, step: int, state: Any = None
    ) -> None:
        """Save a step as Orbax asks a handler to."""
        tree = little_state(step) if state is None else state
        saver.save(self.item(step), orbax_delta.DeltaSave(tree))
        saver.finalize(self.item(step))

    def remove(self, step: int) -> None:
        """Delete a step as Orbax does, with all that is in its folder."""
        Folder(f"{self.url}/{step}").clear()

    def restored(self, step: int) -> Any:
        """A step, as a new process finds it."""
        return self.handler().restore(self.item(step))

    def assert_restores(self, steps: Iterable[int]) -> None:
        """Every one of these steps has the bits that were saved."""
        for step in steps:
            assert_same_tree(self.restored(step), little_state(step))


def live(run: Run) -> None:
    """Save, delete, prune, restart, verify; steps 3 to 6 stay."""
    saver = run.handler()
    for step in range(6):
        run.save(saver, step)
        if step >= 3:
            run.remove(step - 3)
    assert saver.last_save_report.chunks_by_form["reference"] > 0
    saver.close()
    run.assert_restores([3, 4, 5])
    again = run.handler()
    assert_same_tree(again.restore(run.item(5)), little_state(5))
    run.save(again, 6)
    assert again.last_save_report.chunks_by_form["reference"] > 0
    again.close()
    run.assert_restores([3, 4, 5, 6])
    store = DeltaStore.open(Folder(run.url))
    assert list(prune.plan(store).dead) == []
    assert store.pins.names() == store.condemned.names() == []
    report = check.verify(run.url)
    assert not report.problems
    assert set(report.whole_steps) == set("3456")
