"""Where keys come from: files, functions, pipes; what is said if one cannot be had."""

import dataclasses
import functools
import os
import pickle
import shutil

import hostile
import numpy as np
import pytest
import strategies
from etils import epath
from strategies import assert_same_tree, open_run

import orbax_delta
from orbax_delta import imports, keyfiles, keys
from orbax_delta.errors import InvalidInputError, WrongKeyError
from orbax_delta.keys import Encryption

pytestmark = pytest.mark.usefixtures("forget")

SECRET = bytes(range(32))
TREE = {"a": np.arange(500)}


def save(root, encryption, step=0):
    """One step."""
    with open_run(root, encryption=encryption) as run:
        run.save(step, TREE)


def restored(root, step=0):
    """It, by what this process knows."""
    item = epath.Path(root / str(step) / "default")
    return orbax_delta.DeltaCheckpointHandler().restore(item)


@pytest.fixture
def key_file(tmp_path):
    """A file with `SECRET`."""
    path = tmp_path / "keys"
    path.write_text(SECRET.hex())
    return path


# --- functions ------------------------------------------------------------------------


@dataclasses.dataclass
class _Service:
    """What can be called and compared, but not hashed."""

    secret: bytes

    def __call__(self, name):
        return self.secret


@pytest.mark.parametrize(
    "function",
    [
        _Service(SECRET),
        _Service(SECRET).__call__,
        functools.partial(lambda secret, name: secret, SECRET),
        {"mine": SECRET}.get,
        {"mine": SECRET}.__getitem__,
        lambda name: bytearray(SECRET),
    ],
)
def test_whatever_can_be_called(root, forget, function):
    """Hashed as options are, asked for a key that it has, and for one it has not."""
    encryption = Encryption(key=function, key_id="mine")
    assert hash(orbax_delta.DeltaOptions(encryption=encryption))
    assert encryption == dataclasses.replace(encryption)
    save(root, encryption)
    forget()
    keys.use_key({"another": bytes(32)}.get)
    with pytest.raises(WrongKeyError, match="'mine', which this process does not know"):
        restored(root)
    keys.use_key(function)
    assert_same_tree(restored(root), TREE)


def _fails(name):
    raise OSError("the service is down")


@pytest.mark.parametrize("kind", ["a lost file", "a spoilt file", "a function"])
def test_a_source_that_fails_hides_no_other(root, tmp_path, forget, key_file, kind):
    """Two handlers of one process, and the key of one of them has gone."""
    save(root, key_file)
    forget()
    other = tmp_path / "other"
    other.write_text("ab" * 32)
    keys.use_key(other if "file" in kind else _fails)
    if kind == "a lost file":
        other.unlink()
    elif kind == "a spoilt file":
        other.write_text("nothing")
    message = {
        "a lost file": "could not look: could not read the key file .*other",
        "a spoilt file": "could not look: .*other is no key file",
        "a function": "could not look: the key function failed .* service is down",
    }[kind]
    with pytest.raises(WrongKeyError, match=message):
        restored(root)
    for order in ((key_file, None), (None, key_file)):
        for key in filter(None, order):
            keys.use_key(key)
        assert_same_tree(restored(root), TREE)


def test_a_service_that_is_down_is_no_damage(root, forget):
    """No older step is restored because the newest one's key did not come at once."""
    for step, name in enumerate(["old", "new"]):
        save(root, Encryption(key=lambda name: SECRET, key_id=name), step)
    forget()
    asked = []

    def function(name):
        asked.append(name)
        if name == "new" and asked.count(name) < 4:
            raise OSError("the service is down")
        return SECRET

    with open_run(root, encryption=Encryption(key=function, key_id="old")) as run:
        with pytest.raises(WrongKeyError, match="the service is down"):
            orbax_delta.restore_latest_good(run.manager)
        for on_corruption in ("raise", "fallback"):
            with pytest.raises(WrongKeyError, match="the service is down"):
                run.manager.restore(
                    1, args=orbax_delta.DeltaRestore(on_corruption=on_corruption)
                )
        assert orbax_delta.restore_latest_good(run.manager)[0] == 1


