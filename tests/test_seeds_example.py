"""The founding example: a 1024 x 1024 matrix in 1,024 blocks, a few of them changed.

A bitmap of 1,024 bits says which blocks changed, and only those are stored.
"""

import struct

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import zstandard

import orbax_delta
from orbax_delta import codecs
from orbax_delta.codecs import BLOCK_BYTES, Form
from orbax_delta.places import locate
from orbax_delta.records import parse_pack, parse_record
from orbax_delta.steps import open_step

SIDE = 1024
BLOCKS = 1024
MATRIX_BYTES = 4 << 20
BITMAP_BYTES = 128


def _matrix():
    """A trained-looking matrix; 1,024 contiguous elements (4 KiB) are a block."""
    rng = np.random.default_rng(7)
    return (rng.standard_normal((SIDE, SIDE)) * 0.02).astype(np.float32)


def _changed(matrix, count):
    """A copy with every element of `count` whole blocks changed, and which blocks."""
    rng = np.random.default_rng(8)
    blocks = np.sort(rng.choice(BLOCKS, count, replace=False))
    changed = matrix.copy()
    by_block = changed.reshape(BLOCKS, -1)
    by_block[blocks] += rng.uniform(1e-4, 1e-3, (count, 1024)).astype(np.float32)
    differ = (changed.view(np.uint32) != matrix.view(np.uint32)).reshape(BLOCKS, -1)
    assert np.array_equal(np.flatnonzero(differ.all(axis=1)), blocks)
    assert np.array_equal(np.flatnonzero(differ.any(axis=1)), blocks)
    return changed, blocks


def _content(matrix):
    return matrix.reshape(-1).view(np.uint8)


def _read_planes(payload, plane_bytes):
    """Four planes of a float32 payload by section 4.2 of FORMAT.md, as words."""
    words, position = np.zeros(plane_bytes, np.uint32), 0
    for plane in range(4):
        method, length = struct.unpack_from("<BI", payload, position)
        data = payload[position + 5 : position + 5 + length]
        position += 5 + length
        if method == 1:
            data = zstandard.decompress(data)
        if method == 2:
            data = data * plane_bytes
        words |= np.frombuffer(data, np.uint8).astype(np.uint32) << (8 * plane)
    assert position == len(payload)
    return words


def test_a_few_changed_blocks_become_a_bitmap_and_those_blocks():
    """Through the codec: form, 1,024 bits, exactly the changed blocks, exact again."""
    matrix = _matrix()
    changed, blocks = _changed(matrix, 40)
    base, content = _content(matrix), _content(changed)
    delta = codecs.encode_delta(content, base, 4)
    assert delta.form is Form.BLOCKS
    assert delta.changed_words == 40 * 1024
    assert delta.changed_blocks == 40

    bitmap, dense = delta.payload[:BITMAP_BYTES], delta.payload[BITMAP_BYTES:]
    bits = [bitmap[bit // 8] >> (bit % 8) & 1 for bit in range(BLOCKS)]
    assert len(bitmap) * 8 == BLOCKS
    assert np.flatnonzero(bits).tolist() == blocks.tolist()

    zigzag = _read_planes(dense, 40 * 1024)
    step = np.where(zigzag & 1, ~(zigzag >> 1), zigzag >> 1)
    old = matrix.view(np.uint32).reshape(BLOCKS, -1)[blocks].ravel()
    new = changed.view(np.uint32).reshape(BLOCKS, -1)[blocks].ravel()
    assert np.array_equal(old + step, new)

    decoded = codecs.decode(delta.form, delta.payload, base, MATRIX_BYTES, 4)
    assert decoded.tobytes() == content.tobytes()
    assert len(delta.payload) < BITMAP_BYTES + 40 * BLOCK_BYTES


@pytest.mark.parametrize("count", [1, 3, 16, 100, 500])
def test_any_number_of_changed_blocks_is_exact_and_no_larger_than_they_are(count):
    """Bitmap and blocks are the ceiling: another form is used where it is smaller."""
    matrix = _matrix()
    changed, _ = _changed(matrix, count)
    delta = codecs.encode_delta(_content(changed), _content(matrix), 4)
    assert delta.changed_blocks == count
    assert len(delta.payload) < BITMAP_BYTES + count * BLOCK_BYTES
    decoded = codecs.decode(
        delta.form, delta.payload, _content(matrix), MATRIX_BYTES, 4
    )
    assert decoded.tobytes() == changed.tobytes()


def test_the_manager_saves_a_few_changed_blocks_as_such(root):
    """Through CheckpointManager: report, bytes on disk, and a restore bit for bit."""
    matrix = _matrix()
    changed, blocks = _changed(matrix, 40)
    registry = orbax_delta.handler_registry(chunk_bytes=MATRIX_BYTES)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step, value in enumerate([matrix, changed]):
            state = {"matrix": jnp.asarray(value)}
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        restored = [
            manager.restore(step, args=ocp.args.StandardRestore(state))
            for step in (0, 1)
        ]
    assert np.asarray(restored[0]["matrix"]).tobytes() == matrix.tobytes()
    assert np.asarray(restored[1]["matrix"]).tobytes() == changed.tobytes()

    report = orbax_delta.save_report(root / "1")
    assert report.chunks_by_form == {"blocks": 1}
    assert (report.blocks, report.blocks_changed) == (1024, 40)
    assert (report.elements, report.elements_changed) == (1 << 20, 40 * 1024)
    assert report.full_bytes == MATRIX_BYTES
    assert report.records_per_chunk_max == 2
    # Record, pack and part around bitmap and blocks: a few hundred bytes.
    assert report.written_bytes < 40 * BLOCK_BYTES + BITMAP_BYTES + 512
    assert report.written_bytes > 40 * BLOCK_BYTES / 2
    assert _bitmap_on_disk(root) == blocks.tolist()


def _bitmap_on_disk(root):
    """Which blocks the second record of step 1's only chunk marks."""
    (row,) = open_step(locate(str(root / "1" / "default"))).rows
    full, delta = row.refs
    assert (full.form, delta.form) == (Form.PLANES, Form.BLOCKS)
    pack = memoryview((root / "_delta_store" / "packs" / delta.pack).read_bytes())
    assert (delta.offset, delta.length) in parse_pack(pack).spans
    record = parse_record(pack[delta.offset : delta.offset + delta.length])
    bits = np.unpackbits(
        np.frombuffer(record.payload[:BITMAP_BYTES], np.uint8), bitorder="little"
    )
    return np.flatnonzero(bits).tolist()
