"""What reading takes at most, by FORMAT.md section 13.2, of files made to hurt."""

import os
import shutil
import struct
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import hostile
import numpy as np
import pytest
import strategies
from hostile import Judge, item_folder, part_file

import orbax_delta
from orbax_delta import codecs, frames, grids, kernels, lanes, parts, planes, sparse
from orbax_delta.codecs import Form
from orbax_delta.dtypes import Rule
from orbax_delta.errors import (
    CorruptionError,
    DeltaError,
    FormatError,
    OutOfMemoryError,
)
from orbax_delta.manifests import MANIFEST_NAME, parse_manifest
from orbax_delta.options import MAX_CHUNK_BYTES, DeltaOptions
from orbax_delta.parts import Ref, Row

OPTIONS = DeltaOptions(threads=1)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A small root of three steps and a kept base; put right after every change."""
    root = hostile.make(tmp_path_factory.mktemp("hostile") / "run")
    with pytest.MonkeyPatch.context() as patch:
        strategies.skip_disk_sync(patch)
        yield Judge.of(root)


@pytest.fixture
def copied(healthy, tmp_path):
    """A copy of that root, to be changed for good."""
    return Path(shutil.copytree(healthy.root, tmp_path / "run"))


_TEXT_FACTOR = 48
_COLUMNS_FACTOR = 16
_CONTENT_FACTOR = 32


def peak_bytes(action):
    """The most memory that a call takes at a time, and its DeltaError if any."""
    tracemalloc.start()
    try:
        action()
        error = None
    except DeltaError as raised:
        error = raised
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak, error


@pytest.mark.parametrize("size", [1 << 21, 1 << 39, 10**12 - 1])
def test_a_frame_that_announces_too_much_takes_no_memory(size):
    """In the header of a MANIFEST, before any of it is unpacked."""
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + b"\x01\0\0"
    line = f"ORBAX-DELTA-MANIFEST 1 {hostile.digest(frame).hex()} {size}\n".encode()
    peak, error = peak_bytes(lambda: parse_manifest(line + frame, where="a file"))
    assert isinstance(error, CorruptionError)
    assert f"is said to hold {size}; expected at most" in str(error)
    assert peak < 100_000


@pytest.mark.parametrize(
    "unit",
    ["{},", '{"":{}},', "[[]],", "0.5,"],
)
def test_any_json_takes_memory_by_its_text_alone(unit):
    """As much as a small MANIFEST may hold of what makes the most objects."""
    count = (frames.FREE_TEXT_BYTES - 100) // len(unit)
    text = f'{{"required_features":[],"x":[{unit * count}0]}}'.encode()
    data = hostile.manifest_bytes(text)
    assert len(data) < 1000
    peak, error = peak_bytes(lambda: parse_manifest(data, where="a file"))
    assert isinstance(error, FormatError)
    assert peak < len(data) + _TEXT_FACTOR * frames.most_text(len(data))


@pytest.mark.parametrize(("dimensions", "list_length"), [(0, 1), (1, 200), (64, 1)])
def test_any_part_takes_memory_by_its_columns_alone(dimensions, list_length):
    """Rows of the largest numbers, as many as a part of their size may hold."""
    delta = Ref(form=Form.SPARSE, pack="p", offset=1 << 31, length=1 << 31)
    full = Ref(form=Form.PLANES, pack="p", offset=1 << 31, length=1 << 31)
    row = Row(
        leaf=0,
        box=((1 << 62, 1 << 63),) * dimensions,
        digest=b"d" * 16,
        rule=Rule.NONE,
        refs=(full, *[delta] * (list_length - 1)),
        since=9999,
        age=9999,
    )
    width = 27 + 16 * dimensions + 13 * list_length
    count = frames.FREE_TEXT_BYTES // width
    data = parts.encode_part(bytes(16), [row] * count, ["p"])
    assert len(data) < 10_000
    peak, error = peak_bytes(
        lambda: list(
            parts.parse_part(
                data, attempt=bytes(16), rows=count, packs=["p"], words=[4]
            )
        )
    )
    assert error is None
    assert peak < len(data) + _COLUMNS_FACTOR * frames.most_text(len(data))


@pytest.mark.parametrize(
    "form", [f for f in Form if f is not Form.CONSTANT and f not in codecs.GRID_FORMS]
)
@pytest.mark.parametrize("word_bytes", [1, 8])
def test_any_payload_takes_memory_by_its_content_alone(form, word_bytes):
    """Planes of one byte each that fill a chunk of 1 MiB."""
    size = 1 << 20
    base = np.zeros(size, np.uint8)
    coded = planes.encode(base, word_bytes)
    payload = {
        Form.BLOCKS: b"\xff" * (size // codecs.BLOCK_BYTES // 8) + coded,
        Form.SPARSE: sparse._HEAD.pack(4, size // word_bytes)
        + planes.encode(np.zeros(4 * size // word_bytes, np.uint8), 4)
        + coded,
    }.get(form, coded)
    assert len(payload) < 250
    peak, error = peak_bytes(
        lambda: codecs.decode(form, payload, base, size, word_bytes)
    )
    assert error is None
    assert peak < len(payload) + _CONTENT_FACTOR * size


def test_a_large_chunk_does_not_take_its_room_for_each_small_one_beside_it():
    """What is compared together has room by the largest, so that one goes alone."""
    contents = [np.zeros(8 << 20, np.uint8)]
    contents += [np.zeros(128 << 10, np.uint8)] * (kernels.TOGETHER - 1)
    pairs = [sparse.Pair(c, c, 4, most=c.size // 32) for c in contents]
    sparse.find(pairs)  # what is compiled stays, and what a thread keeps
    peak, _ = peak_bytes(lambda: sparse.find(pairs))
    assert peak < contents[0].size // 2


@pytest.mark.parametrize("form", sorted(codecs.GRID_FORMS))
@pytest.mark.parametrize("lane_bits", [1, 8])
def test_any_payload_on_a_grid_takes_memory_by_its_content_alone(form, lane_bits):
    """Lanes of one value that fill a chunk of 1 MiB."""
    size = 1 << 20
    base = np.zeros(size, np.uint8)
    kind = grids.Kind.RELATIVE if form is Form.RELATIVE else grids.Kind.LOG
    log = kind is grids.Kind.LOG
    grid = grids.Grid(
        kind=kind, shift=23 if log else 0, step=0.0 if log else 1.0, seed=int(log)
    )
    lanes_of_zero = lanes._HEAD.pack(lane_bits, 1, 0)
    lanes_of_zero += planes.encode(np.zeros(size // 32 * lane_bits, np.uint8), 1)
    payload = grid.head() + bytes(4) + lanes_of_zero + planes.encode(base[:0], 1)
    assert len(payload) < 250
    codecs.decode(form, payload, base, size, 4)  # what is compiled stays
    peak, error = peak_bytes(lambda: codecs.decode(form, payload, base, size, 4))
    assert error is None
    assert peak < len(payload) + _CONTENT_FACTOR * size


def huge_constant(root, elements, rows):
    """Make leaf `zeros` of step 2 one of very many zeros, in some rows."""
    document = hostile.rewritten(
        root, 2, lambda found: hostile.leaf(found, "zeros").update(shape=[elements])
    )
    index = document["leaves"].index(hostile.leaf(document, "zeros"))
    step = strategies.read_step(root, 3)  # of the same leaves and packs
    size = elements // rows
    constant = Ref(form=Form.CONSTANT, word=b"\0\0")
    huge = [
        Row(
            leaf=index,
            box=((i * size, (i + 1) * size),),
            digest=bytes(16),
            rule=Rule.NONE,
            refs=(constant,),
            since=0,
            age=0,
        )
        for i in range(rows)
    ]
    others = [row for row in step.rows if row.leaf != index]
    path = item_folder(root, 2) / MANIFEST_NAME
    document["packs"] = list(step.manifest.packs)
    document["parts"][0]["packs"] = list(range(len(document["packs"])))
    path.write_bytes(hostile.manifest_bytes(document))
    attempt = bytes.fromhex(document["attempt"])
    data = parts.encode_part(attempt, others + huge, document["packs"])
    hostile.put_part(root, 2, data)


def test_a_constant_larger_than_any_memory_is_an_error_in_words(copied):
    """70 TB in a file of some kB: leaf and size are named; other leaves restore."""
    elements = 1 << 45
    huge_constant(copied, elements, elements * 2 // MAX_CHUNK_BYTES)
    assert part_file(copied, 2).stat().st_size < 500_000
    with pytest.raises(
        OutOfMemoryError,
        match=r"step 2.*no room for \(35184372088832,\) of leaf zeros.*70\.37 TB",
    ):
        hostile.restored(copied, 2)


def test_a_chunk_larger_than_any_writer_makes_is_refused(copied):
    """Before memory is taken for it."""
    huge_constant(copied, MAX_CHUNK_BYTES, 1)
    peak, error = peak_bytes(lambda: hostile.restored(copied, 2))
    assert isinstance(error, CorruptionError)
    assert "places a chunk of 2147483648 bytes" in str(error)
    assert peak < 50_000_000


_LIMITED = """
    import resource, sys
    from pathlib import Path
    from orbax_delta import check, cli

    check.verify(sys.argv[1])  # starts the threads, whose stacks count
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (1000 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.exit(cli.main(["verify", sys.argv[2]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_verify_survives_bombs_in_little_memory(healthy, copied):
    """MANIFEST, part and records that would unpack to gigabytes, in 1 GB in all."""
    megabyte = 1 << 20
    frame = hostile.bomb(b"[], " * (megabyte // 4), 2048)
    line = f"ORBAX-DELTA-MANIFEST 1 {hostile.digest(frame).hex()} {2048 * megabyte}\n"
    path = item_folder(copied, 1) / MANIFEST_NAME
    path.write_bytes(line.encode() + frame)
    rows = 2048 * megabyte // 40
    head = hostile.part_head(path=part_file(copied, 2), rows=rows)
    hostile.put_part(copied, 2, head + hostile.bomb(bytes(40 * rows // 2048), 2048))
    plane = hostile.bomb(bytes(megabyte), 2048)
    payload = struct.pack("<BI", 1, len(plane)) + plane
    hostile.replace_records(copied, 3, payload)
    done = subprocess.run(
        [
            *(sys.executable, "-c", textwrap.dedent(_LIMITED)),
            *(str(healthy.root), str(copied)),
        ],
        env=os.environ | {"PYTHONPATH": str(Path(orbax_delta.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == CorruptionError.exit_code, done.stderr[-2000:]
    assert done.stdout.count("is said to hold") >= 2
    assert f"a zstd frame announces {2048 * megabyte} bytes; expected" in done.stdout
    assert "Traceback" not in done.stderr