# --- files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        SECRET.hex().upper().encode(),
        b"\xef\xbb\xbf# by an editor\r\n\r\n" + SECRET.hex().encode() + b"\r\n",
        SECRET.hex().encode() + b"\n" + b"00" * 32,
        f"# von Jörg\n  {SECRET.hex()}  \n".encode("latin-1"),
    ],
)
def test_as_editors_write_files(tmp_path, data):
    """Line ends, marks of encodings, comments."""
    (tmp_path / "keys").write_bytes(data)
    assert Encryption(key=tmp_path / "keys").writing_key().secret == SECRET


def test_a_path_is_of_the_folder_in_which_it_was_given(
    root, tmp_path, monkeypatch, key_file
):
    """And names one source, whatever its type."""
    monkeypatch.chdir(tmp_path)
    with open_run(root, encryption="keys") as run:
        run.save(0, TREE)
        monkeypatch.chdir("/")
        run.save(1, TREE)
        assert_same_tree(run.restore(1), TREE)
    keys.use_key(key_file)
    keys.use_key(str(key_file))
    assert list(keys._known) == [Encryption(key=key_file)]
    options = orbax_delta.DeltaOptions(encryption=key_file)
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_pipe_is_read_once(root, key_file, forget):
    """As a shell's `--key-file <(command)` makes one."""
    save(root, key_file)
    forget()
    out, into = os.pipe()
    with open(into, "w") as file:
        file.write(SECRET.hex())
    keys.use_key(f"/dev/fd/{out}")
    for _ in range(2):
        assert_same_tree(restored(root), TREE)
    os.close(out)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("a\0b", WrongKeyError, "could not read the key file .*null"),
        ("/dev/zero", WrongKeyError, "/dev/zero is no key file"),
        ("/", WrongKeyError, "could not read the key file /: .*directory"),
        ("gs://bucket/key", InvalidInputError, "expected a file of this machine"),
        ("", InvalidInputError, "expected a file of this machine"),
    ],
)
def test_what_is_no_file(path, error, message):
    """Said at once, and without reading on for ever."""
    with pytest.raises(error, match=message):
        keys.use_key(path)


def test_a_key_in_place_of_its_file_is_not_shown(command):
    """Somebody will try; a message about a missing file would be in every log."""
    for text in (SECRET.hex(), SECRET.hex().upper()):
        with pytest.raises(InvalidInputError, match="is a key itself") as raised:
            orbax_delta.DeltaOptions(encryption=text)
        assert text not in str(raised.value)
        code, out, err = command("ls", "--key-file", text, "/nowhere")
        assert code == 2
        assert "is a key itself" in err
        assert text not in out + err


def test_a_new_file_is_whole_or_not_there(tmp_path, monkeypatch):
    """A full disk leaves nothing that would have to be deleted first."""

    def full(handle):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(keyfiles.os, "fsync", full)
        with pytest.raises(InvalidInputError, match="no space left"):
            keys.new_key_file(tmp_path / "keys")
    assert list(tmp_path.iterdir()) == []
    assert keys.new_key_file(tmp_path / "keys").exists()


@pytest.mark.parametrize("key_id", ["", "a\nb", "\x1b[31m", "\ud800", "\0", "x" * 201])
def test_names_that_cannot_be_shown(key_id):
    """MANIFESTs hold them, and tables show them."""
    with pytest.raises(InvalidInputError, match="characters that can be printed"):
        Encryption(key=_fails, key_id=key_id)


# --- commands -------------------------------------------------------------------------


def test_the_option_stands_before_or_after_the_command(root, key_file, command, forget):
    """As people type it."""
    save(root, key_file)
    for words in (
        ["--key-file", key_file, "verify", root],
        ["verify", "--key-file", key_file, root],
        ["du", root, "--json", "--key-file", key_file],
        ["show", root, 0, "--key-file", key_file],
    ):
        forget()
        assert command(*words)[0] == 0
        forget()
        assert (
            command(*(w for w in words if w not in ("--key-file", key_file)))[0] == 13
        )


