"""What of the state comes to the host: all of it, or what changed and what is sampled.

Digests of blocks, made where the arrays lie and kept there from save to save, say which
chunks differ from what is stored. Only those are copied, and some that must be looked
at: new ones, those that are due to be written anew, those derived from one that
changed, and a sample, by which the devices themselves are checked. What is written is
decided on the host by digests of bytes, as ever. Does not belong here: how something
is copied (`transfers`).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax

from orbax_delta import changes, device, leaves, reader, transfers, trust
from orbax_delta.background import Pool
from orbax_delta.base import Base, Entry
from orbax_delta.changes import Chunk, Finding, Status
from orbax_delta.chunks import Box
from orbax_delta.device import Program
from orbax_delta.dtypes import Rule
from orbax_delta.errors import CorruptionError, StorageError
from orbax_delta.hosts import Job
from orbax_delta.leaves import Brought, Snapshot, StagedLeaf
from orbax_delta.options import DeltaOptions
from orbax_delta.ranges import Packs
from orbax_delta.transfers import DeviceLeaf, LeafDigests, Staging
from orbax_delta.trust import Proof

SMALLEST_SHARD_BYTES = 64 << 10
"""Below this a copy is quicker than the kernels that would tell whether to make it."""

AUDIT_EVERY = 64
"""Of so many chunks that a device calls unchanged one is looked at, at each save."""

_Place = tuple[int, Box]
"""Index of a leaf, and a chunk of it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """What is kept on devices of a state that was saved.

    Attributes:
        attempt: Which save that was.
        leaves: By name of the leaf; those that were compared on their devices.
    """

    attempt: str
    leaves: Mapping[str, LeafDigests]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What is known, when a save begins, of what is stored.

    Attributes:
        base: Rows of the last save or restore; no other save works with it now.
        digests: What is kept on devices, of the same save or of another.
        elsewhere: Packs that other runs need.
    """

    base: Base
    digests: Digests | None
    elsewhere: Set[str]

    def digests_of(self, leaf: str) -> LeafDigests | None:
        """Digests of what the base says is stored of a leaf."""
        last = (self.base.predecessor or {}).get("attempt")
        if self.digests is None or self.digests.attempt != last:
            return None
        return self.digests.leaves.get(leaf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was found where the arrays lie.

    Attributes:
        digests: Of this state; see `proved_digests`.
        unchanged: Chunks that were not copied, and what is stored of them.
        audited: Chunks that were copied though they are called unchanged, alike.
        programs: What the next save wants to have ready.
        proofs: What is to be seen of programs before their digests are kept.
    """

    digests: Mapping[str, LeafDigests]
    unchanged: Mapping[_Place, Entry]
    audited: Mapping[_Place, Entry]
    programs: Sequence[Program]
    proofs: Sequence[Proof]

    def proved_digests(self) -> Mapping[str, LeafDigests]:
        """What to keep once this state is stored and the proofs were looked at."""
        return {
            name: found
            for name, found in self.digests.items()
            if trust.is_believed(found.shards)
        }


EVERYTHING = Selection(digests={}, unchanged={}, audited={}, programs=(), proofs=())
"""Nothing was compared, all was copied."""


def take(
    tree: Any,
    job: Job,
    options: DeltaOptions,
    stored: Stored | None,
    *,
    hurried: bool = False,
) -> tuple[Snapshot, Selection]:
    """Bring to the host what a save has to look at.

    It waits for what the devices found, and for leaves that are not compared there;
    the rest may still be on its way when the caller donates the state.

    Args:
        tree: The state.
        job: The processes that save it together.
        options: Options in force.
        stored: What is stored of it; None: nothing may be relied on.
        hurried: Whether nothing is written anew for its age.

    Raises:
        InvalidInputError: A leaf cannot be stored; the message names it.
    """
    # A training loop that forbids transfers means those that it does not know of.
    with jax.transfer_guard_device_to_host("allow"):
        on_host = options.compare_on == "host" or options.lossy is not None
        if stored is None or on_host or trust.is_lost():
            return leaves.snapshot(tree, job), EVERYTHING
        return _select(tree, job, options, stored, hurried=hurried)


