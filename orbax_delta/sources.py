"""What can be exported and imported: a tree of unread leaves, and where it comes from.

A step of this package is one; `tensorfolders` and `orbaxfolders` read others. Does not
belong here: writing anything.
"""

import base64
import binascii
import dataclasses
import fnmatch
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from orbax_delta import chunks, healing, listing, reader, steps, trees
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from orbax_delta.listing import Item, Progress
from orbax_delta.manifests import (
    Json,
    Manifest,
    encode_manifest,
    parse_manifest,
)
from orbax_delta.places import Place
from orbax_delta.reader import Fetched, Request
from orbax_delta.steps import Step
from orbax_delta.unread import Piece, Unread

_MAX_NAMED = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A state that lies somewhere, of which nothing has been read yet.

    Attributes:
        label: What it is, for messages.
        structure: Its tree (`trees.flatten`).
        leaves: Its leaves, in order.
        custom_metadata: JSON that was kept with it.
        manifest: Of a step, what it says.
    """

    label: str
    structure: Json
    leaves: tuple[Unread, ...]
    custom_metadata: Json = None
    manifest: Manifest | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves in memory."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.pieces)

    def select(self, include: Sequence[str]) -> "Source":
        """Only the leaves whose path fits a pattern; no pattern given: all.

        A list or tuple that loses members becomes a dict by index, so that every path
        stays what it was; what has no leaves stays.

        Raises:
            InvalidInputError: A pattern fits no leaf.
        """
        if isinstance(include, str):
            raise InvalidInputError(
                f"include is the text {include!r:.80}; expected a list of patterns"
            )
        if not include:
            return self
        names = [leaf.entry.name for leaf in self.leaves]
        for pattern in include:
            if not fnmatch.filter(names, pattern):
                raise InvalidInputError(
                    f"the pattern {pattern!r} fits no leaf of {self.label}; there are "
                    + _some(names)
                )
        kept = [
            index
            for index, name in enumerate(names)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
        ]
        numbers = {index: number for number, index in enumerate(kept)}
        return dataclasses.replace(
            self,
            structure=_pruned(self.structure, numbers),
            leaves=tuple(self.leaves[index] for index in kept),
        )

    def tree(self) -> Any:
        """A plain tree of the unread leaves, to be saved like any other."""
        paths = [leaf.entry.path for leaf in self.leaves]
        return trees.rebuild(self.structure, self.leaves, paths=paths, where=self.label)

    def counted(self, progress: Progress) -> "Source":
        """The same; `progress` is told of each piece that is read for the first time.

        A save reads what it writes twice: once to compare, once to code.
        """
        total = sum(len(leaf.pieces) for leaf in self.leaves)
        seen: set[tuple[int, int]] = set()
        lock = threading.Lock()

        def read(place: tuple[int, int], piece: Piece) -> np.ndarray:
            content = piece.read()
            with lock:
                if place not in seen:
                    seen.add(place)
                    progress("chunks", len(seen), total)
            return content

        return self._with_reads(read)

    def _with_reads(
        self, read: Callable[[tuple[int, int], Piece], np.ndarray]
    ) -> "Source":
        leaves = [
            dataclasses.replace(
                leaf,
                pieces=tuple(
                    Piece(box=piece.box, read=functools.partial(read, (i, k), piece))
                    for k, piece in enumerate(leaf.pieces)
                ),
            )
            for i, leaf in enumerate(self.leaves)
        ]
        return dataclasses.replace(self, leaves=tuple(leaves))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _pruned(node: Json, numbers: Mapping[int, int]) -> Json:
    """A tree with some of its leaves, under new numbers.

    A node goes if all its leaves do; what has none (None, an empty dict) stays.
    """
    if "leaf" in node:
        return {"leaf": numbers[node["leaf"]]}
    if "none" in node:
        return node
    for kind in ("list", "tuple"):
        if kind in node:
            members = node[kind]
            if all(_stays(member, numbers) for member in members):
                return {kind: [_pruned(member, numbers) for member in members]}
            pairs = [[["int", hex(i)], member] for i, member in enumerate(members)]
            return {"dict": _pruned_pairs(pairs, numbers)}
    kind = "node" if "node" in node else "dict"
    return node | {kind: _pruned_pairs(node[kind], numbers)}


def _pruned_pairs(pairs: Json, numbers: Mapping[int, int]) -> Json:
    return [
        [key, _pruned(child, numbers)] for key, child in pairs if _stays(child, numbers)
    ]


def _stays(node: Json, numbers: Mapping[int, int]) -> bool:
    leaves = list(_leaves(node))
    return not leaves or any(leaf in numbers for leaf in leaves)


def _leaves(node: Json) -> Iterator[int]:
    """Numbers of the leaves below a node."""
    if "leaf" in node:
        yield node["leaf"]
    members = node.get("list") or node.get("tuple") or ()
    pairs = node.get("dict") or node.get("node") or ()
    for child in (*members, *(child for _, child in pairs)):
        yield from _leaves(child)


# --- steps ----------------------------------------------------------------------------


def of_step(url: str, step: str, item: str | None = None) -> Source:
    """A step, or a kept base, of a root.

    Args:
        url: The root, or a folder with self-contained checkpoints.
        step: Name or number of the step.
        item: Which item; None: the only one.

    Raises:
        NotFoundError: There is no such root, step or item.
        InvalidInputError: The step has several items and none is named.
        FormatError: A file of the step is not what it should be.
        CorruptionError: A file of the step is damaged or missing.
    """
    found = [one for one in listing.read_root(url).select([step]) if one.finished]
    return of_place(_only(found, step, item).place)


def of_place(place: Place) -> Source:
    """An item of a step.

    Raises:
        NotFoundError: It is not there, or its store is not.
        FormatError: A file of it is not what it should be.
        CorruptionError: A file of it is damaged or missing.
    """
    try:
        opened = steps.open_step(place)
    except CorruptionError:
        _require_there(place)
        raise
    manifest = opened.manifest
    by_leaf: list[list[Piece]] = [[] for _ in manifest.leaves]
    for row in opened.rows:
        request = Request(leaf=manifest.leaves[row.leaf], row=row)
        read = functools.partial(_read, opened, request)
        by_leaf[row.leaf].append(Piece(box=row.box, read=read))
    return Source(
        label=opened.place.label,
        structure=manifest.tree,
        leaves=tuple(
            Unread(entry=entry, pieces=tuple(pieces))
            for entry, pieces in zip(manifest.leaves, by_leaf, strict=True)
        ),
        custom_metadata=manifest.custom_metadata,
        manifest=manifest,
    )


def _only(found: Sequence[Item], step: str, item: str | None) -> Item:
    names = [one.place.item for one in found]
    if item is not None:
        found = [one for one in found if one.place.item == item]
    if not found:
        raise NotFoundError(
            f"step {step} has no item {item!r}; it has "
            + (", ".join(map(repr, names)) or "none that is finished")
        )
    if len(found) > 1:
        folders = ", ".join(f"{one.place.item!r} ({one.step})" for one in found)
        raise InvalidInputError(
            f"step {step} is {len(found)} items: {folders}; name one of them, by its "
            "item, or by its folder in place of the step"
        )
    if found[0].error is not None and found[0].manifest is None:
        raise found[0].error
    return found[0]


def _read(step: Step, request: Request) -> np.ndarray:
    """The content of a chunk; where it is damaged, from other records of the root."""
    try:
        content = reader.read_one(step.packs, request)
    except (CorruptionError, StorageError) as error:
        failed = Fetched(request=request, content=None, error=error)
        try:
            healed = healing.heal(step, [failed])
        except DeltaError:
            _require_there(step.place, step.manifest.attempt)
            raise
        content = healed[healing.wanted(request)].read()
    shape = chunks.box_shape(request.row.box)
    return request.leaf.element.from_content(content, shape)


def _require_there(place: Place, attempt: str | None = None) -> None:
    """What a live run has deleted is not damaged.

    Raises:
        NotFoundError: The step has gone, or was saved again.
    """
    steps.let_deletions_end()
    if steps.is_gone(place.folder, attempt):
        raise NotFoundError(
            f"{place.label} went away while it was read; a run that saves to this "
            "root deletes steps. Take a newer one"
        )


# --- what an export carries along ---------------------------------------------------


def passport(source: Source) -> str | None:
    """The MANIFEST of a step without its records, as text, to go with an export.

    It says what formats of others cannot: kinds of leaves, Python values, tuples,
    shardings, where the state comes from. Values within a bound are what they are now.
    """
    if source.manifest is None:
        return None
    bare = dataclasses.replace(
        source.manifest,
        tree=source.structure,
        leaves=[leaf.entry for leaf in source.leaves],
        packs=(),
        parts=(),
        store_uuid="",
        store_url="",
        root_uuid="",
        required_features=(),
        lossy={},
    )
    return base64.b64encode(encode_manifest(bare)).decode()


def read_passport(text: str, *, where: str) -> Manifest:
    """The MANIFEST that came with an export.

    Raises:
        FormatError: It is none.
        CorruptionError: It is damaged.
    """
    try:
        data = base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise FormatError(f"{where} carries no MANIFEST: {error}") from error
    return parse_manifest(data, where=f"the MANIFEST in {where}")


def as_saved(manifest: Manifest, leaves: tuple[Unread, ...], label: str) -> Source:
    """A source whose tree and metadata a passport tells."""
    return Source(
        label=label,
        structure=manifest.tree,
        leaves=leaves,
        custom_metadata=manifest.custom_metadata,
        manifest=manifest,
    )
