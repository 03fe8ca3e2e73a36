"""Keys of encrypted steps: where they come from, and which one a step needs.

A file holds keys, or a function fetches them from where they are kept. Those that a
handler or `use_key` has named are known to this process, so that everything that reads
a step finds its key by the name that the MANIFEST gives. Does not belong here: what is
in a file (`keyfiles`), what is done with a key (`sealing`).
"""

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orbax_delta import keyfiles, sealing
from orbax_delta.errors import InvalidInputError, WrongKeyError
from orbax_delta.keyfiles import new_key_file as new_key_file
from orbax_delta.sealing import KEY_BYTES, Key

KeyFunction = Callable[[str], bytes | None]
"""Gives the 32 bytes of the key of a name; None or `KeyError` where it knows none."""

MAX_KEY_ID = 200
"""Characters of the name of a key."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encryption:
    """How what is saved is encrypted at rest.

    >>> Encryption(key="/run/secrets/checkpoints").key_id
    ''

    Attributes:
        key: A file of this machine with one key a line, as 64 hexadecimal digits: the
            first one is written with, all of them are read with. It is read when a key
            is needed. Or a function that is given the name of a key and returns its 32
            bytes, or None.
        key_id: Name of the key to write with, for a function; MANIFESTs show it. Keys
            of files are known by their fingerprints.

    Raises:
        InvalidInputError: They do not fit each other, or the extra is not installed.
    """

    key: str | os.PathLike[str] | KeyFunction
    key_id: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.key, str | os.PathLike):
            object.__setattr__(self, "key", _absolute(os.fspath(self.key)))
        elif not callable(self.key):
            raise InvalidInputError(
                f"Encryption.key is a {type(self.key).__name__}; expected the path of "
                "a file with keys, or a function from a key's name to its 32 bytes"
            )
        else:
            object.__setattr__(self, "key", _hashable(self.key))
        if isinstance(self.key, str) and self.key_id != "":
            raise InvalidInputError(
                f"Encryption.key_id is {self.key_id!r:.80}; expected none beside a "
                "file, whose keys have fingerprints"
            )
        if not isinstance(self.key, str) and not _is_key_id(self.key_id):
            raise InvalidInputError(
                f"Encryption.key_id is {self.key_id!r:.80}; expected the name of the "
                f"key that the function gives, at most {MAX_KEY_ID} characters that "
                "can be printed"
            )
        sealing.require()

    def writing_key(self) -> Key:
        """The key to write with.

        Raises:
            WrongKeyError: There is none, or it is no key.
        """
        if isinstance(self.key, str | os.PathLike):
            return next(keyfiles.keys_of(Path(self.key)))
        found = _fetched(self.key, self.key_id)
        if found is None:
            raise WrongKeyError(
                f"the key function knows no key {self.key_id!r}, which "
                "Encryption.key_id says to write with"
            )
        return found

    def find(self, key_id: str) -> Key | None:
        """The key of a name; None where there is none of this name here.

        Raises:
            WrongKeyError: The file cannot be read, the function fails, or what is there
                is no key.
        """
        if isinstance(self.key, str | os.PathLike):
            found = keyfiles.keys_of(Path(self.key))
            return next((key for key in found if key.id == key_id), None)
        return _fetched(self.key, key_id)


def encryption_of(value: Any) -> Encryption | None:
    """What an option says; a path alone is the file of the keys.

    Raises:
        InvalidInputError: It says nothing of the kind.
    """
    if value is None or isinstance(value, Encryption):
        return value
    if isinstance(value, str | os.PathLike):
        return Encryption(key=value)
    raise InvalidInputError(
        f"DeltaOptions.encryption is a {type(value).__name__}; expected the path of a "
        "file with keys, Encryption(key=function, key_id=name), or None"
    )


class _Known:
    """What this process has been told of, the last one first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: tuple[Encryption, ...] = ()

    def add(self, source: Encryption) -> None:
        with self._lock:
            others = [known for known in self._sources if known != source]
            self._sources = (source, *others)

    def __iter__(self) -> Iterator[Encryption]:
        return iter(self._sources)


_known = _Known()