def _select(
    tree: Any, job: Job, options: DeltaOptions, stored: Stored, *, hurried: bool
) -> tuple[Snapshot, Selection]:
    structure, staged = leaves.stage(tree, job)
    compared = {
        index: DeviceLeaf(one)
        for index, one in enumerate(staged)
        if _is_compared(one, forced=options.compare_on == "device")
    }
    others = [one for index, one in enumerate(staged) if index not in compared]
    for one in others:
        one.start()
    for leaf in compared.values():
        believed = trust.is_believed(leaf.shards)
        leaf.detect(stored.digests_of(leaf.leaf.entry.name) if believed else None)
    # The host cuts while the devices compare.
    if compared:
        _cut(staged, compared, stored.base, options, job)
    transfers.read_masks(list(compared.values()))
    refresh_every = None if hurried else options.refresh_every
    unchanged = _unchanged(compared.values(), refresh_every, stored.elsewhere)
    turn = stored.base.save_index + 1
    audited = _sample(unchanged, turn)
    left_out = {place: unchanged[place] for place in unchanged.keys() - audited.keys()}

    def wanted(chunk: Chunk) -> bool:
        return (chunk.leaf_index, chunk.box) not in left_out

    staging = Staging()
    proving = trust.choose(compared, turn)
    brought = {
        index: leaf.bring(wanted, staging, entire=proving.get(index))
        for index, leaf in compared.items()
    }
    taken = Snapshot(
        structure=structure,
        leaves=[brought.get(i) or one.finish() for i, one in enumerate(staged)],
        copied_bytes=staging.total_bytes + sum(one.device_bytes for one in others),
    )
    return taken, Selection(
        digests={
            leaf.leaf.entry.name: leaf.found for leaf in compared.values() if leaf.found
        },
        unchanged=left_out,
        audited=audited,
        programs=transfers.programs_of(list(compared.values())),
        proofs=[
            Proof.of(compared[index], brought[index], box)
            for index, box in proving.items()
        ],
    )


def _is_compared(staged: StagedLeaf, *, forced: bool) -> bool:
    """Whether a leaf lies on devices that can compare it sooner than copy it."""
    parts = list(staged.parts.values())
    if not parts or len({data.shape for data in parts}) > 1:
        return False
    (place,) = parts[0].devices()
    memory = parts[0].sharding.memory_kind
    return (
        (forced or place.platform != "cpu")
        and memory in (None, place.default_memory().kind)
        and parts[0].nbytes >= SMALLEST_SHARD_BYTES
        and device.can_compare(parts[0].shape, parts[0].dtype)
    )


def _cut(
    staged: Sequence[StagedLeaf],
    compared: Mapping[int, DeviceLeaf],
    base: Base,
    options: DeltaOptions,
    job: Job,
) -> None:
    """Give each compared leaf its chunks, as the save will cut them."""
    outlines = [
        dataclasses.replace(one.leaf, shards=[(box, Brought()) for box in one.parts])
        for one in staged
    ]
    cut = changes.cut(outlines, base, options, process=job.process)
    for chunk in cut.own:
        leaf = compared.get(chunk.leaf_index)
        if leaf is not None:
            leaf.add(chunk)


def _unchanged(
    compared: Iterable[DeviceLeaf], refresh_every: int | None, elsewhere: Set[str]
) -> dict[_Place, Entry]:
    """Chunks that need no look at their content: what is stored of them stays."""
    found = {
        (chunk.leaf_index, chunk.box): chunk.stored
        for leaf in compared
        for chunk in leaf.unchanged()
        if chunk.stored is not None
        and not changes.is_due(chunk.stored.row, refresh_every, elsewhere)
    }
    kept_lists = {e.row.refs for e in found.values() if e.row.rule is Rule.NONE}
    # A cast whose source leaves its records behind may follow it, see `changes`.
    return {
        place: entry
        for place, entry in found.items()
        if entry.row.rule is Rule.NONE or entry.row.refs in kept_lists
    }


