"""Runs that are encrypted: what is on disk, who can read it, what a change of key does.

Bytes of one record: `test_sealing.py`. Any order of saves, deletions, restarts and
changes of key: `test_state_machine.py`.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys

import golden
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import second_reader
import strategies
from etils import epath
from processes import Job
from strategies import STORE, assert_same_tree, little_state, open_run

import orbax_delta
from orbax_delta import (
    check,
    differing,
    exports,
    keyfiles,
    keys,
    listing,
    parts,
    prune,
    records,
    repair,
    usage,
)
from orbax_delta.errors import (
    CorruptionError,
    InvalidInputError,
    WrongKeyError,
)
from orbax_delta.keys import Encryption
from orbax_delta.manifests import encode_manifest
from orbax_delta.store import DeltaStore, Folder

pytestmark = pytest.mark.usefixtures("forget")

SMALL = {**strategies.LITTLE_OPTIONS, "full_every": 10, "refresh_every": 30}
TEXT = "the secret of the run " * 20
MISSING = r"encrypted with key '[0-9a-f]{16}', which this process does not know"


def secret_of(name):
    """A function of keys, as one that asks a service for them."""
    if name.startswith("lost"):
        raise KeyError(name)
    return hashlib.sha256(name.encode()).digest()


@pytest.fixture
def key_file(tmp_path):
    """A file with a key."""
    return keys.new_key_file(tmp_path / "keys")


def state(step):
    """Chunks of every kind, and a text."""
    return {**little_state(step), "text": TEXT, "fives": np.full(900, 5.5)}


def save_steps(root, steps, **options):
    """Saves; the report of each."""
    with open_run(root, **{**SMALL, **options}) as run:
        reports = []
        for step in steps:
            run.save(step, state(step))
            reports.append(run.handler.last_save_report)
        return reports


def restored(root, step):
    """A step, by a handler without options."""
    item = epath.Path(root / str(step) / "default")
    return orbax_delta.DeltaCheckpointHandler().restore(item)


def files_of(root, pattern):
    """The bytes of files, by name."""
    return {path.name: path.read_bytes() for path in root.rglob(pattern)}


def windows(data, size=8):
    """Every run of some bytes in it."""
    return {data[start : start + size] for start in range(len(data) - size + 1)}


# --- what is on disk ------------------------------------------------------------------


def test_nothing_of_the_content_is_on_disk(root, key_file):
    """Texts, words of constants, digests; what is not encrypted shows them."""
    save_steps(root, range(4), encryption=key_file)
    save_steps(root.with_name("plain"), range(4))
    word = np.float64(5.5).tobytes()
    digests = {
        row.digest for s in range(4) for row in strategies.read_step(root, s).rows
    }
    for folder, shown in ((root, False), (root.with_name("plain"), True)):
        packs = b"".join(files_of(folder, "*-p0-*").values())
        parts = b"".join(files_of(folder, "part-*").values())
        assert (b"ODR0" in packs) == shown
        assert (TEXT[:22].encode() in packs) == shown
        assert (b"ODRS" in packs) != shown
        assert word * 2 not in packs + parts
        assert any(digest in parts for digest in digests) == shown
    for step in range(4):
        assert_same_tree(restored(root, step), state(step))


def test_equal_runs_under_different_keys_have_nothing_in_common(tmp_path):
    """Neither packs nor parts; lengths alone are alike."""
    for name in "ab":
        key = keys.new_key_file(tmp_path / f"{name}.key")
        save_steps(tmp_path / name, range(3), encryption=key)
    for pattern in ("*-p0-*", "part-*"):
        first, second = (
            b"".join(data[48:-48] for data in files_of(tmp_path / n, pattern).values())
            for n in "ab"
        )
        assert abs(len(first) - len(second)) < 200
        # The magics of records, and lengths beside them in an index.
        common = windows(first) & windows(second)
        assert len(common) < 10


def test_the_second_reader_reads_it(root, key_file):
    """From the format document alone, with the bytes of the key."""
    states = {step: golden.state(step) for step in golden.STEPS}
    with open_run(root, **SMALL, encryption=key_file) as run:
        for step, tree in states.items():
            run.save(step, tree)
    secret = bytes.fromhex(key_file.read_text())
    for step, tree in states.items():
        item = root / str(step) / "default"
        found = second_reader.read_step(item, secret)
        expected = golden.leaves(tree)
        assert {json.dumps(path) for path in found} == expected.keys()
        with pytest.raises(second_reader.DamagedError, match="the key"):
            second_reader.read_step(item, bytes(32))


def test_a_self_contained_checkpoint(tmp_path, key_file):
    """A plain Checkpointer's."""
    handler = orbax_delta.DeltaCheckpointHandler(
        orbax_delta.DeltaOptions(encryption=key_file)
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "one", args=orbax_delta.DeltaSave(state(1)))
        assert_same_tree(checkpointer.restore(tmp_path / "one"), state(1))
    secret = bytes.fromhex(key_file.read_text())
    assert second_reader.read_step(tmp_path / "one", secret)[("text",)] == TEXT


