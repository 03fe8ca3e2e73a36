"""Unchanged chunks that are written anew because of the dead that lie beside them.

A pack goes when nothing of it is needed. What changes seldom can hold back a pack of
which all else died long ago; once that costs more than it is worth, such chunks move
to a new pack. Does not belong here: renewal for age (`changes`).
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set

from orbax_delta.changes import Finding, Status
from orbax_delta.dtypes import Rule
from orbax_delta.parts import Ref

_DEAD_SHARE = 0.5
# What lies dead in a pack below this is not worth a record: disks give back blocks.
_LEAST_DEAD_BYTES = 4096
# Saves before this one that found a chunk unchanged: what pauses is not moved.
_LEAST_IDLE = 1
# Of all that is alive, what one save moves: saves stay level.
_MOST_MOVED_SHARE = 0.1


@dataclasses.dataclass(slots=True)
class _Pack:
    """What is known of one pack.

    Attributes:
        size: Its bytes; of a pack that another process life wrote, as far as seen.
        alive: Bytes of records that are needed.
        members: Indices of the chunks that need them.
        held: Whether one of those cannot be moved now.
    """

    size: int = 0
    alive: int = 0
    members: list[int] = dataclasses.field(default_factory=list)
    held: bool = False

    @property
    def dead(self) -> int:
        return self.size - self.alive


def moved(
    findings: Sequence[Finding],
    sizes: Mapping[str, int],
    *,
    own: str,
    elsewhere: Set[str],
) -> list[Finding]:
    """Findings of which some unchanged ones are to be written anew.

    Args:
        findings: All chunks of this process, compared.
        sizes: Bytes of packs, as far as known.
        own: What the names of the packs of this process contain; of others'
            packs it does not know what is alive.
        elsewhere: Packs that other runs need, which nothing here frees.
    """
    packs = _survey(findings, sizes)
    budget = _MOST_MOVED_SHARE * sum(pack.alive for pack in packs.values())
    chosen: dict[int, int] = {}
    usable = [
        pack
        for name, pack in packs.items()
        if own in name and name not in elsewhere and not pack.held
    ]
    for pack in sorted(usable, key=lambda pack: pack.alive / pack.size):
        if pack.dead < _DEAD_SHARE * pack.size:
            break
        costs = {
            index: _full_bytes(findings[index])
            for index in pack.members
            if index not in chosen
        }
        if sum(costs.values()) >= pack.dead or pack.dead < _LEAST_DEAD_BYTES:
            continue
        for index, cost in costs.items():
            # What one save does not get done the next ones do; it does one, always.
            if not chosen or sum(chosen.values()) + cost <= budget:
                chosen[index] = cost
    result = list(findings)
    for index in chosen:
        result[index] = dataclasses.replace(result[index], status=Status.REFRESH)
    return result


def _survey(
    findings: Sequence[Finding], sizes: Mapping[str, int]
) -> Mapping[str, _Pack]:
    packs: dict[str, _Pack] = collections.defaultdict(_Pack)
    seen: set[Ref] = set()
    for index, finding, refs in _needed(findings):
        stored = finding.chunk.stored
        idle = stored is not None and stored.idle >= _LEAST_IDLE
        for ref in refs:
            pack = packs[ref.pack]
            pack.size = max(pack.size, ref.offset + ref.length)
            if ref not in seen:
                seen.add(ref)
                pack.alive += ref.length
            if finding.status is Status.SAME and idle:
                pack.members.append(index)
            else:
                pack.held = True
    for name, pack in packs.items():
        pack.size = max(pack.size, sizes.get(name, 0))
    return packs


def _needed(
    findings: Sequence[Finding],
) -> Iterator[tuple[int, Finding, Sequence[Ref]]]:
    """Lists that stay; a derived chunk has that of its source, and goes where it goes.

    That of a changed chunk may stay: a delta would follow it.
    """
    for index, finding in enumerate(findings):
        stored = finding.chunk.stored
        stays = finding.status in (Status.SAME, Status.CHANGED)
        if stays and stored is not None and stored.row.rule is Rule.NONE:
            yield index, finding, [ref for ref in stored.row.refs if ref.pack]


def _full_bytes(finding: Finding) -> int:
    stored = finding.chunk.stored
    first = stored.row.refs[0].length if stored else 0
    return first or finding.chunk.content_bytes
