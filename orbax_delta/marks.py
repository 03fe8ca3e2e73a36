"""Pins and condemned marks: the two files by which savers and pruners see each other.

A saver writes its pin, then reads the marks; a pruner writes its mark, then reads the
pins. Whatever the order, one of them sees the other.
"""

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_delta import jsontext, records, storefiles
from orbax_delta.errors import CorruptionError, FormatError, UnsupportedVersionError
from orbax_delta.manifests import PACK_NAME
from orbax_delta.owners import NOBODY, Owner
from orbax_delta.records import FORMAT_VERSION
from orbax_delta.store import DeltaStore, Folder

_logger = logging.getLogger("orbax_delta")

PIN_NAME = re.compile(r"([0-9a-f]{32})-p\d{1,9}")
CONDEMNED_NAME = re.compile(r"[0-9a-f]{32}")

_REMEDY = "when no job is saving to this root, remove it"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Content of a pin or of a condemned mark.

    Attributes:
        owner: The process that wrote it.
        packs: Pack names that it is about.
    """

    owner: Owner
    packs: Sequence[str]

    def encode(self) -> bytes:
        """JSON bytes."""
        return jsontext.sealed(
            {
                "format_version": FORMAT_VERSION,
                "owner": dataclasses.asdict(self.owner),
                "packs": list(self.packs),
            }
        )


def parse_mark(data: bytes, *, where: str) -> Mark:
    """Read a pin or condemned mark.

    Raises:
        FormatError: It is no such file.
        CorruptionError: Its digest does not match.
        UnsupportedVersionError: A newer format wrote it.
    """
    try:
        document = jsontext.parse(data)
        version = document["format_version"]
        if type(version) is not int:
            raise ValueError(f"its format version is {version!r:.80}")
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{where} is damaged ({error}); {_REMEDY}") from error
    storefiles.check_sealed(document, version, where, _REMEDY)
    return _mark_of(document, where)


def _mark_of(document: Mapping[str, Any], where: str) -> Mark:
    try:
        owner = Owner(**document["owner"])
        packs = tuple(document["packs"])
        if not _is_process(owner) or not all(map(PACK_NAME.fullmatch, packs)):
            raise ValueError(f"it names {owner} and {packs}")
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{where} is damaged ({error}); {_REMEDY}") from error
    return Mark(owner=owner, packs=packs)


def _is_process(owner: Owner) -> bool:
    return (
        type(owner.host) is str
        and type(owner.start) is str
        and type(owner.pid) is int
        and 0 < owner.pid < 1 << 31
    )


def read_marks(folder: Folder) -> dict[str, Mark]:
    """All marks of a folder by name; one that vanishes meanwhile is not there."""
    found = ((name, folder.read(name)) for name in folder.names() if name[0] != ".")
    return {
        name: parse_mark(data, where=folder.url + name)
        for name, data in found
        if data is not None
    }


def copying_pin(attempt: str) -> str:
    """Name of the pin of whoever copies a step to a store; one at a time can have it.

    >>> copying_pin("00" * 16)
    '0c88cb36abdc64913cd7842e8c77b8d4-p0'
    """
    return f"{records.digest(f'archive {attempt}'.encode()).hex()}-p0"


def usable_packs(store: DeltaStore) -> set[str]:
    """Packs that are there and that nobody is about to delete."""
    try:
        condemned = read_marks(store.condemned).values()
    except UnsupportedVersionError:
        raise
    except (CorruptionError, FormatError) as error:
        # It may be about any pack. Writing all in full is dear, but never wrong.
        _logger.warning("%s; building on no pack meanwhile", error)
        return set()
    doomed = {pack for mark in condemned for pack in mark.packs}
    return set(store.packs.names()) - doomed


def warned_of(condemned: Folder) -> set[str]:
    """Packs that a repair has found damaged: no save builds on them any more."""
    try:
        marks = read_marks(condemned)
    except (CorruptionError, FormatError):
        return set()  # whoever goes on looks at these packs once more
    return {
        pack for mark in marks.values() if mark.owner == NOBODY for pack in mark.packs
    }