def test_what_it_costs_on_disk(root, key_file):
    """28 bytes a record and 16 a part; columns of other lengths pack a little worse."""
    plain = save_steps(root.with_name("plain"), range(4))
    sealed = save_steps(root, range(4), encryption=key_file)
    for one, other in zip(plain, sealed, strict=True):
        records = sum(one.chunks_by_form.get(form, 0) for form in one.bytes_by_form)
        assert other.written_bytes - one.written_bytes == pytest.approx(
            28 * records + 16, abs=100
        )
        assert other.chunks_by_form == one.chunks_by_form


# --- who can read it ------------------------------------------------------------------


def test_without_the_key(root, key_file, forget):
    """Whatever reads content says which key is missing; nothing is changed."""
    save_steps(root, range(3), encryption=key_file)
    forget()
    before = strategies.listing(root)
    url = str(root)
    for action in (
        lambda: restored(root, 2),
        lambda: check.verify(url),
        lambda: repair.repair(url),
        lambda: exports.export_orbax(root, 2, root.with_name("out")),
        lambda: exports.export_delta(root, 2, root.with_name("out")),
        lambda: differing.between(url, "1", "2"),
        lambda: orbax_delta.restore_base(root),
    ):
        with pytest.raises(WrongKeyError, match=MISSING):
            action()
    problems = usage.measure(listing.read_root(url)).problems
    assert problems
    assert all("does not know" in problem for problem in problems)
    assert strategies.listing(root) == before
    assert not root.with_name("out").exists()
    # What needs no content needs no key.
    assert [item.step for item in listing.read_root(url).items] == ["0", "1", "2"]
    keys.use_key(key_file)
    assert_same_tree(restored(root, 2), state(2))
    assert check.verify(url).ok


def test_a_missing_key_is_no_reason_to_fall_back(root, key_file, tmp_path, forget):
    """Neither loudly to an older step nor to what other records hold."""
    save_steps(root, [0])
    other = keys.new_key_file(tmp_path / "other")
    save_steps(root, [1], encryption=key_file)
    forget()
    with open_run(root, encryption=other) as run:
        for args in (
            orbax_delta.DeltaRestore(on_corruption="fallback"),
            orbax_delta.DeltaRestore(),
        ):
            with pytest.raises(WrongKeyError, match="does not know"):
                run.manager.restore(1, args=args)
        with pytest.raises(WrongKeyError, match="does not know"):
            orbax_delta.restore_latest_good(run.manager)
        # It is said at the restore, and a save writes all of it under its own key.
        run.save(2, state(2))
    assert_same_tree(restored(root, 0), state(0))
    assert_same_tree(restored(root, 2), state(2))


