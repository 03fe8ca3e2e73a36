"""Device programs compiled for a TPU v5e and an H100, neither of which has to be here.

Left out by default, because it compiles for minutes:
`pytest -m long tests/test_aot.py`. The extra `test` brings both compilers on Linux on
x86-64.
"""

import json
import subprocess
import sys

import aot
import pytest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["tpu", "gpu"])
def compiled(request):
    """Kind of device, and the rows of `aot.py`."""
    done = subprocess.run(
        [sys.executable, aot.__file__, request.param],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"needs the extra `aot`: {done.stderr[-3000:]}"
    return request.param, json.loads(done.stdout.splitlines()[-1])["rows"]


def test_no_program_waits_for_another_device(compiled):
    """A process that does not save, or fails, keeps no other one waiting."""
    _, rows = compiled
    assert len(rows) == 2 * len(aot.SHARDS) + 1
    assert [row for row in rows if row["collectives"]] == []


def test_digests_read_an_array_once(compiled, record_property):
    """Without a copy of it: no scratch to speak of beside a full device."""
    kind, rows = compiled
    found = [row for row in rows if row["program"] == "Detect"]
    for row in found:
        share = row["temp_bytes"] / row["reference_bytes"]
        reads = row["accessed_bytes"] / row["reference_bytes"]
        record_property(
            f"table: digests on {kind}",
            {
                "shard": row["shard"],
                "bytes": row["reference_bytes"],
                "scratch": row["temp_bytes"],
                "accessed": f"{reads:.2f}",
            },
        )
        if kind == "tpu":
            assert share == 0, row
            assert reads < 1.25, row  # old and new digests too, of bytes 3 % each
        else:
            assert share < 0.05, row


def test_copies_take_what_they_copy(compiled):
    """The result, and next to nothing beside it."""
    _, rows = compiled
    for row in rows:
        if row["program"] == "Gather":
            assert row["output_bytes"] <= 1.1 * row["reference_bytes"], row
            assert row["temp_bytes"] <= 0.1 * row["reference_bytes"], row
