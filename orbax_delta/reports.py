"""What a save wrote and what a restore read, as values that print in one line."""

import collections
import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_delta.errors import FormatError

# What every language can count and print; no report comes near it.
_LARGEST_NUMBER = (1 << 63) - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """One save. Sizes in bytes, times in seconds.

    Attributes:
        step: Name of the step.
        item: Name of the item.
        full_bytes: Raw size of the state's arrays.
        written_bytes: Packs and part put by this save (the MANIFEST, which holds this
            report, comes on top).
        read_bytes: Bytes of earlier records read to make deltas against.
        chunks: Chunks of the state.
        chunks_by_form: Chunks by how this save stored them: `reference`, `constant`,
            `derived`, `shared`, `planes`, `difference`, `blocks`, `sparse`, and of
            leaves with a policy `grid`, `grid_change`, `relative`.
        bytes_by_form: Bytes of new records by form.
        elements: Elements of the state's arrays; a complex one counts as its two
            parts, those of packed types by the byte.
        elements_changed: Of these, how many differ from the previous save; a chunk
            without a comparable predecessor counts whole.
        blocks: 4 KiB blocks of the state.
        blocks_changed: Of these, how many hold a change, counted alike.
        records_per_chunk_mean: Mean length of a chunk's list of records.
        records_per_chunk_max: Length of the longest one.
        copies: This state and those kept in the store, as many as share no pack: the
            loss of a file harms one of them.
        copies_wanted: As many as `keep_bases` asks for.
        copied_bytes: Of device arrays, brought to the host to be looked at; 0 in the
            reports of steps that were saved before it was counted.
        held_bytes: Host memory that copies take after this save, for the next one to
            build on (option `base`).
        lossy: By path of each leaf that was stored within a bound: `bound` and the
            `largest` and `rms` error in its unit (see `policies`; not of casts, whose
            errors are those of their source), `elements`, and how many of its chunks
            had to be stored bit for bit, `exact_chunks`.
        stage_seconds: Time by stage of the background work: `wait` for Orbax's folder
            and the save before, `begin` (store, pin), `compare`, `code`, `write`
            (packs), `part`. With `blocking_seconds` they add up to `total_seconds`.
        blocking_seconds: Time that `save()` kept the caller.
        total_seconds: From the call to just before the MANIFEST was written.
    """

    step: str
    item: str
    full_bytes: int
    written_bytes: int
    read_bytes: int
    chunks: int
    chunks_by_form: Mapping[str, int]
    bytes_by_form: Mapping[str, int]
    elements: int
    elements_changed: int
    blocks: int
    blocks_changed: int
    records_per_chunk_mean: float
    records_per_chunk_max: int
    copies: int
    copies_wanted: int
    stage_seconds: Mapping[str, float]
    blocking_seconds: float
    total_seconds: float
    copied_bytes: int = 0
    held_bytes: int = 0
    lossy: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def times_smaller(self) -> float:
        """Raw bytes over written bytes."""
        return self.full_bytes / max(self.written_bytes, 1)

    @property
    def gigabytes_per_second(self) -> float:
        """Raw bytes over total time, in 1e9 B/s."""
        return self.full_bytes / max(self.total_seconds, 1e-9) / 1e9

    def line(self) -> str:
        """The report in one line."""
        forms = ", ".join(f"{n} {form}" for form, n in self.chunks_by_form.items())
        return (
            f"saved step {self.step} ({self.item}): {human_bytes(self.full_bytes)} as "
            f"{human_bytes(self.written_bytes)} ({self.times_smaller:.2f} times "
            f"smaller); {self.chunks} chunks ({forms}); blocked "
            f"{self.blocking_seconds:.3f} s of {self.total_seconds:.2f} s, "
            f"{self.gigabytes_per_second:.2f} GB/s{self._lossy()}{self._fewer_copies()}"
        )

    def _lossy(self) -> str:
        return f"; {len(self.lossy)} leaves within bounds" if self.lossy else ""

    def _fewer_copies(self) -> str:
        if self.copies >= self.copies_wanted:
            return ""
        return f"; {self.copies} of {self.copies_wanted} separate copies so far"

    def to_document(self) -> dict[str, Any]:
        """JSON document."""
        return dataclasses.asdict(self)

    @classmethod
    def merged(cls, shares: Sequence["SaveReport"]) -> "SaveReport":
        """The report of a save from the shares of its processes.

        Counts add up; of times and lengths the greatest counts.
        """
        first = shares[0]
        chunks = sum(share.chunks for share in shares)
        listed = sum(s.records_per_chunk_mean * s.chunks for s in shares)
        summed = {
            name: sum(getattr(share, name) for share in shares) for name in _SUMMED
        }
        return dataclasses.replace(
            first,
            **summed,
            chunks_by_form=_added([share.chunks_by_form for share in shares]),
            bytes_by_form=_added([share.bytes_by_form for share in shares]),
            lossy=_merged_errors([share.lossy for share in shares]),
            records_per_chunk_mean=listed / max(chunks, 1),
            records_per_chunk_max=max(share.records_per_chunk_max for share in shares),
            stage_seconds={
                stage: max(share.stage_seconds.get(stage, 0.0) for share in shares)
                for stage in first.stage_seconds
            },
            blocking_seconds=max(share.blocking_seconds for share in shares),
            total_seconds=max(share.total_seconds for share in shares),
        )

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], *, where: str = "a MANIFEST"
    ) -> "SaveReport":
        """The report that a MANIFEST holds; what else it says is not looked at.

        Args:
            document: Its JSON.
            where: Path of the MANIFEST, for messages.

        Raises:
            FormatError: Fields are missing, or what they hold is no text, size or time.
        """
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        # What the first version did not report has a default.
        defaults = {
            field.name: field.default
            for field in dataclasses.fields(cls)
            if field.default is not dataclasses.MISSING
        } | {"lossy": {}}
        document = {**defaults, **document}
        wrong = [
            name
            for name, kind in kinds.items()
            if name not in document or not _is(kind, document[name])
        ]
        if wrong:
            raise FormatError(
                f"the report of {where} is damaged in {', '.join(wrong):.300}; the "
                "step may be whole, `orbax-delta verify` tells"
            )
        return cls(**{name: document[name] for name in kinds})


