"""Damage of every kind: each named function breaks a healthy root in one way.

A *spot* is a kind of file and a place in it, a *kind* is what happens there. Which file
and which byte is drawn from a seed, so that a case can be repeated by its name.
"""

import dataclasses
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from strategies import STORE, packs_named

from orbax_delta import owners, records
from orbax_delta.marks import Mark

DEAD_PACK = f"{'0d' * 16}-p0-0"
"""A pack that nothing names, so that a prune has something to delete."""

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """What is broken.

    Attributes:
        path: The file.
        span: First byte and end of the place in it.
        others: Files of the same kind in the root.
        twin: The same file of a root that was made alike.
        rng: Where further choices come from.
    """

    path: Path
    span: Span
    others: Sequence[Path]
    twin: Path
    rng: np.random.Generator


# --- kinds ---------------------------------------------------------------------------


def flip(victim: Victim) -> None:
    """One bit is another one."""
    data = bytearray(victim.path.read_bytes())
    position = int(victim.rng.integers(*victim.span))
    data[position] ^= 1 << int(victim.rng.integers(8))
    victim.path.write_bytes(data)


def cut_before(victim: Victim) -> None:
    """The file ends just before the place."""
    victim.path.write_bytes(victim.path.read_bytes()[: victim.span[0]])


def cut_inside(victim: Victim) -> None:
    """The file ends somewhere in the place."""
    start, stop = victim.span
    position = int(victim.rng.integers(start, stop))
    victim.path.write_bytes(victim.path.read_bytes()[:position])


def cut_last_byte(victim: Victim) -> None:
    """The file lacks the last byte of the place and what follows."""
    victim.path.write_bytes(victim.path.read_bytes()[: victim.span[1] - 1])


def zero(victim: Victim) -> None:
    """The bytes of the place are 0, as a disk gives back what it lost."""
    start, stop = victim.span
    data = bytearray(victim.path.read_bytes())
    data[start:stop] = bytes(stop - start)
    victim.path.write_bytes(data)


def zero_some(victim: Victim) -> None:
    """A stretch of the place is 0, or all of it if there it was 0 already."""
    start, stop = victim.span
    first = int(victim.rng.integers(start, stop))
    last = int(victim.rng.integers(first, stop)) + 1
    data = bytearray(victim.path.read_bytes())
    if not any(data[first:last]):
        first, last = start, stop
    data[first:last] = bytes(last - first)
    victim.path.write_bytes(data)


def shift(victim: Victim) -> None:
    """One byte too many stands in the place."""
    position = int(victim.rng.integers(*victim.span))
    data = victim.path.read_bytes()
    victim.path.write_bytes(data[:position] + b"\x55" + data[position:])


def extend(victim: Victim) -> None:
    """Bytes follow the end of the file."""
    tail = victim.rng.integers(1, 256, int(victim.rng.integers(1, 100)), np.uint8)
    victim.path.write_bytes(victim.path.read_bytes() + b"\1" + tail.tobytes())


def empty(victim: Victim) -> None:
    """Nothing is left but the name."""
    victim.path.write_bytes(b"")


def delete(victim: Victim) -> None:
    """Not even that."""
    victim.path.unlink()


def swap(victim: Victim) -> None:
    """Two files of a kind have each other's content."""
    mine = victim.path.read_bytes()
    different = [path for path in victim.others if path.read_bytes() != mine]
    other = different[int(victim.rng.integers(len(different)))]
    victim.path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def replace(victim: Victim) -> None:
    """The file comes from another root with the same content."""
    victim.path.write_bytes(victim.twin.read_bytes())


def exchange_records(victim: Victim) -> None:
    """Two whole records of a pack, of one length, have changed places."""
    data = bytearray(victim.path.read_bytes())
    first, second = (slice(*span) for span in _alike(bytes(data))[0])
    data[first], data[second] = data[second], data[first]
    victim.path.write_bytes(data)


IN_PLACE: Mapping[str, Callable[[Victim], None]] = {
    "flip": flip,
    "cut_before": cut_before,
    "cut_inside": cut_inside,
    "cut_last_byte": cut_last_byte,
    "zero": zero,
    "zero_some": zero_some,
    "shift": shift,
}
"""What can happen to a place in a file."""

WHOLE_FILE: Mapping[str, Callable[[Victim], None]] = {
    "extend": extend,
    "empty": empty,
    "delete": delete,
    "swap": swap,
    "replace": replace,
}
"""What can happen to a file, wherever in it one looks."""

_KINDS = {**IN_PLACE, **WHOLE_FILE, "exchange_records": exchange_records}


# --- spots ---------------------------------------------------------------------------


def _whole(data: bytes, _: np.random.Generator) -> Span:
    return 0, len(data.rstrip(b"\n"))


def _pack_index(data: bytes) -> Sequence[Span]:
    return records.parse_pack(memoryview(data)).spans


def _record(data: bytes, rng: np.random.Generator) -> Span:
    spans = _pack_index(data)
    offset, length = spans[int(rng.integers(len(spans)))]
    return offset, offset + length


def _record_header(data: bytes, rng: np.random.Generator) -> Span:
    start, _ = _record(data, rng)
    return start, start + 32


def _record_payload(data: bytes, rng: np.random.Generator) -> Span:
    start, stop = _record(data, rng)
    return start + 32, stop - 8


def _record_checksum(data: bytes, rng: np.random.Generator) -> Span:
    _, stop = _record(data, rng)
    return stop - 8, stop


def _index(data: bytes, _: np.random.Generator) -> Span:
    (index_bytes,) = struct.unpack_from("<I", data, len(data) - 28)
    return len(data) - 32 - index_bytes, len(data) - 32


