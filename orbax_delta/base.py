"""What is stored of an item and, where it is at hand, the content of it.

Rows and content of the last committed save (or restored step), by leaf path and box.
An entry that a save replaces is valid once that save commits; an abort forgets every
entry that the save touched, so the next record of those chunks is full.

A box outlives its entry: all processes that hold a leaf must cut it alike, whatever
each of them still knows of the chunks, and whichever of them writes which.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Set

from orbax_delta import records
from orbax_delta.chunks import Box
from orbax_delta.codecs import Bytes
from orbax_delta.manifests import LeafEntry
from orbax_delta.parts import Row


@dataclasses.dataclass(slots=True, kw_only=True)
class Entry:
    """One stored chunk.

    Attributes:
        row: Where it is stored.
        content: Private copy of its content; None: not held, it can be read.
        idle: Saves in a row that found it unchanged.
        grace: As many of those the copy outlives.
        skip: Saves that write it in full without trying a delta.
    """

    row: Row
    content: Bytes | None
    idle: int = 0
    grace: int = 0
    skip: int = 0

    def checked_content(self) -> Bytes | None:
        """The content if it still is what the row says (memory can rot too)."""
        if self.content is None or records.digest(self.content) != self.row.digest:
            return None
        return self.content


@dataclasses.dataclass(slots=True)
class _LeafBase:
    dtype: str
    shape: tuple[int, ...]
    layout: str
    entries: dict[Box, Entry | None]


class Base:
    """Entries of one item, with the identity of the save they come from.

    Attributes:
        store_uuid: Store that the rows point into.
        key: Fingerprint of the key that the records are sealed with; empty for none.
        save_index: Saves up to and including the one the rows come from.
        predecessor: What the next MANIFEST says of that save; None before any.
        pack_sizes: Bytes of packs that the rows refer to, as far as known.
        dither_seed: Of rounded leaves, since this base began; 0: none yet.
    """

    def __init__(
        self,
        *,
        store_uuid: str = "",
        key: str = "",
        save_index: int = -1,
        predecessor: Mapping[str, object] | None = None,
    ) -> None:
        self.store_uuid = store_uuid
        self.key = key
        self.save_index = save_index
        self.predecessor = predecessor
        self.pack_sizes: Mapping[str, int] = {}
        self.dither_seed = 0
        self._leaves: dict[str, _LeafBase] = {}
        self._touched: list[tuple[str, Box]] = []

    @classmethod
    def of_step(
        cls,
        leaves: Iterable[LeafEntry],
        rows: Iterable[Row],
        *,
        store_uuid: str,
        key: str,
        save_index: int,
        predecessor: Mapping[str, object],
    ) -> "Base":
        """The base that a restored step leaves behind: rows without content."""
        base = cls(
            store_uuid=store_uuid,
            key=key,
            save_index=save_index,
            predecessor=predecessor,
        )
        entries = list(leaves)
        for row in rows:
            base._put(entries[row.leaf], row.box, Entry(row=row, content=None))
        return base

    def known_boxes(self, leaf: LeafEntry, layout: str) -> Set[Box]:
        """Boxes in which `leaf` is stored, as far as all that hold it know them.

        None if its dtype or shape has changed, nor if other processes hold it now than
        when it was cut: they do not know each other's boxes.
        """
        found = self._match(leaf)
        if found is None or found.layout not in ("", layout):
            return frozenset()
        return found.entries.keys()

    def get(self, leaf: LeafEntry, box: Box) -> Entry | None:
        """The stored chunk, if there is one of the same dtype and shape."""
        found = self._match(leaf)
        return found.entries.get(box) if found else None

    def _match(self, leaf: LeafEntry) -> _LeafBase | None:
        found = self._leaves.get(leaf.name)
        if found and (found.dtype, found.shape) == (leaf.dtype, leaf.shape):
            return found
        return None

    def _put(
        self, leaf: LeafEntry, box: Box, entry: Entry | None, layout: str = ""
    ) -> None:
        found = self._match(leaf)
        if found is None:
            found = _LeafBase(leaf.dtype, leaf.shape, layout, {})
            self._leaves[leaf.name] = found
        found.entries[box] = entry

    @property
    def held_bytes(self) -> int:
        """Host memory that the contents take."""
        return sum(
            entry.content.nbytes
            for leaf in self._leaves.values()
            for entry in leaf.entries.values()
            if entry is not None and entry.content is not None
        )

    def drop_contents(self) -> None:
        """Keep the rows alone; what a save needs of the contents it reads."""
        for leaf in self._leaves.values():
            for entry in leaf.entries.values():
                if entry is not None:
                    entry.content = None

    def packs(self) -> set[str]:
        """Names of all packs that the rows refer to."""
        return {
            ref.pack
            for leaf in self._leaves.values()
            for entry in leaf.entries.values()
            if entry is not None
            for ref in entry.row.refs
            if ref.pack
        }

    def forget_packs(self, gone: Set[str]) -> int:
        """Drop entries that need a pack of `gone`; returns how many."""
        dropped = 0
        for leaf in self._leaves.values():
            for box, entry in leaf.entries.items():
                if entry and any(ref.pack in gone for ref in entry.row.refs):
                    leaf.entries[box] = None
                    dropped += 1
        return dropped

    def forget(self, leaf: LeafEntry, box: Box) -> None:
        """Drop an entry whose records are known to be damaged."""
        found = self._match(leaf)
        if found and box in found.entries:
            found.entries[box] = None

    def clear(self) -> None:
        """Drop all of it, boxes too: it is not what other processes have."""
        self._leaves.clear()
        self._touched.clear()

    def touch(self, leaf: LeafEntry, box: Box) -> None:
        """Announce that a running save is about to change this entry's content."""
        self._touched.append((leaf.name, box))

    def commit(
        self,
        stored: Iterable[tuple[LeafEntry, Box, Entry | None]],
        *,
        layouts: Mapping[str, str],
        pack_sizes: Mapping[str, int],
        store_uuid: str,
        predecessor: Mapping[str, object],
    ) -> None:
        """Take over the rows of a committed save; what it lacks is dropped.

        Args:
            stored: Every chunk of every shard that this process holds; no entry for
                one that another process wrote.
            layouts: By name of a leaf, a name for which process holds what of it.
            pack_sizes: Bytes of packs that the rows refer to, as far as known.
            store_uuid: Store that the rows point into.
            predecessor: Identity of that save.
        """
        self.clear()
        for leaf, box, entry in stored:
            self._put(leaf, box, entry, layouts[leaf.name])
        self.pack_sizes = pack_sizes
        self.store_uuid = store_uuid
        self.save_index += 1
        self.predecessor = predecessor

    def abort(self) -> None:
        """Forget what a failed save touched; its content no longer fits its row."""
        for name, box in self._touched:
            leaf = self._leaves.get(name)
            if leaf and box in leaf.entries:
                leaf.entries[box] = None
        self._touched.clear()