def test_a_prune_needs_no_key(root, key_file, forget):
    """What is garbage stands in the clear."""
    save_steps(root, range(3), encryption=key_file, keep_bases=0)
    forget()
    shutil.rmtree(root / "0")
    shutil.rmtree(root / "1")
    shutil.rmtree(root / "2")
    store = DeltaStore.open(Folder(str(root)))
    assert prune.execute(store, prune.plan(store))
    assert strategies.packs_on_disk(root) == set()


def test_another_key_of_the_same_name(root):
    """It is said before anything is opened with it."""
    save_steps(root, [0], encryption=Encryption(key=secret_of, key_id="mine"))
    check_value = strategies.read_manifest(root / "0/default/MANIFEST").encryption
    keys._known = keys._Known()
    keys.use_key(lambda name: bytes(32))
    with pytest.raises(WrongKeyError, match="another key than the one that is now"):
        restored(root, 0)
    assert check_value["key_id"] == "mine"
    keys.use_key(secret_of)
    assert_same_tree(restored(root, 0), state(0))


def test_moved_records_do_not_open(root, key_file):
    """Two records of equal length that changed places are damage, not content."""
    with open_run(root, encryption=key_file, chunk_bytes=4096) as run:
        noise = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
        run.save(0, {"noise": noise})
    rows = strategies.read_step(root, 0).rows
    first, second = (row.refs[0] for row in rows[:2])
    assert (first.pack, first.length) == (second.pack, second.length)
    path = root / STORE / "packs" / first.pack
    data = bytearray(path.read_bytes())
    spans = [slice(ref.offset, ref.offset + ref.length) for ref in (first, second)]
    data[spans[0]], data[spans[1]] = data[spans[1]], data[spans[0]]
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="was moved here from elsewhere"):
        restored(root, 0)
    report = check.verify(str(root))
    assert {problem.leaf for problem in report.problems} == {"noise"}


def test_rows_under_one_key_of_records_under_another(root, key_file, tmp_path):
    """No writer makes such a step; a list that one key opens is not whole for all."""
    save_steps(root, [0], encryption=key_file)
    other = next(keyfiles.keys_of(keys.new_key_file(tmp_path / "other")))
    keys.use_key(tmp_path / "other")
    step, attempt = strategies.read_step(root, 0), bytes(range(16))
    data = parts.encode_part(attempt, step.rows, step.manifest.packs, key=other)
    (part,) = step.manifest.parts
    part = dataclasses.replace(
        part,
        name=f"part-{attempt.hex()}-p0",
        length=len(data),
        digest=records.digest(data).hex(),
    )
    manifest = dataclasses.replace(
        step.manifest,
        attempt=attempt.hex(),
        parts=(part,),
        encryption={"key_id": other.id, "check": other.check(attempt)},
    )
    shutil.copytree(root / "0", root / "1")
    item = root / "1" / "default"
    (item / part.name).write_bytes(data)
    (item / "MANIFEST").write_bytes(encode_manifest(manifest))
    with pytest.raises(CorruptionError, match=f"does not open with key {other.id}"):
        restored(root, 1)
    assert check.verify(str(root)).whole_steps == ["0"]


def test_damage_is_healed_and_repaired(root, key_file):
    """From another step's records; what a repair writes is sealed too."""
    with open_run(root, **strategies.LITTLE_OPTIONS, encryption=key_file) as run:
        for step in range(6):
            run.save(step, state(0))
    row = next(r for r in strategies.read_step(root, 5).rows if r.refs[0].pack)
    ref = row.refs[0]
    path = root / STORE / "packs" / ref.pack
    data = bytearray(path.read_bytes())
    data[ref.offset + 20] ^= 1
    path.write_bytes(data)
    problems = check.verify(str(root)).problems
    assert any("checksum of a sealed record" in problem.what for problem in problems)
    assert_same_tree(restored(root, 5), state(0))
    assert repair.repair(str(root)).mended
    assert check.verify(str(root)).whole_steps == [str(step) for step in range(6)]
    secret = bytes.fromhex(key_file.read_text())
    for step in range(6):
        assert second_reader.read_step(root / str(step) / "default", secret)
    packs = files_of(root / STORE / "packs", "*")
    assert not any(b"ODR0" in data for data in packs.values())