def _after_line(data: bytes, _: np.random.Generator) -> Span:
    return data.index(b"\n") + 1, len(data)


def _alike(data: bytes) -> list[tuple[Span, Span]]:
    """Pairs of records of one length with different bytes."""
    spans = [(offset, offset + length) for offset, length in _pack_index(data)]
    return [
        (left, right)
        for i, left in enumerate(spans)
        for right in spans[i + 1 :]
        if left[1] - left[0] == right[1] - right[0]
        and data[slice(*left)] != data[slice(*right)]
    ]


FILES: Mapping[str, str] = {
    "store file": f"{STORE}/STORE.json",
    "marker": f"{STORE}/commit_success.txt",
    "pack": f"{STORE}/packs/*",
    "part": "[0-9]/default/part-*",
    "manifest": "[0-9]/default/MANIFEST",
    "pin": f"{STORE}/pins/*",
    "mark": f"{STORE}/condemned/*",
    "base part": f"{STORE}/bases/*/part-*",
    "base manifest": f"{STORE}/bases/*/MANIFEST",
}
"""Kinds of files and where they lie."""

SPOTS: Mapping[str, tuple[str, Callable[[bytes, np.random.Generator], Span]]] = {
    "store file": ("store file", _whole),
    "pack header": ("pack", lambda data, _: (0, 32)),
    "record header": ("pack", _record_header),
    "record payload": ("pack", _record_payload),
    "record checksum": ("pack", _record_checksum),
    "pack index": ("pack", _index),
    "pack tail": ("pack", lambda data, _: (len(data) - 32, len(data))),
    "part header": ("part", lambda data, _: (0, 52)),
    "part columns": ("part", lambda data, _: (52, len(data))),
    "manifest line": ("manifest", lambda data, _: (0, data.index(b"\n") + 1)),
    "manifest body": ("manifest", _after_line),
    "pin": ("pin", _whole),
    "mark": ("mark", _whole),
    "base part": ("base part", _whole),
    "base manifest": ("base manifest", _whole),
}
"""Places in files: the kind of file and where in it."""

OF_BASES = ("base part", "base manifest")

NO_OTHER = frozenset({"store file", *OF_BASES})
"""Files of which a root may have one only."""


# --- cases ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One damage: what happens where, and the seed of all further choices."""

    spot: str
    kind: str
    seed: int

    @property
    def file(self) -> str:
        """The kind of file."""
        return SPOTS[self.spot][0] if self.spot in SPOTS else self.spot

    def __str__(self) -> str:
        return f"{self.spot}-{self.kind}-{self.seed}".replace(" ", "_")


def cases(*, flips: int, others: int) -> Iterator[Case]:
    """Every kind at every spot, with that many seeds each."""
    for spot in SPOTS:
        for kind in IN_PLACE:
            for seed in range(flips if kind == "flip" else others):
                yield Case(spot=spot, kind=kind, seed=seed)
    for file in FILES:
        for kind in WHOLE_FILE:
            # An empty marker is as it should be, and as any other.
            if file == "marker" and kind not in ("extend", "delete"):
                continue
            if kind == "swap" and file in NO_OTHER:
                continue
            for seed in range(others):
                yield Case(spot=file, kind=kind, seed=seed)
    for seed in range(others):
        yield Case(spot="pack", kind="exchange_records", seed=seed)


def strike(root: Path, twin: Path, case: Case) -> list[Path]:
    """Do one damage; returns the files that it changed."""
    rng = np.random.default_rng([case.seed, *f"{case}".encode()])
    paths = _in_order(root, case.file)
    there = {path: path.read_bytes() for path in paths}
    if case.kind == "exchange_records":
        paths = [path for path in paths if _alike(there[path])]
    path = paths[int(rng.integers(len(paths)))]
    span = SPOTS[case.spot][1](there[path], rng) if case.spot in SPOTS else (0, 0)
    victim = Victim(
        path=path,
        span=span,
        others=[other for other in there if other != path],
        twin=_in_order(twin, case.file)[list(there).index(path)],
        rng=rng,
    )
    _KINDS[case.kind](victim)
    changed = [
        path
        for path, data in there.items()
        if not path.exists() or path.read_bytes() != data
    ]
    assert changed, f"{case} changed nothing"
    return changed


def _in_order(root: Path, file: str) -> list[Path]:
    """Files of a kind, in an order that is that of every root made alike."""
    paths = sorted(root.glob(FILES[file]))
    if file != "pack":
        return paths
    begun: dict[str, int] = {}
    for path in paths:
        attempt, written = path.name[:32], path.stat().st_mtime_ns
        begun[attempt] = min(begun.get(attempt, written), written)
    return sorted(
        (path for path in paths if path.name != DEAD_PACK),  # that is no pack at all
        key=lambda path: (begun[path.name[:32]], int(path.name.rpartition("-")[2])),
    )


def add_small_files(root: Path, seed: int) -> None:
    """Two pins and two marks of another host, and a dead pack."""
    rng = np.random.default_rng(seed)
    host = owners.Owner(host=f"elsewhere-{seed}", pid=7 + seed, start="1")
    named = sorted(packs_named(root))
    for number in range(2):
        name = rng.bytes(16).hex()
        mark = Mark(owner=host, packs=named[number::2])
        _put(root / STORE / "pins" / f"{name}-p0", mark.encode())
        mark = Mark(owner=host, packs=[f"{number}{DEAD_PACK[1:]}"])
        _put(root / STORE / "condemned" / name, mark.encode())
    _put(root / STORE / "packs" / DEAD_PACK, b"dead")


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