_SUMMED = (
    "full_bytes",
    "written_bytes",
    "read_bytes",
    "chunks",
    "elements",
    "elements_changed",
    "blocks",
    "blocks_changed",
    "held_bytes",
    "copied_bytes",
)


def leaf_errors(
    *,
    bound: float | None,
    largest: float | None,
    square_sum: float,
    elements: int,
    exact_chunks: int,
) -> dict[str, float]:
    """What `SaveReport.lossy` says of one leaf."""
    found = {} if bound is None else {"bound": bound}
    if largest is not None:
        rms = math.sqrt(square_sum / max(elements, 1))
        found |= {"largest": largest, "rms": rms}
    return found | {
        "elements": elements,
        "exact_chunks": exact_chunks,
    }


def _merged_errors(
    shares: Sequence[Mapping[str, Mapping[str, float]]],
) -> Mapping[str, Mapping[str, float]]:
    by_leaf: dict[str, list[Mapping[str, float]]] = {}
    for share in shares:
        for name, errors in share.items():
            by_leaf.setdefault(name, []).append(errors)
    return {
        name: leaf_errors(
            bound=found[0].get("bound"),
            largest=max(one["largest"] for one in found)
            if "largest" in found[0]
            else None,
            square_sum=sum(one.get("rms", 0.0) ** 2 * one["elements"] for one in found),
            elements=int(sum(one["elements"] for one in found)),
            exact_chunks=int(sum(one["exact_chunks"] for one in found)),
        )
        for name, found in by_leaf.items()
    }


def _added(counts: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    total: collections.Counter[str] = collections.Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))


def _is(kind: Any, value: Any) -> bool:
    """Whether a field that is annotated with `kind` may hold `value`."""
    if kind is str:
        return type(value) is str
    if kind is float and type(value) is float:
        return 0 <= value < math.inf
    if kind in (int, float):
        return type(value) is int and 0 <= value <= _LARGEST_NUMBER
    _, inner = typing.get_args(kind)
    return type(value) is dict and all(_is(inner, v) for v in value.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """One restore. Sizes in bytes, times in seconds.

    Attributes:
        step: Name of the step.
        item: Name of the item.
        restored_bytes: Raw size of the chunks that were wanted.
        reused_bytes: Of these, what was taken from the live tree as it was.
        read_bytes: Bytes read from packs.
        read_requests: Ranged reads made.
        records_read: Records decoded.
        chunks: Chunks that were wanted.
        chunks_in_step: Chunks that the step has.
        chunks_reused: Chunks that were taken from the live tree as they were.
        chunks_healed: Damaged ones, whose content other records of the root held.
        records_per_chunk_mean: Mean length of the lists of the wanted chunks.
        records_per_chunk_max: Length of the longest one.
        total_seconds: From the call to the finished tree.
        lossy_leaves: Paths of wanted leaves that were stored within the bounds that
            `orbax-delta show` gives, not bit for bit.
    """

    step: str
    item: str
    restored_bytes: int
    reused_bytes: int
    read_bytes: int
    read_requests: int
    records_read: int
    chunks: int
    chunks_in_step: int
    chunks_reused: int
    chunks_healed: int
    records_per_chunk_mean: float
    records_per_chunk_max: int
    total_seconds: float
    lossy_leaves: Sequence[str] = ()

    @property
    def gigabytes_per_second(self) -> float:
        """Restored bytes over total time, in 1e9 B/s."""
        return self.restored_bytes / max(self.total_seconds, 1e-9) / 1e9

    def line(self) -> str:
        """The report in one line."""
        live = f", {self.chunks_reused} of them live" if self.chunks_reused else ""
        count = len(self.lossy_leaves)
        lossy = f"; {count} leaves within bounds, not bit for bit" if count else ""
        return (
            f"restored step {self.step} ({self.item}): "
            f"{human_bytes(self.restored_bytes)} from {human_bytes(self.read_bytes)} "
            f"in {self.read_requests} reads; {self.chunks} of {self.chunks_in_step} "
            f"chunks{live}, "
            f"{self.records_per_chunk_mean:.2f} records each (at most "
            f"{self.records_per_chunk_max}); {self.total_seconds:.2f} s, "
            f"{self.gigabytes_per_second:.2f} GB/s{lossy}"
        )


def chain_lengths(lengths: Sequence[int]) -> tuple[float, int]:
    """Mean and maximum of list lengths; zeros for none."""
    return (sum(lengths) / len(lengths) if lengths else 0.0, max(lengths, default=0))


def human_bytes(count: float) -> str:
    """Bytes in decimal units.

    >>> human_bytes(1_500_000)
    '1.50 MB'
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