# --- keys -----------------------------------------------------------------------------


def test_another_key_writes_everything_anew(root, tmp_path, forget):
    """From then on deltas again; old steps need the old key, and no new step does."""
    old, new = (keys.new_key_file(tmp_path / name) for name in ("old", "new"))
    save_steps(root, range(3), encryption=old)
    both = tmp_path / "both"
    both.write_text(f"# since June\n{new.read_text()}\n{old.read_text()}")
    with open_run(root, **SMALL, encryption=both) as run:
        assert_same_tree(run.restore(2), state(2))
        run.save(3, state(3))
        assert not run.handler.last_save_report.chunks_by_form.get("reference")
        run.save(4, state(4))
        assert run.handler.last_save_report.chunks_by_form["reference"]
    forget()
    keys.use_key(new)
    for step in (3, 4):
        assert_same_tree(restored(root, step), state(step))
    with pytest.raises(WrongKeyError, match=MISSING):
        restored(root, 2)
    for path in map(str, range(3)):
        shutil.rmtree(root / path)
    for folder in (root / STORE / "bases").iterdir():
        if strategies.read_manifest(folder / "MANIFEST").step < 3:
            shutil.rmtree(folder)
    store = DeltaStore.open(Folder(str(root)))
    prune.execute(store, prune.plan(store))
    assert check.verify(str(root)).ok
    assert_same_tree(restored(root, 4), state(4))


@pytest.mark.parametrize("before", [True, False])
def test_encryption_begins_or_ends_in_the_middle(root, key_file, before):
    """No encrypted step refers to what is in the clear, nor the other way round."""
    with open_run(root, **SMALL, encryption=key_file if before else None) as run:
        run.save(0, state(0))
    with open_run(root, **SMALL, encryption=None if before else key_file) as run:
        assert_same_tree(run.restore(0), state(0))
        run.save(1, state(1))
        run.save(2, state(2))
    packs = [set(strategies.read_step(root, step).manifest.packs) for step in range(3)]
    assert not packs[0] & packs[1]
    for step in range(3):
        assert_same_tree(restored(root, step), state(step))


def test_on_devices(root, tmp_path):
    """Another key is no failed save, though chunks were left on the devices."""
    weights = np.random.default_rng(0).standard_normal((8, 4096)).astype(np.float32)
    options = {"compare_on": "device", "chunk_bytes": 4096}
    for number in range(2):
        key = keys.new_key_file(tmp_path / f"key{number}")
        with open_run(root, **options, encryption=key) as run:
            if number:
                run.restore(9)
            for step in range(10 * number, 10 * number + 10):
                weights[0, step] += 1
                run.save(step, {"w": jnp.asarray(weights)})
                assert_same_tree(run.restore(step), {"w": jnp.asarray(weights)})
            report = run.handler.last_save_report
            assert report.copied_bytes < weights.nbytes / 4


def test_runs_share_what_the_same_key_has_sealed(tmp_path):
    """Of one store; under another key nothing is shared, and nothing said."""
    frozen = {"frozen": np.random.default_rng(1).standard_normal(20_000)}
    written = {}
    for name, key_id in (("a", "one"), ("b", "one"), ("c", "two"), ("d", None)):
        encryption = key_id and Encryption(key=secret_of, key_id=key_id)
        options = {"store": str(tmp_path / "store"), "encryption": encryption}
        with open_run(tmp_path / name, **SMALL, **options) as run:
            run.save(0, frozen)
            written[name] = run.handler.last_save_report.written_bytes
    assert written["b"] < written["a"] / 10
    assert min(written["c"], written["d"]) > written["a"] * 0.9
    keys.use_key(secret_of)
    for name in "abcd":
        assert_same_tree(restored(tmp_path / name, 0), frozen)


