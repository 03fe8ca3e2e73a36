"""Findings of a verification: what is wrong, and which steps it concerns.

Equal findings of several steps become one; steps that have gone meanwhile are left out
in the end. Does not belong here: finding anything.
"""

import dataclasses
from collections.abc import Collection, Iterable

from orbax_delta.errors import DeltaError
from orbax_delta.listing import Item
from orbax_delta.manifests import parse_manifest
from orbax_delta.store import DeltaStore


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: What was found and what was expected.
        file: The file at fault, relative to the root where it lies below it.
        steps: Of the steps and bases looked at those that need it; empty: it concerns
            the store.
        item: Item of the steps; empty where it concerns no single one.
        leaf: Leaf that does not restore; empty where it concerns no single one.
        chunk: Chunk of the leaf, as `[0:16, 0:32]`.
        healed_by: Step or base whose records hold the same content: the chunk restores
            all the same, and a repair writes it back.
    """

    what: str
    file: str
    steps: tuple[str, ...] = ()
    item: str = ""
    leaf: str = ""
    chunk: str = ""
    healed_by: str = ""


class Findings:
    """What was found so far.

    Attributes:
        damaged: Steps and bases that do not restore.
    """

    def __init__(self, store: DeltaStore) -> None:
        self._store = store
        self._found: dict[Problem, list[Item]] = {}
        self.damaged: set[str] = set()

    def add(self, problem: Problem, *items: Item) -> None:
        """A problem, and what it concerns."""
        needing = self._found.setdefault(problem, [])
        needing += [item for item in items if item not in needing[-1:]]

    def add_damage(self, item: Item, problem: Problem) -> None:
        """A problem for which a step does not restore."""
        self.damaged.add(item.step)
        self.add(problem, item)

    def problems(self, gone: Collection[str]) -> list[Problem]:
        """All in order of discovery, less what concerns only steps in `gone`."""
        found = []
        for problem, items in self._found.items():
            left = step_names(item for item in items if item.key not in gone)
            if left or not items:
                found.append(dataclasses.replace(problem, steps=left))
        return found

    def gone(self) -> set[str]:
        """Keys of MANIFESTs with a problem that have gone, or were replaced."""
        blamed = {item.key: item for items in self._found.values() for item in items}
        return {key for key, item in blamed.items() if not self.is_there(item)}

    def is_there(self, item: Item) -> bool:
        """Whether what was found of an item is still there, and is the same save."""
        key = item.lost_part or item.key
        try:
            data = self._store.read(key)
            if data is None or item.manifest is None:
                return data is not None
            return parse_manifest(data, where=key).attempt == item.manifest.attempt
        except DeltaError:
            return True  # what cannot be read has not gone


def step_names(items: Iterable[Item]) -> tuple[str, ...]:
    """Steps of the items, each once."""
    return tuple(dict.fromkeys(item.step for item in items))
