"""What each form makes of the changes between two states of real training.

    python benchmarks/forms.py --cache ~/.cache/orbax-delta-benchmarks

For each workload every changed chunk of a pair is coded in every form that there is,
whatever a save would prefer, and in candidates that there is not. The table has the
bytes of each alone and its speed, and what the smallest of each chunk would come to:
with the forms of the format, without one of them, and with one candidate more.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import jax.tree_util as jtu
import numpy as np
from decoder import SCALES, State
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS, Setup

from orbax_delta import chunks, codecs, differences, dtypes, entropy, planes, sparse
from orbax_delta.codecs import Bytes

CHUNK_ELEMENTS = 1 << 18
PAIRS = tuple(name for name in WORKLOADS if name != "fresh_adamw")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One changed chunk.

    Attributes:
        content: Its bytes now.
        base: Its bytes before.
        word_bytes: Size of a word.
        row_words: Words in a row of its leaf; all words of a leaf without rows.
    """

    content: Bytes
    base: Bytes
    word_bytes: int
    row_words: int

    def difference(self) -> Bytes:
        """Zigzag differences of all words."""
        out = np.empty(self.content.size, np.uint8)
        differences.subtract(self.content, self.base, self.word_bytes, out)
        return out

    def words(self, content: Bytes) -> np.ndarray:
        """A content as words."""
        return differences.as_words(content, self.word_bytes)


Coder = Callable[[Change], int | None]


def _planes(change: Change) -> int:
    return len(codecs.encode_full(change.content, change.word_bytes))


def _difference(change: Change) -> int:
    return len(planes.encode(change.difference(), change.word_bytes))


def _blocks(change: Change) -> int | None:
    difference = change.difference()
    changed = change.words(difference) != 0
    block_map = differences.changed_blocks(changed, change.word_bytes)
    if np.count_nonzero(block_map) > codecs.BLOCKS_MAX_SHARE * block_map.size:
        return None
    picked = codecs._marked_blocks(difference, block_map)
    return len(codecs._encode_blocks(block_map, picked, change.word_bytes))


def _sparse_of(change: Change, difference: Bytes) -> int | None:
    words = change.words(difference)
    positions = np.flatnonzero(words)
    if positions.size > codecs.SPARSE_MAX_DENSITY * words.size:
        return None
    changes = sparse.Changes(
        content_bytes=difference.size,
        word_bytes=change.word_bytes,
        count=positions.size,
        blocks=np.zeros(0, np.bool_),
        positions=positions.astype(np.uint32),
        values=words[positions].view(np.uint8),
    )
    return len(sparse.encode([changes])[0])


def _sparse(change: Change) -> int | None:
    return _sparse_of(change, change.difference())


def _xor(change: Change) -> int:
    return len(planes.encode(change.content ^ change.base, change.word_bytes))


def _sparse_xor(change: Change) -> int | None:
    return _sparse_of(change, change.content ^ change.base)


def _bitmap(change: Change) -> int | None:
    """A bit for each word, and the differences of those that changed."""
    words = change.words(change.difference())
    changed = words != 0
    if np.count_nonzero(changed) > codecs.SPARSE_MAX_DENSITY * changed.size:
        return None
    bits = np.packbits(changed, bitorder="little")
    values = planes.encode(words[changed].view(np.uint8), change.word_bytes)
    return min(bits.size, len(entropy.by_matches(bits.data))) + len(values)


def _rows(change: Change) -> int | None:
    """A bit for each row, and the differences of all words of rows that changed."""
    words = change.words(change.difference()).reshape(-1, change.row_words)
    changed = words.any(axis=1)
    if len(words) == 1 or np.count_nonzero(changed) > 0.5 * len(words):
        return None
    bits = np.packbits(changed, bitorder="little")
    values = planes.encode(words[changed].reshape(-1).view(np.uint8), change.word_bytes)
    return min(bits.size, len(entropy.by_matches(bits.data))) + len(values)


def _csr(change: Change) -> int | None:
    """Changes of each row, their columns, and their differences."""
    words = change.words(change.difference()).reshape(-1, change.row_words)
    row, column = np.nonzero(words)
    if len(words) == 1 or row.size > codecs.SPARSE_MAX_DENSITY * words.size:
        return None
    counts = np.bincount(row, minlength=len(words)).astype("<u4")
    width = 1 if change.row_words <= 1 << 8 else 2 if change.row_words <= 1 << 16 else 4
    parts = (
        planes.encode(counts.view(np.uint8), 4),
        planes.encode(column.astype(f"<u{width}").view(np.uint8), width),
        planes.encode(words[row, column].view(np.uint8), change.word_bytes),
    )
    return sum(map(len, parts))


FORMS: Mapping[str, Coder] = {
    "PLANES": _planes,
    "DIFFERENCE": _difference,
    "BLOCKS": _blocks,
    "SPARSE": _sparse,
}
CANDIDATES: Mapping[str, Coder] = {
    "XOR planes": _xor,
    "gaps + XOR values": _sparse_xor,
    "bitmap + values": _bitmap,
    "whole rows": _rows,
    "CSR rows": _csr,
}


