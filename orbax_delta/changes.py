"""What changed: chunks of a snapshot compared with what is stored of them.

A chunk is unchanged if its digest is the stored one; of the others, constant ones need
no record. Does not belong here: what follows from what (`following`), coding, writing.
"""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import TypeVar

import numpy as np
import xxhash

from orbax_delta import chunks, codecs, ownership, records
from orbax_delta.background import Pool, batches, each
from orbax_delta.base import Base, Entry
from orbax_delta.chunks import Box
from orbax_delta.codecs import Bytes
from orbax_delta.dtypes import Rule
from orbax_delta.grids import Codes
from orbax_delta.leaves import Brought, HostLeaf, HostShard
from orbax_delta.manifests import LeafEntry
from orbax_delta.options import DeltaOptions
from orbax_delta.parts import Ref, Row
from orbax_delta.rounding import Errors, Lazily, Narrowing, OnGrid, Rounding

BATCH_BYTES = 2 << 20
"""A thread takes small chunks together, up to about this much."""

_LOOK_BYTES = 4 << 20

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk of the snapshot and what is stored in its place.

    Attributes:
        leaf_index: Index of its leaf.
        leaf: Its leaf.
        box: Its place in the leaf.
        shard: Box and content of the shard that it lies in.
        stored: The entry of the base, if any.
        content_bytes: Size of the content.
        rounding: What becomes of it when it is stored; None: it stays as it is.
        referred: Whether the list of another chunk may build on its own.
    """

    leaf_index: int
    leaf: LeafEntry
    box: Box
    shard: HostShard
    stored: Entry | None
    content_bytes: int
    rounding: Rounding | None = None
    referred: bool = False

    @property
    def copied(self) -> bool:
        """Whether it was brought to the host; else it is as stored, see `transfers`."""
        _, held = self.shard
        return not isinstance(held, Brought) or held.holds(self.box)

    @property
    def readable(self) -> bool:
        """Whether `content` can tell what is in it."""
        return self.copied or bool(self.stored and self.stored.content is not None)

    @property
    def needs_copy(self) -> bool:
        """Whether what is stored of it is compared with it at the next save."""
        return isinstance(self.rounding, Lazily)

    def content(self) -> Bytes:
        """`uint8[n]`, what is stored of it; of readable chunks."""
        return self.rounded()[0]

    def coded(self) -> tuple[Bytes, Codes | None]:
        """What is stored of it, and its codes where that lies on a grid."""
        if isinstance(self.rounding, OnGrid | Narrowing):
            return self.rounding.coded(self.raw())
        return self.rounded()[0], None

    def rounded(self) -> tuple[Bytes, Errors | None]:
        """What is stored of it, and how far that lies from what it is."""
        raw = self.raw()
        return self.rounding.apply(raw) if self.rounding else (raw, None)

    def raw(self) -> Bytes:
        """`uint8[n]`, a view where the chunk is contiguous; of readable chunks."""
        if not self.copied and self.stored and self.stored.content is not None:
            return self.stored.content
        origin, held = self.shard
        if isinstance(held, Brought):
            return self.leaf.element.to_content(held.piece(self.box, origin))
        piece = held[chunks.slices(self.box, origin)]
        return self.leaf.element.to_content(np.asarray(piece))

    @property
    def word_count(self) -> int:
        """Words of the content, the units that are compared."""
        return self.content_bytes // self.leaf.element.word_bytes

    @property
    def spread(self) -> int:
        """A number fixed by leaf and box, to stagger periodic work."""
        name = f"{self.leaf.name} {self.box}".encode("utf-8", "surrogatepass")
        return xxhash.xxh3_64_intdigest(name)


class Status(enum.Enum):
    """What a save has to do about a chunk."""

    SAME = "reference"
    CONSTANT = "constant"
    DERIVED = "derived"
    SHARED = "shared"
    CHANGED = "changed"
    REFRESH = "refresh"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A chunk compared.

    Attributes:
        chunk: The chunk.
        status: What to do.
        digest: Digest of its content now.
        word: The element of a constant chunk.
        source: Index of the finding that a derived chunk follows from, or a relative
            one builds on.
        rule: The cast by which it follows; NONE: it is a copy.
        refs: Records of another run or item that a shared chunk refers to.
        errors: How far what is stored lies from what the chunk is.
    """

    chunk: Chunk
    status: Status
    digest: bytes
    word: bytes = b""
    source: int = -1
    rule: Rule = Rule.NONE
    refs: tuple[Ref, ...] = ()
    errors: Errors | None = None

    @property
    def wants_source(self) -> bool:
        """Whether its values lie on a grid that another chunk makes."""
        rounding, errors = self.chunk.rounding, self.errors
        if not isinstance(rounding, OnGrid) or errors is None or errors.exact:
            return False
        return rounding.source is not None

    @property
    def relative(self) -> bool:
        """Whether its record will build on the list of `source`."""
        return self.wants_source and self.source >= 0


