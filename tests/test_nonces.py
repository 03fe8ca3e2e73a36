"""No nonce seals two contents, whatever fails, is repeated or repaired."""

import collections
import errno
import shutil
import threading

import pytest
import strategies
from strategies import STORE, little_state, open_run

from orbax_delta import keys, repair, testing
from orbax_delta.errors import StorageError
from orbax_delta.sealing import Key
from orbax_delta.testing import Match

pytestmark = pytest.mark.usefixtures("forget")


@pytest.fixture
def sealed(monkeypatch):
    """What has been sealed, by key of the attempt and nonce."""
    strategies.skip_disk_sync(monkeypatch)
    found, lock = collections.defaultdict(list), threading.Lock()
    seal_record, seal_part = Key.seal_record, Key.seal_part

    def noting_record(key, place, record):
        with lock:
            found[key.secret, place].append(b"".join(record))
        return seal_record(key, place, record)

    def noting_part(key, attempt, process, head, body):
        with lock:
            found[key.secret, attempt, process].append(head + body)
        return seal_part(key, attempt, process, head, body)

    monkeypatch.setattr(Key, "seal_record", noting_record)
    monkeypatch.setattr(Key, "seal_part", noting_part)
    return found


def test_saves_that_fail_and_are_repeated(root, tmp_path, sealed, record_property):
    """At each operation of a save; then the same step holds other content."""
    key = keys.new_key_file(tmp_path / "key")
    options = {**strategies.LITTLE_OPTIONS, "encryption": key}
    with open_run(root, **options) as run, testing.faults() as log:
        run.save(0, little_state(0))
    count, failed = len(log.operations), 0
    for number in range(1, count + 1):
        shutil.rmtree(root)
        rule = testing.fail(errno.EIO, Match(first=number, times=1))
        with testing.new_life(), open_run(root, **options) as run:
            for step in range(3):
                try:
                    with testing.faults(*[rule] * (step == 1)):
                        run.save(step, little_state(step))
                except StorageError:
                    failed += 1
                    # Other content in the place of what may have been written.
                    run.manager.reload()
                    run.save(step, little_state(step + 5))
    assert failed > 5
    record_property("failures", failed)
    assert len(sealed) > 100
    assert max(map(len, sealed.values())) == 1


def test_repairs(root, tmp_path, sealed):
    """Records that are written again are sealed under a key of their own."""
    key = keys.new_key_file(tmp_path / "key")
    options = {**strategies.LITTLE_OPTIONS, "refresh_every": 2, "encryption": key}
    with open_run(root, **options) as run:
        for step in range(6):
            run.save(step, little_state(0))
    before = len(sealed)
    for seed in range(3):
        pack = sorted((root / STORE / "packs").iterdir())[seed]
        data = bytearray(pack.read_bytes())
        data[60] ^= 1
        pack.write_bytes(data)
        repair.repair(str(root))
    assert len(sealed) > before
    assert max(map(len, sealed.values())) == 1
