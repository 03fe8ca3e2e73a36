"""Changes to the files of `hostile`, read off a string of bytes.

So Hypothesis, a fuzzer and a plain random generator can drive them, and shrink them.
"""

import copy
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hostile

from orbax_delta import jsontext

_NUMBERS = (
    *(0, 1, -1, 2, 3, 64, 65, 127, 128, 255, 256, 65535, 1 << 20),
    *(
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**32,
        2**45,
        2**62,
        2**63 - 1,
        2**63,
        2**64,
        10**40,
    ),
)
_TEXTS = (
    *(
        "",
        "a",
        "0x",
        "-0x1",
        "0x" + "f" * 9000,
        "../../etc/passwd",
        "/etc/passwd",
        "\0",
    ),
    *("\ud800", "x" * 3000, "named", "single", "jax", "numpy", "numpy_scalar", "key"),
    *("str", "bytes", "int", "float", "bool", "complex", "float32", "int4", "bfloat16"),
    *(">f4", "<M8[ns]", "complex128", "object", "f4,f4", "__doc__", "threefry2x32"),
    *(
        "rbg",
        "cpu",
        "gpu",
        "x",
        "Auto",
        "Explicit",
        "device",
        "pinned_host",
        "MANIFEST",
    ),
)


def deep(levels: int) -> Any:
    """Arrays in arrays, `levels` + 1 of them."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


_OTHERS = (
    *(None, True, False, 0.5, -0.5, 1e308, -1e308, float("inf"), float("nan")),
    *([], {}, [[]], [None], ["x"], ["x", "x"], {"leaf": 0}, {"none": True}, {"": {}}),
    *([0] * 70, ["x"] * 70, deep(90), deep(150)),
)
HOSTILE = (*_NUMBERS, *_TEXTS, *_OTHERS)
"""What a field is set to."""


class Choices:
    """Decisions read off a string of bytes; when that has ended, always the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def below(self, limit: int) -> int:
        """A number from 0 to `limit` - 1."""
        width = 1 if limit <= 256 else 2 if limit <= 65536 else 4
        raw = self.take(width)
        return int.from_bytes(raw, "little") % max(limit, 1)

    def of(self, options: Sequence[Any]) -> Any:
        """One of some options."""
        return options[self.below(len(options))]

    def take(self, count: int) -> bytes:
        """The next bytes, zeros where there are none."""
        found = self._data[self._position : self._position + count]
        self._position += count
        return found.ljust(count, b"\0")

    def rest(self) -> bytes:
        """All bytes that are left."""
        found = self._data[self._position :]
        self._position = len(self._data)
        return found


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document but the whole, by the keys that lead there."""
    children: Any = ()
    if isinstance(document, dict):
        children = document.items()
    elif isinstance(document, list):
        children = enumerate(document)
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def mutated(document: Any, choices: Choices) -> Any:
    """A copy of a JSON document with one to three changes."""
    document = copy.deepcopy(document)
    for _ in range(1 + choices.below(3)):
        found = list(places(document))
        if not found:
            return choices.of(HOSTILE)
        *above, key = choices.of(found)
        _CHANGES[choices.below(len(_CHANGES))](
            document, _at(document, above), key, found, choices
        )
    return document


def _at(document: Any, path: Sequence[Any]) -> Any:
    for key in path:
        document = document[key]
    return document


def _set(document: Any, inside: Any, key: Any, found: Any, choices: Choices) -> None:
    inside[key] = copy.deepcopy(choices.of(HOSTILE))


def _nudge(document: Any, inside: Any, key: Any, found: Any, choices: Choices) -> None:
    value = inside[key]
    step = choices.of((1, -1, 255, -256))
    if type(value) is int:
        inside[key] = value + step
    elif type(value) is str and value:
        index = choices.below(len(value))
        other = chr((ord(value[index]) + step) % 0x110000)
        inside[key] = value[:index] + other + value[index + 1 :]
    elif type(value) is list:
        value.extend(copy.deepcopy(value[:3]))
    else:
        inside[key] = not value


def _remove(document: Any, inside: Any, key: Any, found: Any, choices: Choices) -> None:
    del inside[key]


def _repeat(document: Any, inside: Any, key: Any, found: Any, choices: Choices) -> None:
    if isinstance(inside, list):
        inside.insert(key, copy.deepcopy(inside[key]))
    else:
        inside[f"{key}"[:-1] + choices.of("abx/")] = copy.deepcopy(inside[key])


def _replace(
    document: Any, inside: Any, key: Any, found: Any, choices: Choices
) -> None:
    inside[key] = copy.deepcopy(_at(document, choices.of(found)))


_CHANGES: Sequence[Callable[..., None]] = (_set, _nudge, _remove, _repeat, _replace)


def mutated_bytes(data: bytes, choices: Choices) -> bytes:
    """`data` with a few bytes changed, cut off, repeated or put in."""
    changed = bytearray(data)
    for _ in range(1 + choices.below(4)):
        at = choices.below(len(changed) + 1)
        match choices.below(5):
            case 0:
                changed[at : at + 1] = choices.take(1)
            case 1:
                changed[at : at + 4] = struct.pack("<I", choices.below(1 << 32))
            case 2:
                del changed[at:]
            case 3:
                changed[at:at] = changed[at : at + 1 + choices.below(64)]
            case 4:
                changed[at:at] = choices.take(choices.below(16))
    return bytes(changed)


def mutated_part(data: bytes, choices: Choices) -> bytes:
    """A part with changed columns, in a frame that is right."""
    changed = mutated(hostile.part_document(data), choices)
    columns = [name for name, _ in hostile.PART_COLUMNS]
    for name in columns:
        if type(changed.get(name)) is not list:
            changed[name] = []
    for name in ("version", "flags", "attempt"):
        changed.setdefault(name, 0)
    return hostile.part_bytes(changed)


def mutated_pack(data: bytes, choices: Choices) -> bytes:
    """A pack with changed records whose checksums, index and digests are right."""
    found = hostile.pack_records(data)
    for _ in range(1 + choices.below(2)):
        index = choices.below(len(found))
        found[index] = mutated_record(found[index], choices)
    return hostile.pack_bytes(data[: hostile.PACK_HEAD.size], found)


def mutated_record(record: bytes, choices: Choices) -> bytes:
    """A record with a changed payload or header, and a checksum that is right."""
    payload = record[hostile.RECORD_HEAD.size : -8]
    if choices.below(4):
        return hostile.with_payload(record, mutated_bytes(payload, choices))
    head = list(hostile.RECORD_HEAD.unpack_from(record))
    index = 1 + choices.below(5)
    width = (4, 1, 1, 2, 4, 4)[index]
    head[index] = hostile.as_int(choices.of(_NUMBERS), width)
    return hostile.record_bytes(head, payload)


def mutated_json(data: bytes, choices: Choices) -> bytes:
    """A pin, a mark or a STORE.json with changes and the digest that belongs to it."""
    document = json.loads(data)
    document.pop(jsontext.DIGEST_FIELD, None)
    changed = mutated(document, choices)
    try:
        return jsontext.sealed(changed)
    except (ValueError, AttributeError):  # a NaN, or no object any more
        return json.dumps(changed).encode()
