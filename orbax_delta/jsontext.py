"""The JSON of small files: one strict reader, and the digest that such a file carries.

Pins, condemned marks and STORE.json hold the digest of everything else in them, so that
a flipped bit is not taken for another name. Does not belong here: which fields a file
has, what a caller should do about it.
"""

import collections
import json
import math
from collections.abc import Mapping
from typing import Any

from orbax_delta.records import digest

DIGEST_FIELD = "digest"


def parse(data: bytes | bytearray | memoryview) -> Any:
    """The value of a JSON text, read as FORMAT.md section 1.4 says.

    Raises:
        ValueError: It is no UTF-8, no JSON, nested too deeply, names something twice in
            one object, or holds a NaN or an infinity.
    """
    try:
        return json.loads(
            bytes(data).decode(),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it names {twice!r:.80} twice in one object")
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it holds {text}, which is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text:.80}, which no double can hold")
    return value


def document_digest(document: Mapping[str, Any]) -> str:
    """Digest of the canonical text of a document without its own digest.

    >>> document_digest({"b": [1, "ü"], "a": None, "digest": "whatever"})
    'cae6683dec3216dc3244b908bb4e4435'

    Raises:
        ValueError: It is nested too deeply, or holds a NaN or an infinity.
    """
    rest = {name: value for name, value in document.items() if name != DIGEST_FIELD}
    try:
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return digest(text.encode()).hex()


def sealed(document: Mapping[str, Any]) -> bytes:
    """The text of a document with its digest, names sorted."""
    whole = {**document, DIGEST_FIELD: document_digest(document)}
    return json.dumps(whole, sort_keys=True, allow_nan=False).encode()


def check_seal(document: Mapping[str, Any]) -> None:
    """Compare a document with the digest that stands in it.

    Raises:
        ValueError: They differ, or there is no digest.
    """
    stored, computed = document.get(DIGEST_FIELD), document_digest(document)
    if stored != computed:
        raise ValueError(f"its digest is {computed}, but it says {stored!r:.80}")
