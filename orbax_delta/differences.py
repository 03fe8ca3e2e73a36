"""Contents as words: differences of two, and where they are.

Integer arithmetic in whole passes of numpy, each without the interpreter lock, over
arrays that stay in a core's cache. FORMAT.md section 4.5 is the contract. Does not
belong here: forms, planes, payloads.
"""

import numpy as np

from orbax_delta import scratch
from orbax_delta.kernels import BLOCK_BYTES as BLOCK_BYTES

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

# Words at a time, where a pass needs room for an intermediate result.
_PIECE = 1 << 16


def as_words(content: Bytes, word_bytes: int) -> np.ndarray:
    """`content` as little-endian unsigned words; a view."""
    return content.view(_DTYPES[word_bytes])


_DTYPES = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


def subtract(content: Bytes, base: Bytes, word_bytes: int, out: Bytes) -> None:
    """Put `content - base` into `out`: by words, modulo their range, zigzag.

    Nearby floats of one sign are nearby integers, so that a small change leaves the
    high planes empty; 5 % smaller than XOR on trained states (DESIGN.md, decision 5).
    """
    new, old, all_words = (as_words(part, word_bytes) for part in (content, base, out))
    signs = scratch.array("signs", min(new.size, _PIECE), word_bytes)
    signed = np.dtype(f"<i{word_bytes}")
    for start in range(0, new.size, _PIECE):
        words = all_words[start : start + _PIECE]
        sign = signs[: words.size]
        np.subtract(new[start : start + _PIECE], old[start : start + _PIECE], out=words)
        np.right_shift(words.view(signed), 8 * word_bytes - 1, out=sign.view(signed))
        np.add(words, words, out=words)  # as `<< 1`, of bytes six times as fast
        np.bitwise_xor(words, sign, out=words)


def add(change: Bytes, base: Bytes, word_bytes: int, out: Bytes | None = None) -> None:
    """Put the content whose `subtract` from `base` is `change` into `out`.

    That may be `base`, and is `change` itself if none is given; otherwise `change`
    holds anything afterwards.
    """
    all_words, old = as_words(change, word_bytes), as_words(base, word_bytes)
    new = all_words if out is None else as_words(out, word_bytes)
    odds = scratch.array("signs", min(old.size, _PIECE), word_bytes)
    for start in range(0, old.size, _PIECE):
        words = all_words[start : start + _PIECE]
        odd = odds[: words.size]
        np.bitwise_and(words, 1, out=odd)
        np.negative(odd, out=odd)
        np.right_shift(words, 1, out=words)
        np.bitwise_xor(words, odd, out=words)
        stop = start + words.size
        np.add(words, old[start:stop], out=new[start:stop])


def changed_blocks(changed: np.ndarray, word_bytes: int) -> np.ndarray:
    """bool[blocks]: which 4 KiB blocks hold a changed word; the last may be short.

    Args:
        changed: bool[words].
        word_bytes: Size of a word.
    """
    block = BLOCK_BYTES // word_bytes
    if changed.size <= block:
        return np.array([changed.any()])
    whole = changed.size // block * block
    block_map: np.ndarray = np.any(changed[:whole].reshape(-1, block), axis=1)
    if whole < changed.size:
        block_map = np.append(block_map, bool(changed[whole:].any()))
    return block_map