def changes(first: State, second: State) -> Iterator[Change]:
    """The chunks that a save has to code: changed, not constant, no cast of another."""
    old = {jtu.keystr(path): leaf for path, leaf in jtu.tree_leaves_with_path(first)}
    new = {jtu.keystr(path): leaf for path, leaf in jtu.tree_leaves_with_path(second)}
    for name, leaf in new.items():
        if leaf.ndim == 0 or _is_cast(name, new):
            continue
        array, before = np.asarray(leaf), np.asarray(old[name])
        element = dtypes.element_type(array.dtype)
        whole = chunks.whole(array.shape)
        for box in chunks.cut(whole, CHUNK_ELEMENTS):
            place = chunks.slices(box, whole)
            content = element.to_content(array[place])
            base = element.to_content(before[place])
            constant = codecs.constant_word(content, element.word_bytes)
            if constant is None and not np.array_equal(content, base):
                yield Change(
                    content=content,
                    base=base,
                    word_bytes=element.word_bytes,
                    row_words=array.shape[-1] if array.ndim > 1 else array[place].size,
                )


def _is_cast(name: str, leaves: Mapping[str, np.ndarray]) -> bool:
    master = leaves.get(name.replace("params", "master"))
    if master is None or leaves[name].dtype.name != "bfloat16":
        return False
    cast = dtypes.derive(
        dtypes.Rule.F32_TO_BF16, np.asarray(master).reshape(-1).view(np.uint8)
    )
    return cast is not None and bytes(cast) == np.asarray(leaves[name]).tobytes()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a workload comes to.

    Attributes:
        workload: Its name.
        raw_bytes: Bytes of the chunks that were coded.
        alone: By form the bytes of the chunks that it takes, of those chunks raw, and
            CPU seconds.
        chosen: By form the chunks and bytes that it is the smallest for.
        mix: Bytes if each chunk takes its smallest form.
        without: The same without one form, by its name.
        with_candidate: The same with one candidate more, by its name.
    """

    workload: str
    raw_bytes: int
    alone: Mapping[str, tuple[int, int, float]]
    chosen: Mapping[str, tuple[int, int]]
    mix: int
    without: Mapping[str, int]
    with_candidate: Mapping[str, int]


def measure(name: str, setup: Setup) -> Result:
    """Codes the changes of a pair in every form."""
    coders = {**FORMS, **CANDIDATES}
    first, second = itertools.islice(WORKLOADS[name](setup), 2)
    alone = {form: [0, 0, 0.0] for form in coders}
    chosen: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    sizes: list[dict[str, int]] = []
    raw_bytes = 0
    for change in changes(first, second):
        raw_bytes += change.content.size
        sizes.append({})
        for form, coder in coders.items():
            start = time.thread_time()
            size = coder(change)
            if size is not None:
                sizes[-1][form] = size
                spent = time.thread_time() - start
                sums = (size, change.content.size, spent)
                alone[form] = [a + b for a, b in zip(alone[form], sums, strict=True)]
        best = min(FORMS.keys() & sizes[-1].keys(), key=sizes[-1].__getitem__)
        chosen[best][0] += 1
        chosen[best][1] += sizes[-1][best]

    def total(forms: set[str]) -> int:
        return sum(min(size[f] for f in forms & size.keys()) for size in sizes)

    known = set(FORMS)
    return Result(
        workload=name,
        raw_bytes=raw_bytes,
        alone={form: (sums[0], sums[1], sums[2]) for form, sums in alone.items()},
        chosen={form: (count, size) for form, (count, size) in chosen.items()},
        mix=total(known),
        without={f: total(known - {f}) for f in FORMS if f != "PLANES"},
        with_candidate={f: total(known | {f}) for f in CANDIDATES},
    )


def table_of(result: Result) -> Table:
    """Returns the table of one workload."""
    table = Table(title=f"{result.workload}: {result.raw_bytes / 1e6:,.1f} MB changed")
    table.add_column("form")
    for column in (
        "takes, MB",
        "as MB",
        "GB/s",
        "chosen for",
        "MB",
        "mix, MB",
        "change",
    ):
        table.add_column(column, justify="right")
    for form, (size, raw, seconds) in result.alone.items():
        count, best = result.chosen.get(form, (0, 0))
        mix = result.without.get(form) or result.with_candidate.get(form, result.mix)
        table.add_row(
            form if form in FORMS else f"[italic]{form}[/]",
            f"{raw / 1e6:,.2f}",
            f"{size / 1e6:,.3f}" if raw else "-",
            f"{raw / seconds / 1e9:.2f}" if raw else "-",
            str(count) if form in FORMS else "-",
            f"{best / 1e6:,.3f}" if form in FORMS else "-",
            f"{'without ' if form in result.without else ''}{mix / 1e6:,.3f}",
            f"{100 * (mix / result.mix - 1):+.2f} %",
        )
    table.add_section()
    table.add_row("mix of the format", *[""] * 5, f"{result.mix / 1e6:,.3f}", "")
    return table


def main() -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", nargs="*", choices=PAIRS, default=PAIRS)
    parser.add_argument("--scale", choices=sorted(SCALES), default="medium")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=pathlib.Path, help="folder for trained weights")
    parser.add_argument("--json", type=pathlib.Path, help="file for all figures")
    options = parser.parse_args()
    setup = Setup(scale=options.scale, seed=options.seed, cache=options.cache)
    console = Console()
    console.width = max(console.width, 120)
    results = []
    for name in options.workloads:
        results.append(measure(name, setup))
        console.print(table_of(results[-1]))
    if options.json:
        document = [dataclasses.asdict(result) for result in results]
        options.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
