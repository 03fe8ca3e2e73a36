"""zstd frames: exactly what is announced, within bounds, or a typed error."""

import struct
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import zstandard

from orbax_delta import entropy, frames
from orbax_delta.errors import CorruptionError


def _forged_frame(announced):
    """A zstd frame that announces a size and holds one empty block."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", announced) + b"\x01\0\0"


@pytest.mark.parametrize("announced", [0, 99, 101, 1 << 40, (1 << 64) - 3])
def test_a_frame_of_another_size_is_refused_before_memory_is_taken(announced):
    """A forged size is compared, not allocated: the peak stays below 100 kB."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="announces"):
            frames.decompress(_forged_frame(announced), 100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_no_frame_may_announce_more_than_it_can_hold():
    """Even where the expected size itself is forged, the file's size bounds memory."""
    with pytest.raises(CorruptionError, match="no frame holds more than 32768 times"):
        frames.decompress(_forged_frame(1 << 40), 1 << 40)


def test_real_frames_stay_below_that_bound():
    """The most compressible content there is still decodes."""
    for size in (1, 1 << 10, 1 << 17, (1 << 20) + 1, 1 << 25):
        frame = entropy.by_matches(memoryview(bytes(size)))
        assert frames.decompress(frame, size) == bytes(size)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (zstandard.compress(b"x" * 100) + b"!", "unused data"),
        (zstandard.compress(b"x" * 100) * 2, "unused data"),
        (zstandard.compress(b"x" * 100)[:-1], "does not decode"),
        (b"", "does not decode"),
        (
            zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100),
            "announces -1 bytes",
        ),
        (struct.pack("<II", 0x184D2A50, 4) + b"skip", "announces 0 bytes"),
    ],
)
def test_exactly_one_whole_frame_of_known_size_is_read(frame, message):
    """Nothing may follow a frame, and one without a size is not read at all."""
    with pytest.raises(CorruptionError, match=message):
        frames.decompress(frame, 100)


EMPTY = zstandard.compress(b"")


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (EMPTY + b"!", "not one whole frame"),
        (EMPTY * 2, "not one whole frame"),
        (EMPTY[:-1], "not one whole frame"),
        (b"", "no zstd frame that holds nothing"),
        (struct.pack("<II", 0x184D2A50, 4) + b"skip", "no zstd frame that holds"),
        (zstandard.compress(b"x"), "not one whole frame"),
        (zstandard.compress(bytes(1 << 25)), "no zstd frame that holds nothing"),
        (b"\x28\xb5\x2f\xfd\xff" + bytes(20), "does not decode"),
    ],
)
def test_a_frame_that_holds_nothing_is_looked_at_too(frame, message):
    """The library itself stops at the header of such a frame."""
    assert frames.decompress(EMPTY, 0) == b""
    with pytest.raises(CorruptionError, match=message):
        frames.decompress(frame, 0)


@pytest.mark.parametrize("size", [0, 1, 1 << 17, 1 << 20, (1 << 20) + 1, 3 << 20])
@pytest.mark.parametrize("level", [1, 9])
def test_text_of_any_kind_fits_its_frame(size, level):
    """What zstd would shrink to almost nothing is stored, so that a reader has a bound.

    zstandard itself reads such a frame.
    """
    noise = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    for text in (bytes(size), b"ab" * (size // 2), noise):
        frame = frames.compress_text(text, level)
        assert len(text) <= frames.most_text(len(frame))
        assert frames.decompress_text(frame, len(text)) == text
        assert zstandard.ZstdDecompressor().decompress(frame) == text


def test_text_that_no_writer_puts_into_a_frame_is_refused():
    """A frame that decodes well, of more than may be in so few bytes."""
    text = bytes(2 << 20)
    frame = zstandard.compress(text)
    with pytest.raises(CorruptionError, match=r"is said to hold 2097152; expected at"):
        frames.decompress_text(frame, len(text))


_KINDS = "plain summed constant silent followed twice cut spoilt forged none nothing"


def _odd_frame(kind, size):
    """A frame that is not one block of what it announces, or announces it otherwise."""
    text = np.random.default_rng(size).integers(0, 9, size, np.uint8).tobytes()
    frame = zstandard.ZstdCompressor(level=1).compress(text)
    return {
        "plain": frame,
        "summed": zstandard.ZstdCompressor(write_checksum=True).compress(text),
        "constant": zstandard.compress(bytes(size)),
        "silent": zstandard.ZstdCompressor(write_content_size=False).compress(text),
        "followed": frame + b"!",
        "twice": frame + frame,
        "cut": frame[:-1],
        "spoilt": frame[:-3] + b"abc",
        "forged": _forged_frame(size),
        "none": text,
        "nothing": b"",
    }[kind]


@hypothesis.given(
    st.sampled_from(_KINDS.split()),
    st.sampled_from([0, 1, 90, 3000, 1 << 17, (1 << 17) + 1]),
    st.integers(0, 11),
    st.sampled_from([0, 0, 0, 1, -1]),
    st.booleans(),
)
def test_many_frames_are_what_each_of_them_is(kind, size, place, off, available):
    """One among many that is wrong, or unusual, is treated as if it were alone."""
    parts = [(memoryview(_odd_frame("plain", 50 + i)), 50 + i) for i in range(11)]
    parts.insert(place, (memoryview(_odd_frame(kind, size)), max(size + off, 0)))
    outcomes = []
    features = frames._FEATURES if available else set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "_FEATURES", features)
        for attempt in (
            lambda: list(map(bytes, frames.decompress_all(parts))),
            lambda: [frames.decompress(*part) for part in parts],
        ):
            try:
                outcomes.append(attempt())
            except CorruptionError:
                outcomes.append("refused")
    assert outcomes[0] == outcomes[1]


def test_many_frames_can_be_decoded_at_once():
    """Or the test before this one compares a way with itself."""
    assert "multi_decompress_to_buffer" in frames._FEATURES