def use_key(key: str | os.PathLike[str] | KeyFunction | Encryption) -> None:
    """Let this process read what was encrypted with a key.

    For what is no handler: exports, `restore_base`, reports. Where there is a handler
    with the option `encryption`, this has been done.

    Args:
        key: The path of a file with keys, or a function as in `Encryption`.

    Raises:
        InvalidInputError: It is neither.
        WrongKeyError: The file cannot be read, or holds no key.

    Example:
        >>> use_key(new_key_file(folder / "keys"))
    """
    if callable(key):
        # Asked for whatever name a MANIFEST gives.
        _known.add(Encryption(key=key, key_id="(any)"))
        return
    source = encryption_of(key)
    if source is None:
        raise InvalidInputError("use_key was given None; expected a key")
    source.writing_key()
    _known.add(source)


def remember(option: Encryption | str | os.PathLike[str] | None) -> None:
    """Let this process read what is written with this option."""
    encryption = encryption_of(option)
    if encryption is not None:
        _known.add(encryption)


def key_of(encryption: Mapping[str, Any], attempt: str, where: str) -> Key | None:
    """The key that a step was written with; None if it is not encrypted.

    Args:
        encryption: What its MANIFEST says of that.
        attempt: Its attempt.
        where: It in words, for messages.

    Raises:
        WrongKeyError: This process does not know it, or knows another of its name.
    """
    if not encryption:
        return None
    name, check = encryption["key_id"], encryption["check"]
    sealing.require()
    others = 0
    problem: WrongKeyError | None = None
    for source in _known:
        try:
            key = source.find(name)
        except WrongKeyError as error:
            problem = problem or error  # the next one may know it
            continue
        if key is not None and is_of(key, encryption, attempt):
            return key
        others += key is not None
    if problem is not None:
        raise WrongKeyError(
            f"{where} is encrypted with key {name!r}, which may be where this process "
            f"could not look: {problem}"
        ) from problem
    if others:
        raise WrongKeyError(
            f"{where} was encrypted with another key than the one that is now called "
            f"{name!r}; its check is {check}. Give the key it was written with"
        )
    raise WrongKeyError(
        f"{where} is encrypted with key {name!r}, which this process does not know. "
        "Give it: DeltaOptions(encryption=...), orbax_delta.use_key(...), or "
        "`orbax-delta --key-file FILE ...`"
    )


def is_of(key: Key | None, encryption: Mapping[str, Any], attempt: str) -> bool:
    """Whether a step was written with this key; None: with none."""
    if key is None or not encryption:
        return key is None and not encryption
    return bool(encryption["check"] == key.check(bytes.fromhex(attempt)))


def _hashable(function: Any) -> KeyFunction:
    """The function; of an object that cannot be hashed its method, which can."""
    hashable: KeyFunction = (
        function.__call__ if type(function).__hash__ is None else function
    )
    return hashable


def _is_key_id(value: object) -> bool:
    # Messages and tables show it.
    return type(value) is str and 0 < len(value) <= MAX_KEY_ID and value.isprintable()


def _absolute(path: str) -> str:
    """The path of a file, whatever folder this process works in later.

    Raises:
        InvalidInputError: It is that of no file here.
    """
    if keyfiles.KEY_LINE.fullmatch(path):
        # Messages about a missing file would show it.
        raise InvalidInputError(
            "Encryption.key is a key itself; expected the path of a file that holds "
            "it, or a function"
        )
    if "://" in path or not path:
        raise InvalidInputError(
            f"Encryption.key is {path!r:.80}; expected a file of this machine. Keys "
            "that are kept elsewhere are fetched by a function"
        )
    return os.path.abspath(path)


def _fetched(function: KeyFunction, key_id: str) -> Key | None:
    try:
        return _asked(function, key_id)
    except KeyError:
        return None


@functools.lru_cache(maxsize=256)
def _asked(function: KeyFunction, key_id: str) -> Key:
    """The key that a function gives; where keys are kept is asked once for each.

    Raises:
        KeyError: It knows none of this name, which may be otherwise the next time.
        WrongKeyError: It fails, or gives no key.
    """
    try:
        secret = function(key_id)
    except KeyError:
        raise
    except Exception as error:
        # No error of the storage, which could count as damage of the step.
        raise WrongKeyError(
            f"the key function failed for key {key_id!r}: {error}"
        ) from error
    if secret is None:
        raise KeyError(key_id)
    if not isinstance(secret, bytes | bytearray) or len(secret) != KEY_BYTES:
        size = (
            f"{len(secret)} bytes"
            if isinstance(secret, bytes | bytearray)
            else "no bytes"
        )
        raise WrongKeyError(
            f"the key function gave {size} ({type(secret).__name__}) for key "
            f"{key_id!r}; expected {KEY_BYTES} bytes"
        )
    return Key(id=key_id, secret=bytes(secret))