def test_a_variable_that_names_no_file_yet(root, key_file, command, monkeypatch):
    """It hinders no command that needs no key: not the one that makes the file."""
    save(root, key_file)
    keys._known = keys._Known()
    named = key_file.with_name("named")
    monkeypatch.setenv("ORBAX_DELTA_KEY_FILE", str(named))
    assert command("ls", root)[0] == 0
    assert command("verify", "--help")[0] == 0
    code, _, err = command("verify", root)
    assert code == 13
    assert f"could not read the key file {named}" in err
    assert command("new-key", named)[0] == 0
    assert "does not know" in command("verify", root)[2]


def test_an_import_is_encrypted_if_it_is_told(root, tmp_path, key_file, command):
    """Otherwise the first step of an encrypted run would lie in the clear."""
    save(root, None)
    source, other = root / "0" / "default", tmp_path / "other"
    assert command("import", source, other, 0, "--encrypt", key_file)[0] == 0
    imports.import_checkpoint(source, other, 1, encryption=key_file)
    imports.import_checkpoint(source, other, 2)
    for step, features in enumerate([["encrypted"], ["encrypted"], []]):
        manifest = strategies.read_manifest(other / f"{step}/default/MANIFEST")
        assert manifest.required_features == features
        assert_same_tree(restored(other, step), TREE)
    code, _, err = command("import", source, other, 3, "--encrypt", tmp_path / "none")
    assert code == 13
    assert "could not read the key file" in err
    assert not (other / "3").exists()


def test_ls_tells_which_keys_are_needed(root, command, document, forget):
    """After a rotation; what is shown of a name is text."""
    for step, name in enumerate(["old"] * 4 + ["new", None, "new"]):
        encryption = name and Encryption(key=lambda name: SECRET, key_id=name)
        save(root, encryption, step)
    forget()
    (root / "7.orbax-checkpoint-tmp" / "default").mkdir(parents=True)
    lines = command("ls", root)[1].splitlines()
    assert "Encrypted with key old: steps 0, 1, 2, 3, kept states 0." in lines
    assert "Encrypted with key new: steps 4, 6." in lines
    assert "Not encrypted: steps 5." in lines
    found = document("ls", root)[1]["steps"]
    assert [entry.get("key_id") for entry in found[:7]] == [
        *["old"] * 4,
        *["new", None, "new"],
    ]

    def renamed(manifest):
        manifest["encryption"]["key_id"] = "\x1b[31mold"

    hostile.rewritten(root, 6, renamed)
    assert "\x1b" not in command("ls", root)[1]
    assert "\x1b" not in command("verify", root, 6)[2]


def test_ls_says_nothing_where_nothing_is_encrypted(root, command):
    """Most users need not know."""
    save(root, None)
    assert "ncrypted" not in command("ls", root)[1]


# --- processes that begin -------------------------------------------------------------


@pytest.mark.parametrize("v1", [False, True])
def test_a_base_alone_is_restored_by_the_key_of_the_handler(root, key_file, forget, v1):
    """It has restored nothing yet, and there is no step left that it could restore."""
    from orbax.checkpoint import v1 as ocp1

    if v1:
        context = orbax_delta.v1_context(encryption=key_file)
        with ocp1.training.Checkpointer(root, context=context) as checkpointer:
            checkpointer.save(0, TREE)
        orbax_delta.v1_release()
    else:
        save(root, key_file)
    shutil.rmtree(root / "0")
    forget()
    if v1:
        context = orbax_delta.v1_context(encryption=key_file)
        with ocp1.training.Checkpointer(root, context=context) as checkpointer:
            step, tree = orbax_delta.restore_latest_good(checkpointer)
    else:
        with open_run(root, encryption=key_file) as run:
            step, tree = orbax_delta.restore_latest_good(run.manager)
    assert step == 0
    assert_same_tree(tree, TREE)
