"""The columns of a part as arrays, and whether a writer can have made them.

Millions of rows are checked at a time, column by column: FORMAT.md section 7. Does not
belong here: the file around them, rows as objects.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from orbax_delta.codecs import Form
from orbax_delta.dtypes import CAST_WORD_BYTES, Rule, source_bytes
from orbax_delta.errors import CorruptionError
from orbax_delta.options import MAX_CHAIN_LIMIT
from orbax_delta.records import DIGEST_BYTES

INLINE = 0xFFFFFFFF
"""Pack of a constant, which has a word instead of a record."""
WORD_BYTES = 8
"""Room for the word of a constant."""

_FORMS = [int(form) for form in Form]
_FULL_FORMS = [int(form) for form in Form if form.is_full]
_RULES = [int(rule) for rule in Rule]
_SOURCE_RATIOS = np.array([source_bytes(rule, 1) for rule in Rule])


def body_bytes(row_count: int, ref_count: int, bound_count: int) -> int:
    """Size of the columns together."""
    return row_count * (11 + DIGEST_BYTES) + bound_count * 8 + ref_count * 13


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns in their order in the file.

    Attributes:
        leaf: Of each row, its leaf.
        ndim: Of each row, the dimensions of its box.
        rule: Of each row, how its content follows from its records.
        since: Of each row, deltas since the last full record.
        age: Of each row, saves since the last full record.
        ref_counts: Of each row, how many records it lists.
        digests: Of each row, the digest of its content.
        bounds: Start and stop of each dimension of each box.
        form: Of each record, its form.
        pack: Of each record, its pack, or INLINE.
        offset: Of each record, its place in the pack, or the low half of a word.
        length: Of each record, its size, or the high half of a word.
    """

    leaf: np.ndarray
    ndim: np.ndarray
    rule: np.ndarray
    since: np.ndarray
    age: np.ndarray
    ref_counts: np.ndarray
    digests: np.ndarray
    bounds: np.ndarray
    form: np.ndarray
    pack: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    @classmethod
    def split(
        cls, body: memoryview, row_count: int, ref_count: int, bound_count: int
    ) -> "Columns":
        """Views of `body`, which holds `body_bytes` bytes.

        Raises:
            CorruptionError: The counts of single rows do not add up to those.
        """
        position = 0

        def take(dtype: str, count: int) -> np.ndarray:
            nonlocal position
            column = np.frombuffer(body, dtype, count, position)
            position += column.nbytes
            return column

        columns = cls(
            leaf=take("<u4", row_count),
            ndim=take("u1", row_count),
            rule=take("u1", row_count),
            since=take("<i2", row_count),
            age=take("<i2", row_count),
            ref_counts=take("u1", row_count),
            digests=take("u1", row_count * DIGEST_BYTES),
            bounds=take("<u8", bound_count),
            form=take("u1", ref_count),
            pack=take("<u4", ref_count),
            offset=take("<u4", ref_count),
            length=take("<u4", ref_count),
        )
        found = columns.ref_counts.sum(), 2 * columns.ndim.sum()
        if found != (ref_count, bound_count):
            raise CorruptionError("a part's counts of records or bounds do not add up")
        return columns

    def list_edges(self) -> np.ndarray:
        """Where each row's records begin, and where the last one's end."""
        return _edges(self.ref_counts)

    def bound_edges(self) -> np.ndarray:
        """Where each row's bounds begin, and where the last one's end."""
        return 2 * _edges(self.ndim)

    def words(self, refs: slice | np.ndarray) -> np.ndarray:
        """What records hold that are none: the words of constants, as numbers."""
        high = self.length[refs].astype(np.uint64) << np.uint64(32)
        numbers: np.ndarray = high | self.offset[refs]
        return numbers

    def check(self, pack_count: int, word_sizes: Sequence[int]) -> None:
        """Raise unless a writer can have made them.

        Args:
            pack_count: How many packs there are.
            word_sizes: Of each leaf; 0 for no array.

        Raises:
            CorruptionError: The first row, or record, with an index, number or list
                that is out of range.
        """
        row_words = np.array([*word_sizes, 0])[np.minimum(self.leaf, len(word_sizes))]
        index = _first((row_words == 0) | ~np.isin(self.rule, _RULES))
        if index is not None:
            raise CorruptionError(
                f"row {index} of a part names leaf {self.leaf[index]} and rule "
                f"{self.rule[index]}; there is no such leaf or rule"
            )
        index = _first((self.rule != Rule.NONE) & (row_words != CAST_WORD_BYTES))
        if index is not None:
            raise CorruptionError(
                f"row {index} of a part follows by rule {Rule(self.rule[index]).name}, "
                f"but leaf {self.leaf[index]} has {row_words[index]}-byte words, not "
                f"{CAST_WORD_BYTES}"
            )
        inline = self.pack == INLINE
        unknown = ~np.isin(self.form, _FORMS)
        index = _first(unknown | (inline != (self.form == Form.CONSTANT)))
        if index is not None:
            raise CorruptionError(
                f"record {index} of a part has form {self.form[index]}"
            )
        index = _first(~inline & (self.pack >= pack_count))
        if index is not None:
            raise CorruptionError(
                f"record {index} of a part names pack {self.pack[index]} of "
                f"{pack_count}"
            )
        edges = self.list_edges()
        self._check_lists(edges)
        self._check_constants(edges, np.flatnonzero(inline), row_words)

    def _check_lists(self, edges: np.ndarray) -> None:
        index = _first((self.ref_counts < 1) | (self.ref_counts > MAX_CHAIN_LIMIT))
        if index is not None:
            raise CorruptionError(
                f"row {index} of a part lists {self.ref_counts[index]} records"
            )
        begins = np.zeros(len(self.form), bool)
        begins[edges[:-1]] = True
        index = _first(np.isin(self.form, _FULL_FORMS) != begins)
        if index is not None:
            row = int(_rows_of(index, edges))
            forms = self.form[edges[row] : edges[row + 1]].tolist()
            raise CorruptionError(
                f"row {row} of a part must list one full record and then deltas; it "
                "lists " + ", ".join(Form(form).name for form in forms)
            )

    def _check_constants(
        self, edges: np.ndarray, inline: np.ndarray, row_words: np.ndarray
    ) -> None:
        """What pads the word of a constant is zero: there is one way to write it."""
        rows = _rows_of(inline, edges)
        widths = row_words[rows] * _SOURCE_RATIOS[self.rule[rows]]
        words = self.words(inline)
        # numpy leaves open what a shift by all bits does.
        excess = words >> (8 * widths % 64).astype(np.uint64)
        index = _first((widths < WORD_BYTES) & (excess != 0))
        if index is not None:
            word = int(words[index]).to_bytes(WORD_BYTES, "little")
            raise CorruptionError(
                f"record {inline[index]} of a part repeats the word {word.hex()}, "
                f"which is longer than {widths[index]} bytes"
            )


def _edges(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _rows_of(refs: int | np.ndarray, edges: np.ndarray) -> np.ndarray:
    """In which rows' lists they stand, where no list is empty."""
    return np.searchsorted(edges, refs, "right") - 1


def _first(wrong: np.ndarray) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None