def _sample(unchanged: Mapping[_Place, Entry], turn: int) -> dict[_Place, Entry]:
    """One in AUDIT_EVERY of them, at least one, other ones at each turn."""
    period = min(AUDIT_EVERY, len(unchanged)) or 1
    return {
        place: entry
        for number, (place, entry) in enumerate(unchanged.items())
        if number % period == turn % period
    }


# --- in the background ----------------------------------------------------------------


def complete(
    own: Sequence[Chunk], selection: Selection, packs: Packs, executor: Pool
) -> list[Chunk]:
    """The chunks of a save, with content wherever it will be asked for.

    Between a save's call and its writing rows can be lost (packs are gone or condemned,
    other processes do not know them). What was left out for their sake is then taken
    from what is stored of it, to be written in full.

    Args:
        own: The chunks, with what is known now to be stored of them.
        selection: What was left out.
        packs: Where the records lie.
        executor: Where to do it.

    Raises:
        StorageError: Something was left out that is not stored any more.
    """

    def completed(chunk: Chunk) -> Chunk:
        entry = selection.unchanged.get((chunk.leaf_index, chunk.box))
        if entry and chunk.stored and chunk.stored.row.digest == entry.row.digest:
            return chunk
        array = _stored_array(chunk, entry, packs)
        return dataclasses.replace(chunk, shard=(chunk.box, array))

    done = executor.map(completed, [chunk for chunk in own if not chunk.copied])
    return [chunk if chunk.copied else next(done) for chunk in own]


def filled(findings: Sequence[Finding], packs: Packs, executor: Pool) -> list[Finding]:
    """Findings whose chunks have content where they are to be written anew.

    One that was left out, and whose stored content cannot be read, stays as it is.
    """

    def lacks(finding: Finding) -> bool:
        return finding.status is Status.REFRESH and not finding.chunk.copied

    def with_content(finding: Finding) -> Finding:
        chunk = finding.chunk
        try:
            array = _stored_array(chunk, chunk.stored, packs)
        except StorageError:
            return dataclasses.replace(finding, status=Status.SAME)
        filled = dataclasses.replace(chunk, shard=(chunk.box, array))
        return dataclasses.replace(finding, chunk=filled)

    done = executor.map(with_content, filter(lacks, findings))
    return [next(done) if lacks(finding) else finding for finding in findings]


def _stored_array(chunk: Chunk, entry: Entry | None, packs: Packs) -> Any:
    problem: Exception | None = None
    if entry is not None:
        content = entry.checked_content()
        try:
            if content is None:
                request = reader.Request(leaf=chunk.leaf, row=entry.row)
                content = reader.read_one(packs, request)
        except (CorruptionError, StorageError) as error:
            problem = error
        else:
            return chunk.leaf.element.from_content(
                content.copy(), tuple(b - a for a, b in chunk.box)
            )
    raise StorageError(
        f"leaf {chunk.leaf.name}, chunk {chunk.box} was left on its device because it "
        "has not changed, and what was stored of it is gone "
        f"({problem or 'the state is cut otherwise now'}); nothing of this save "
        "counts. Save again: the next one copies everything"
    ) from problem


def audit(findings: Iterable[Finding], selection: Selection, where: str) -> None:
    """Compare the sample with what the devices said of it.

    Args:
        findings: What was found on the host.
        selection: What was found on the devices.
        where: Step and item, for messages.

    Raises:
        CorruptionError: A device did not notice a change. It may have missed others,
            so that nothing of this save may count.
    """
    for finding in findings:
        chunk = finding.chunk
        entry = selection.audited.get((chunk.leaf_index, chunk.box))
        if entry is None or entry.row.digest == finding.digest:
            continue
        message = (
            f"{where}: leaf {chunk.leaf.name}, chunk {chunk.box} has changed, but the "
            "device that holds it found no change; expected digest "
            f"{entry.row.digest.hex()}, found {finding.digest.hex()}. Nothing of this "
            "save counts, and this process compares on the host from now on: save "
            "again. Earlier steps may lack changes as well. If it happens again, set "
            'compare_on="host", and have the device checked'
        )
        trust.lose(message)
        raise CorruptionError(message)
