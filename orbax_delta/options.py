"""Frozen option values. Each has one owner in the flows and a test that sets it."""

import contextlib
import dataclasses
import json
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from orbax_delta import errors, keys, policies
from orbax_delta.keys import Encryption
from orbax_delta.policies import Lossy
from orbax_delta.sealing import Key

StoreLocation = str | Mapping[str, Any]
"""Where a folder lies: a path, a URL, or TensorStore's JSON of a key-value store."""

BaseMode = Literal["auto", "keep", "store"]
"""Where the contents that deltas build on are between saves."""

Where = Literal["auto", "host", "device"]
"""Where what changed is found out."""

MAX_CHAIN_LIMIT = 200
MAX_CHUNK_BYTES = 1 << 30
MAX_PACK_BYTES = 1 << 31
LOCAL_PACK_BYTES = (1 << 20, 16 << 20)
_LOCAL_PACKS = 32
BUCKET_PACK_BYTES = 64 << 20

_FILE_URL = "file:///"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaOptions:
    """How a save is cut, coded and renewed.

    >>> DeltaOptions(full_every=5).full_every
    5

    Attributes:
        chunk_bytes: Upper bound on a chunk of 4-byte elements, in bytes; the unit of
            comparison, reuse and partial reading. A leaf of narrower elements has
            chunks of as many elements, so that a bf16 copy lines up with its master.
        pack_bytes: A pack file is written once it holds this many bytes; None: on disks
            a thirty-second of the state, from 1 to 16 MiB, and 64 MiB in buckets, where
            each costs a request.
        full_every: After this many deltas a chunk's next record stands for all of them
            at once where they are small, and is full where they are not.
        max_chain: No chunk that is written is made of more records than this (with 1,
            of 2 where its policy refers to another leaf).
        read_budget: Reading a chunk that is written never costs more than this many
            times the bytes of its full record.
        refresh_every: A chunk is written in full after this many saves at the latest,
            also one that has not changed (the first time after up to twice as many, in
            the order of the state).
        keep_bases: States that the store keeps restorable whatever steps are deleted:
            the newest of those taken every `full_every` saves, and older ones that
            share no file with it and each other; 0 keeps none.
        threads: Worker threads for coding; None takes one per core, at most 16.
        base: Where the contents are that deltas build on. "keep": copies in memory of
            everything that is neither constant nor derived. "store": read back from the
            store by each save. "auto": a copy of what changes from save to save in
            small deltas; the rest is read back if it is needed.
        compare_on: Where what changed is found out. "host": everything is copied to
            the host and compared there. "device": where the arrays lie, by digests that
            miss a change with a chance of at most 2^-84; only chunks that changed are
            copied. "auto": "device" on GPUs and TPUs, "host" on CPUs.
        auto_prune: Remove dead packs after a save when the set of steps has changed.
        vote_timeout: Where several processes save together, seconds that one waits for
            the others when it is done itself; then the save fails on all of them.
        processes: Indices of the processes that save together, the first of which
            publishes; None: all, with process 0 first. As `active_processes` and
            `primary_host` of Orbax's `MultiprocessingOptions`.
        store: A store that many roots share: a path, a URL (s3://, gs://), or a
            TensorStore kvstore spec. A relative path is taken from the working
            directory. None: `_delta_store` in the root, or the store that a root
            already uses.
        lossy: Leaves that need not be stored bit for bit, and within which bound:
            policies by pattern of their paths (as in `fnmatch`; the first one that fits
            counts), or `policies.adamw(...)`. What changed is then found out on the
            host.
        encryption: Encrypt what is saved: the path of a file with keys, or
            `Encryption`. The first save with another key writes everything anew.

    Raises:
        InvalidInputError: A value is out of its range; nothing is touched.
    """

    chunk_bytes: int = 1 << 20
    pack_bytes: int | None = None
    full_every: int = 10
    max_chain: int = 20
    read_budget: float = 2.0
    refresh_every: int = 100
    keep_bases: int = 2
    threads: int | None = None
    base: BaseMode = "auto"
    compare_on: Where = "auto"
    auto_prune: bool = True
    vote_timeout: float = 900.0
    processes: Sequence[int] | None = None
    store: StoreLocation | None = dataclasses.field(default=None, hash=False)
    lossy: Lossy | None = dataclasses.field(default=None, hash=False)
    encryption: Encryption | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        _check_int("chunk_bytes", self.chunk_bytes, 64, MAX_CHUNK_BYTES)
        if self.pack_bytes is not None:
            _check_int("pack_bytes", self.pack_bytes, 1024, MAX_PACK_BYTES)
        _check_int("full_every", self.full_every, 0, MAX_CHAIN_LIMIT - 1)
        _check_int("max_chain", self.max_chain, 1, MAX_CHAIN_LIMIT)
        _check_int("refresh_every", self.refresh_every, 1, 30_000)
        _check_int("keep_bases", self.keep_bases, 0, 100)
        if self.threads is not None:
            _check_int("threads", self.threads, 1, 256)
        if type(self.read_budget) not in (int, float) or not (
            1.0 <= self.read_budget <= 100.0
        ):
            raise errors.InvalidInputError(
                f"DeltaOptions.read_budget is {self.read_budget!r}; expected a number "
                "from 1.0 (every record full) to 100.0"
            )
        _check_choice("base", self.base, get_args(BaseMode))
        _check_choice("compare_on", self.compare_on, get_args(Where))
        if type(self.auto_prune) is not bool:
            raise errors.InvalidInputError(
                f"DeltaOptions.auto_prune is {self.auto_prune!r}; expected True or "
                "False"
            )
        if self.store is not None:
            object.__setattr__(self, "store", _location(self.store))

        if type(self.vote_timeout) not in (int, float) or not (
            0.1 <= self.vote_timeout <= 86_400
        ):
            raise errors.InvalidInputError(
                f"DeltaOptions.vote_timeout is {self.vote_timeout!r}; expected seconds "
                "from 0.1 to 86400"
            )
        policies.check(self.lossy)
        object.__setattr__(self, "encryption", keys.encryption_of(self.encryption))
        if self.processes is not None:
            self._check_processes(self.processes)

    def _check_processes(self, processes: object) -> None:
        listed = processes if isinstance(processes, list | tuple) else ()
        good = all(type(p) is int and 0 <= p < 1_000_000_000 for p in listed)
        if not listed or not good or len(set(listed)) < len(listed):
            raise errors.InvalidInputError(
                f"DeltaOptions.processes is {processes!r}; expected a tuple of "
                "different process indices, the primary first, or None"
            )

    def shared(self) -> dict[str, object]:
        """Options that all processes of a job must have alike, as JSON gives them."""
        values = self._values()
        # Matters of each host: its cores, its memory, its devices.
        del values["threads"], values["base"], values["compare_on"]
        alike: dict[str, object] = json.loads(json.dumps(values))
        return alike

    def writing_key(self) -> Key | None:
        """The key that a save seals with; None: it does not.

        Raises:
            WrongKeyError: There is none, or it is no key.
        """
        encryption = keys.encryption_of(self.encryption)
        return None if encryption is None else encryption.writing_key()

    def _values(self) -> dict[str, object]:
        """By name, policies as JSON; without the key, which is nobody else's matter."""
        plain = dataclasses.asdict(
            dataclasses.replace(self, lossy=None, encryption=None)
        )
        del plain["encryption"]
        return plain | {"lossy": policies.documents(self.lossy)}

    def recorded(self) -> dict[str, object]:
        """Options as a MANIFEST keeps them."""
        values = self._values()
        # Of one run of the job, and no part of how the step is stored.
        for name in ("processes", "vote_timeout", "base", "compare_on"):
            del values[name]
        if self.lossy is not None:
            values["lossy"] = json.dumps(values["lossy"], sort_keys=True)
        if isinstance(self.store, Mapping):
            values["store"] = json.dumps(self.store, sort_keys=True)
        return values

    def pack_size(self, *, local: bool, state_bytes: int | None) -> int:
        """`pack_bytes`, resolved.

        Args:
            local: Whether the packs are to lie on a disk.
            state_bytes: Raw size of what a process writes of the state, in bytes; None:
                not known.
        """
        if self.pack_bytes is not None:
            return self.pack_bytes
        if not local:
            return BUCKET_PACK_BYTES
        least, most = LOCAL_PACK_BYTES
        if state_bytes is None:
            return most
        return max(least, min(most, state_bytes // _LOCAL_PACKS))

    @property
    def worker_count(self) -> int:
        """Threads to use, resolved for this machine."""
        return self.threads or min(os.cpu_count() or 1, 16)


def options_of(values: Mapping[str, Any]) -> DeltaOptions:
    """Options from keyword arguments that users may have misspelt.

    Raises:
        InvalidInputError: An option is unknown or out of range.
    """
    known = [field.name for field in dataclasses.fields(DeltaOptions)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise errors.InvalidInputError(
            f"unknown options {unknown}; DeltaOptions has {', '.join(known)}"
        )
    return DeltaOptions(**values)


def _location(value: object) -> StoreLocation:
    """A location that means the same wherever this process goes."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    memory = isinstance(value, str) and value.startswith("memory:")
    if isinstance(value, str) and value and "\0" not in value and not memory:
        # One folder has one name, by which roots in it or around it are told.
        if value.startswith(_FILE_URL):
            value = urllib.parse.unquote(value.removeprefix(_FILE_URL[:-1]))
        return value if "://" in value else os.path.abspath(value)
    if isinstance(value, Mapping) and type(value.get("driver")) is str:
        with contextlib.suppress(TypeError, ValueError):
            found: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
            if found["driver"] not in ("file", "memory"):
                return found
            path = found.get("path")
            # What lies in memory ends with the process; steps do not.
            if found["driver"] == "file" and isinstance(path, str) and path:
                slash = "/" if path.endswith("/") else ""
                return found | {"path": os.path.abspath(path) + slash}
    raise errors.InvalidInputError(
        f"DeltaOptions.store is {value!r:.200}; expected a path, a URL such as "
        "s3://bucket/store, or TensorStore's JSON of a key-value store, as "
        '{"driver": "s3", "bucket": ..., "path": ...}'
    )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not low <= value <= high
    ):
        raise errors.InvalidInputError(
            f"DeltaOptions.{name} is {value!r}; expected a whole number from {low} "
            f"to {high}"
        )


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise errors.InvalidInputError(
            f"DeltaOptions.{name} is {value!r}; expected one of "
            f"{', '.join(map(repr, choices))}"
        )