def test_functions_are_asked_once_for_each_key(root):
    """Not for each step, each chunk or each save."""
    asked = []

    def function(name):
        asked.append(name)
        return secret_of(name)

    save_steps(root, range(4), encryption=Encryption(key=function, key_id="a"))
    save_steps(root, range(4, 6), encryption=Encryption(key=function, key_id="b"))
    for step in range(6):
        assert_same_tree(restored(root, step), state(step))
    assert sorted(asked) == ["a", "b"]


def _refuses(name):
    raise OSError("the service is down")


@pytest.mark.parametrize(
    ("encryption", "error", "message"),
    [
        (
            Encryption(key=secret_of, key_id="lost"),
            WrongKeyError,
            "knows no key 'lost'",
        ),
        (Encryption(key=lambda name: b"x", key_id="a"), WrongKeyError, "gave 1 bytes"),
        (
            Encryption(key=lambda name: bytearray(31), key_id="a"),
            WrongKeyError,
            "gave 31 bytes",
        ),
        (Encryption(key=lambda name: "x" * 32, key_id="a"), WrongKeyError, r"\(str\)"),
        (Encryption(key=_refuses, key_id="a"), WrongKeyError, "the service is down"),
        ("nowhere", WrongKeyError, "could not read the key file .*nowhere"),
        ("empty", WrongKeyError, "is no key file"),
        ("short", WrongKeyError, "is no key file"),
        ("binary", WrongKeyError, "is no key file"),
    ],
)
def test_a_key_that_is_none(root, tmp_path, monkeypatch, encryption, error, message):
    """The save fails, with the reason; nothing of it is there, the next one works."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("# nothing\n\n")
    (tmp_path / "short").write_text("ab" * 31)
    (tmp_path / "binary").write_bytes(bytes(range(128, 160)))
    with (
        open_run(
            root,
            manager_options=strategies.refusing_options(),
            encryption=encryption,
        ) as run,
        pytest.raises(error, match=message),
    ):
        run.save(0, state(0))
    assert not list(root.rglob("part-*")) + list(root.rglob("*-p0-*"))
    save_steps(root, [1], encryption=keys.new_key_file(tmp_path / "good"))
    assert_same_tree(restored(root, 1), state(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Encryption(key=5), "Encryption.key is a int"),
        (lambda: Encryption(key="file", key_id="x"), "none beside a file"),
        (lambda: Encryption(key=secret_of), "the name of the key that the function"),
        (lambda: Encryption(key=secret_of, key_id=5), "Encryption.key_id is 5"),
        (lambda: Encryption(key=secret_of, key_id="x" * 201), "at most 200"),
        (
            lambda: orbax_delta.DeltaOptions(encryption=b"x" * 32),
            "is a bytes; expected",
        ),
        (lambda: orbax_delta.DeltaOptions(encryption=True), "is a bool; expected"),
        (lambda: keys.use_key(None), "use_key was given None"),
        (lambda: keys.new_key_file("/nowhere/at/all"), "could not make a key file"),
    ],
)
def test_what_is_no_key_at_all(make, message):
    """Said where it is given."""
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_a_new_key_file(tmp_path):
    """Random, for its owner alone, and never in the place of another."""
    first, second = (keys.new_key_file(tmp_path / name) for name in "ab")
    assert first.read_text() != second.read_text()
    assert os.stat(first).st_mode & 0o777 == 0o600
    kept = first.read_text()
    with pytest.raises(InvalidInputError, match="could not make a key file"):
        keys.new_key_file(first)
    assert first.read_text() == kept


def test_no_secret_is_shown(key_file):
    """Options are logged and kept in MANIFESTs."""
    options = orbax_delta.DeltaOptions(encryption=key_file)
    secret = key_file.read_text().strip()
    for shown in (repr(options), options.recorded(), options.shared()):
        assert secret not in str(shown)
    assert "encryption" not in options.recorded()
    assert secret not in repr(options.writing_key())


# --- tools ----------------------------------------------------------------------------


def test_exports_are_in_the_clear(root, key_file, tmp_path):
    """A delivery is read by somebody else; a delta export is no encrypted one."""
    save_steps(root, range(3), encryption=key_file)
    exports.export_delta(root, 2, tmp_path / "delta")
    exports.export_orbax(root, 2, tmp_path / "plain")
    keys._known = keys._Known()
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        assert_same_tree(checkpointer.restore(tmp_path / "delta"), state(2))
    assert ocp.StandardCheckpointer().restore(tmp_path / "plain")["text"] == TEXT


def test_an_archive_holds_it_as_it_is(root, key_file, tmp_path, forget):
    """Packs byte for byte; checked on the way, and read with the same key."""
    save_steps(root, range(4), encryption=key_file)
    before = files_of(root, "*-p0-*")
    report = orbax_delta.archive(root, tmp_path / "cold", steps=[1, 2], move=True)
    assert report.ok
    archived = files_of(tmp_path / "cold", "*-p0-*")
    assert archived
    assert archived.items() <= before.items()
    for step in range(4):
        assert_same_tree(restored(root, step), state(step))
    assert check.verify(str(tmp_path / "cold")).ok
    forget()
    with pytest.raises(WrongKeyError, match=MISSING):
        restored(root, 1)
    failed = orbax_delta.archive(root, tmp_path / "cold", steps=[3])
    assert isinstance(failed.steps[0].error, WrongKeyError)
    keys.use_key(key_file)
    rows = strategies.read_step(root, 3).rows
    own = [ref for row in rows for ref in row.refs if ref.pack not in archived]
    ref = next(ref for ref in own if ref.pack)
    path = root / STORE / "packs" / ref.pack
    data = bytearray(path.read_bytes())
    data[ref.offset + 9] ^= 1
    path.write_bytes(data)
    (failed,) = orbax_delta.archive(root, tmp_path / "cold", steps=[3]).steps
    assert "checksum of a sealed record" in str(failed.error)


def test_commands(root, key_file, command, document, monkeypatch, tmp_path):
    """With `--key-file`, or the variable; without, exit code 13 and what is missing."""
    save_steps(root, range(3), encryption=key_file)
    shown = Encryption(key=key_file).writing_key().id
    for arguments in (("verify", root), ("show", root, 2), ("diff", root, 1, 2)):
        keys._known = keys._Known()
        code, _, err = command(*arguments)
        assert code == 13
        assert f"is encrypted with key '{shown}'" in err
        code, _, err = command("--key-file", key_file, *arguments)
        assert (code, err) == (0, "")
    keys._known = keys._Known()
    code, found = document("du", root)
    assert code == 13
    assert command("ls", root)[0] == 0
    assert command("prune", root)[0] == 0
    monkeypatch.setenv("ORBAX_DELTA_KEY_FILE", str(key_file))
    assert command("du", root)[0] == 0
    code, found = document("show", root, 2)
    assert found["items"][0]["key_id"] == shown
    assert f"with key {shown}" in command("show", root, 2)[1]
    monkeypatch.delenv("ORBAX_DELTA_KEY_FILE")
    keys._known = keys._Known()
    code, _, err = command("--key-file", tmp_path / "nowhere", "verify", root)
    assert code == 13
    assert "could not read the key file" in err


def test_the_command_that_makes_keys(command, document, tmp_path, root):
    """Its file is one to save with, and is not replaced."""
    file = tmp_path / "new"
    code, made = document("new-key", file)
    assert (code, made["file"]) == (0, str(file))
    assert file.read_text().strip() not in json.dumps(made)
    save_steps(root, [0], encryption=str(file))
    manifest = strategies.read_manifest(root / "0/default/MANIFEST")
    assert manifest.encryption["key_id"] == made["key_id"]
    code, out, err = command("new-key", file)
    assert (code, out) == (2, "")
    assert "could not make a key file" in err
    code, out, _ = command("new-key", tmp_path / "other")
    assert "Keep a copy" in out


def test_plain_runs_need_no_library(root):
    """`cryptography` is not imported unless something is encrypted."""
    program = (
        "import sys\n"
        "sys.modules['cryptography'] = None\n"
        "import numpy as np, orbax.checkpoint as ocp, orbax_delta\n"
        "registry = orbax_delta.handler_registry()\n"
        "with ocp.CheckpointManager(sys.argv[1], handler_registry=registry) as run:\n"
        "    run.save(0, args=ocp.args.StandardSave({'a': np.arange(9)}))\n"
        "    run.wait_until_finished()\n"
        "    assert (run.restore(0)['a'] == np.arange(9)).all()\n"
        "try:\n"
        "    orbax_delta.DeltaOptions(encryption='keys')\n"
        "except orbax_delta.InvalidInputError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert "pip install 'orbax-delta[crypt]'" in done.stdout


# --- other ways to save ---------------------------------------------------------------


def test_v1(root, key_file, forget):
    """Orbax v1: the same option, also for a restore in a new process."""
    from orbax.checkpoint import v1

    context = orbax_delta.v1_context(encryption=key_file)
    with v1.training.Checkpointer(root, context=context) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state(step))
    forget()
    with v1.training.Checkpointer(root, context=context) as checkpointer:
        assert_same_tree(checkpointer.load(2), state(2))
    forget()
    with (
        v1.training.Checkpointer(
            root, context=orbax_delta.v1_context()
        ) as checkpointer,
        pytest.raises(WrongKeyError, match=MISSING),
    ):
        checkpointer.load(2)
    orbax_delta.v1_release()


def test_processes_with_different_keys(tmp_path):
    """All of them are told, and nothing is committed."""
    good, other = (str(keys.new_key_file(tmp_path / name)) for name in "ab")
    root = tmp_path / "run"
    with Job(2, tmp_path / "job") as job:
        job.do("open", {1: {"encryption": other}}, root=str(root), encryption=good)
        answers = job.do("save", step=0, version=0, mesh="fully sharded")
        for answer in answers:
            assert answer["error"]["kind"] == "DisagreementError"
            assert "Give all processes the same key" in answer["error"]["message"]
        job.do("close")
        job.do("open", {1: {"encryption": "nowhere"}}, root=str(root), encryption=good)
        answers = job.do("save", step=0, version=0, mesh="fully sharded")
        for answer in answers:
            assert "could not read the key file" in answer["error"]["message"]
        job.do("close")
        job.do("open", root=str(root), encryption=good)
        for step in range(2):
            answers = job.do("save", step=step, version=step, mesh="fully sharded")
            assert [answer["error"] for answer in answers] == [None, None]
        job.do("close")
    secret = bytes.fromhex((tmp_path / "a").read_text())
    assert second_reader.read_step(root / "1/default", secret)
    keys.use_key(good)
    assert check.verify(str(root)).ok


def test_within_a_bound(root, key_file):
    """Rounded leaves are sealed like others."""
    policy = {"w": orbax_delta.policies.Grid(bound=0.01)}
    save_steps(root, range(3), encryption=key_file, lossy=policy)
    manifest = strategies.read_manifest(root / "2/default/MANIFEST")
    assert manifest.required_features == ["encrypted", "lossy"]
    found = restored(root, 2)
    assert np.abs(found["w"] - state(2)["w"]).max() <= 0.01
    secret = bytes.fromhex(key_file.read_text())
    (second,) = (
        array.data
        for path, array in second_reader.read_step(root / "2/default", secret).items()
        if path == ("w",)
    )
    assert second == found["w"].tobytes()