ContentKey = tuple[bytes, int, int]
"""What contents that may be equal agree in: digest, size, and size of a word."""


def content_key(finding: Finding) -> ContentKey:
    """What any chunk of the same content has in common with this one."""
    chunk = finding.chunk
    return finding.digest, chunk.content_bytes, chunk.leaf.element.word_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A snapshot in chunks.

    Attributes:
        own: Chunks that this process writes, in order of leaf and box.
        others: Leaf and box of those that it holds, and another process writes.
    """

    own: Sequence[Chunk]
    others: Sequence[tuple[LeafEntry, Box]]


def cut(
    leaves: Sequence[HostLeaf], base: Base, options: DeltaOptions, *, process: int
) -> Cut:
    """Cut all that this process holds, and find out what of it is its own."""
    own: list[Chunk] = []
    others: list[tuple[LeafEntry, Box]] = []
    # Of other leaves not even the shapes are alike on all processes.
    spread = [leaf.entry for leaf in leaves if leaf.layout.holders]
    names = (entry.name for entry in spread)
    families = dict(zip(names, ownership.families(spread)))
    for index, leaf in enumerate(leaves):
        if not leaf.shards:
            continue
        element = leaf.entry.element
        family = families.get(leaf.entry.name, "")
        known = base.known_boxes(leaf.entry, leaf.layout.name)
        for shard in leaf.shards:
            holders = leaf.layout.holders.get(shard[0], (process,))
            for box in _boxes(leaf.entry, shard[0], known, options.chunk_bytes):
                if ownership.owner(family, box, holders) != process:
                    others.append((leaf.entry, box))
                    continue
                chunk = Chunk(
                    leaf_index=index,
                    leaf=leaf.entry,
                    box=box,
                    shard=shard,
                    stored=base.get(leaf.entry, box),
                    content_bytes=element.content_bytes(chunks.element_count(box)),
                )
                own.append(chunk)
    return Cut(own=own, others=others)


def _boxes(
    leaf: LeafEntry, box: Box, known: Iterable[Box], chunk_bytes: int
) -> list[Box]:
    # Never by the width of narrow elements: a bf16 copy is cut as its fp32 master is.
    max_elements = max(1, chunk_bytes // max(4, leaf.element.dtype.itemsize))
    fresh = list(chunks.cut(box, max_elements))
    known = set(known)
    if not known or known.issuperset(fresh):
        return fresh
    return chunks.recut(box, known, max_elements)


def compare(
    wanted: Sequence[Chunk],
    refresh_every: int | None,
    executor: Pool,
    *,
    elsewhere: Set[str] = frozenset(),
) -> list[Finding]:
    """Look at every chunk once.

    Args:
        wanted: The chunks.
        refresh_every: As the option; None: nothing is written anew now.
        executor: Where to do it.
        elsewhere: Packs that other runs need: what lies in them alone is not written
            anew for its age, which would undo the sharing.
    """

    def look(chunk: Chunk) -> Finding:
        return _look(chunk, refresh_every, elsewhere)

    return list(mapped(executor, look, wanted, lambda chunk: chunk.content_bytes))


def mapped(
    executor: Pool,
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    weigh: Callable[[_Item], int],
) -> Iterator[_Result]:
    """`map` for what is quickly done: a thread takes many items at a time."""
    together = batches(items, weigh, least=_LOOK_BYTES)
    return itertools.chain.from_iterable(executor.map(each(function), together))


def _look(chunk: Chunk, refresh_every: int | None, elsewhere: Set[str]) -> Finding:
    row = chunk.stored.row if chunk.stored else None
    if row is not None and not chunk.copied:
        return Finding(chunk=chunk, status=Status.SAME, digest=row.digest)
    content, errors = chunk.rounded()
    found = records.digest(content)
    word = b""
    if row is not None and row.digest == found:
        refresh = is_due(row, refresh_every, elsewhere)
        status = Status.REFRESH if refresh else Status.SAME
    else:
        constant = codecs.constant_word(content, chunk.leaf.element.word_bytes)
        status = Status.CHANGED if constant is None else Status.CONSTANT
        word = constant or b""
    return Finding(chunk=chunk, status=status, digest=found, word=word, errors=errors)


def is_due(row: Row, refresh_every: int | None, elsewhere: Set[str]) -> bool:
    """Whether a chunk that has not changed is written anew for its age.

    Args:
        row: What is stored of it.
        refresh_every: As the option; None: nothing is written anew now.
        elsewhere: Packs that other runs need.
    """
    due = refresh_every is not None and row.age + 1 >= refresh_every
    own = bool(row.refs[-1].pack) and row.rule is Rule.NONE
    return due and own and not _lies_in(row, elsewhere)


def _lies_in(row: Row, packs: Set[str]) -> bool:
    return {ref.pack for ref in row.refs if ref.pack} <= packs
