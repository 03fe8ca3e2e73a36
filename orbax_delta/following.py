"""What follows from what: chunks that are copies or casts of others of the same save.

One that is bit for bit a copy or a defined cast of another chunk is derived from it,
and one on a grid that another chunk makes builds on that one's list. Does not belong
here: looking at chunks (`changes`), coding.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from orbax_delta import dtypes
from orbax_delta.background import Pool
from orbax_delta.changes import (
    Chunk,
    ContentKey,
    Finding,
    Status,
    content_key,
    mapped,
)
from orbax_delta.chunks import Box
from orbax_delta.codecs import Bytes
from orbax_delta.dtypes import Rule
from orbax_delta.options import MAX_CHAIN_LIMIT
from orbax_delta.parts import Ref
from orbax_delta.rounding import Following, OnGrid

_SAMPLE_ELEMENTS = 64
_MAX_CANDIDATES = 4


def find_sources(seen: Sequence[Finding], executor: Pool) -> list[Finding]:
    """Mark what is a copy or cast of another chunk as derived."""
    kept_lists = {
        finding.chunk.stored.row.refs
        for finding in seen
        if finding.status is Status.SAME
        and finding.chunk.stored
        and finding.chunk.stored.row.rule is Rule.NONE
    }
    targets = [
        index for index, finding in enumerate(seen) if _may_follow(finding, kept_lists)
    ]
    places = {(f.chunk.leaf_index, f.chunk.box): i for i, f in enumerate(seen)}
    roots = _roots(seen, targets)
    copies = {
        index: root
        for index in targets
        if (root := roots.get(content_key(seen[index]), index)) != index
    }
    confirmed = _confirm_copies(seen, copies, executor)
    alone = [index for index in targets if index not in confirmed]
    # What a list will build on is not known while others look for theirs.
    kept = {i for i in alone if not seen[i].wants_source} | _own_records(seen)
    casts = _followed(seen, alone, kept, places)
    others = [index for index in alone if index not in casts]
    casts |= _casts(seen, others, kept=kept, executor=executor)
    result = list(seen)
    for index in alone:
        rounding = seen[index].chunk.rounding
        if seen[index].wants_source and isinstance(rounding, OnGrid):
            source = places[_place(rounding.source)]
            if _leaves_room(seen[source]):
                result[index] = dataclasses.replace(seen[index], source=source)
    for index, (source, rule) in casts.items():
        result[index] = dataclasses.replace(
            seen[index], status=Status.DERIVED, source=source, rule=rule
        )
    for index, root in confirmed.items():
        # A copy of something that is itself cast follows from that one's source.
        source, rule = casts.get(root, (root, Rule.NONE))
        result[index] = dataclasses.replace(
            seen[index], status=Status.DERIVED, source=source, rule=rule
        )
    return result


def _place(chunk: Any) -> tuple[int, Box]:
    return chunk.leaf_index, chunk.box


def _leaves_room(source: Finding) -> bool:
    """Whether a list may have one record more than that of `source` will have."""
    stored = source.chunk.stored
    if source.status is not Status.SAME or stored is None:
        return True
    return len(stored.row.refs) < MAX_CHAIN_LIMIT


def _followed(
    seen: Sequence[Finding],
    targets: Sequence[int],
    kept: Set[int],
    places: Mapping[tuple[int, Box], int],
) -> dict[int, tuple[int, Rule]]:
    """Targets that were made casts of a chunk of `kept`."""
    found = {}
    for index in targets:
        rounding, errors = seen[index].chunk.rounding, seen[index].errors
        if isinstance(rounding, Following) and errors and not errors.exact:
            source = places[_place(rounding.source)]
            if source in kept:
                found[index] = source, rounding.rule
    return found


def _bytes(seen: Sequence[Finding], *indices: int) -> int:
    return sum(seen[index].chunk.content_bytes for index in indices)


def _may_follow(finding: Finding, kept_lists: set[tuple[Ref, ...]]) -> bool:
    """Changed, or derived from a list that its source is about to leave behind."""
    if finding.status in (Status.CHANGED, Status.REFRESH):
        return True
    stored = finding.chunk.stored
    return (
        finding.status is Status.SAME
        and finding.chunk.copied
        and stored is not None
        and stored.row.rule is not Rule.NONE
        and stored.row.refs not in kept_lists
    )


def _own_records(seen: Sequence[Finding]) -> set[int]:
    """Findings that keep their stored row, which is not itself derived.

    Those whose content nobody has at hand are left out: bytes could not be compared.
    """
    return {
        index
        for index, finding in enumerate(seen)
        if finding.status is Status.SAME
        and finding.chunk.readable
        and finding.chunk.stored
        and finding.chunk.stored.row.rule is Rule.NONE
    }


def _roots(seen: Sequence[Finding], targets: Sequence[int]) -> Mapping[ContentKey, int]:
    """For each content the first chunk that has it, stored ones before new ones."""
    roots: dict[ContentKey, int] = {}
    able = (index for index in targets if not seen[index].wants_source)
    for index in (*sorted(_own_records(seen)), *able):
        roots.setdefault(content_key(seen[index]), index)
    return roots


def _confirm_copies(
    seen: Sequence[Finding], copies: Mapping[int, int], executor: Pool
) -> dict[int, int]:
    def equal(pair: tuple[int, int]) -> bool:
        left, right = (seen[index].chunk.content() for index in pair)
        return bool(np.array_equal(left, right))

    agreed = mapped(executor, equal, copies.items(), lambda pair: _bytes(seen, *pair))
    return {pair[0]: pair[1] for pair, same in zip(copies.items(), agreed) if same}


_CastKey = tuple[str, tuple[int, ...], Box, bytes]


def _casts(
    seen: Sequence[Finding], targets: Sequence[int], *, kept: set[int], executor: Pool
) -> dict[int, tuple[int, Rule]]:
    """Targets that are casts of a chunk of `kept`, found by a sample of elements."""
    wanted = [
        index
        for index in targets
        if seen[index].chunk.leaf.dtype in dtypes.CAST_TARGETS
    ]
    if not wanted:
        return {}
    places: dict[tuple[tuple[int, ...], Box], set[str]] = {}
    for index in wanted:
        chunk = seen[index].chunk
        place = chunk.leaf.shape, chunk.box
        places.setdefault(place, set()).add(chunk.leaf.dtype)
    candidates: dict[_CastKey, list[int]] = {}
    for index in sorted(kept):
        chunk = seen[index].chunk
        if chunk.leaf.dtype != dtypes.CAST_SOURCE:
            continue
        for key in _cast_keys(chunk, places.get((chunk.leaf.shape, chunk.box), ())):
            candidates.setdefault(key, []).append(index)

    def verify(index: int) -> tuple[int, Rule] | None:
        chunk = seen[index].chunk
        rule = dtypes.cast_rule(chunk.leaf.dtype)
        content = seen[index].chunk.content()
        key = _cast_key(chunk, chunk.leaf.dtype, _sample(content, chunk))
        for source in candidates.get(key, ())[:_MAX_CANDIDATES]:
            cast = dtypes.derive(rule, seen[source].chunk.content())
            if cast is not None and np.array_equal(cast, content):
                return source, rule
        return None

    found = zip(
        wanted, mapped(executor, verify, wanted, lambda index: _bytes(seen, index))
    )
    return {index: source for index, source in found if source is not None}


def _sample(content: Bytes, chunk: Chunk) -> Bytes:
    """A few elements, evenly spread."""
    rows = content.reshape(-1, chunk.leaf.element.word_bytes)
    stride = max(1, rows.shape[0] // _SAMPLE_ELEMENTS)
    return rows[::stride][:_SAMPLE_ELEMENTS].reshape(-1)


def _cast_key(chunk: Chunk, dtype: str, sample: Bytes) -> _CastKey:
    return dtype, chunk.leaf.shape, chunk.box, sample.tobytes()


def _cast_keys(chunk: Chunk, targets: Iterable[str]) -> Iterator[_CastKey]:
    for dtype in targets:
        sample = np.ascontiguousarray(_sample(chunk.content(), chunk))
        cast = dtypes.derive(dtypes.cast_rule(dtype), sample)
        if cast is not None:
            yield _cast_key(chunk, dtype, cast)
