"""The safetensors format: 8 bytes of length, a JSON header, the data of the tensors.

Written and read here because the package of that name holds every tensor of a file in
memory at once; the tests compare with it. Pure bytes: does not belong here which leaf
is which tensor, and files.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_delta import dtypes, jsontext
from orbax_delta.errors import FormatError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Of what the format allows; its own reader refuses more."""

_ALIGNMENT = 8
_METADATA = "__metadata__"
_CODES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_NAMES = {code: name for name, code in _CODES.items()}

DTYPES: Sequence[str] = tuple(_CODES)
"""What a tensor can be, by the names of this package."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        name: Its name.
        dtype: One of `DTYPES`.
        shape: Its shape.
        start: Where its data begin, in bytes after the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        itemsize = dtypes.element_type_of(self.dtype).dtype.itemsize
        return math.prod(self.shape) * itemsize


def laid_out(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors one after the other, widest elements first, so that all are aligned."""

    def width(tensor: Tensor) -> int:
        return dtypes.element_type_of(tensor.dtype).dtype.itemsize

    placed, start = [], 0
    for tensor in sorted(tensors, key=width, reverse=True):
        placed.append(dataclasses.replace(tensor, start=start))
        start += tensor.nbytes
    return placed


def encode_header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """What a file begins with, up to the first byte of data.

    >>> encode_header([Tensor(name="a", dtype="int8", shape=(2,))], {})[8:]
    b'{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}   '
    """
    document: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.start + tensor.nbytes],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(head: bytes, *, file_bytes: int, where: str) -> int:
    """Length of the JSON that follows the first 8 bytes of a file.

    Raises:
        FormatError: There can be no such header.
    """
    length = int.from_bytes(head, "little")
    most = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if len(head) < LENGTH_BYTES or not 0 < length <= most:
        raise FormatError(
            f"{where} is no safetensors file: it has {file_bytes} bytes, and its first "
            f"{LENGTH_BYTES} call for a header of {length}"
        )
    return length


def parse_header(
    text: bytes, *, data_bytes: int, where: str
) -> tuple[list[Tensor], dict[str, str]]:
    """Tensors and metadata of a file.

    Args:
        text: The JSON.
        data_bytes: How many bytes follow it.
        where: The file, for messages.

    Raises:
        FormatError: It is no header, or its tensors do not lie in the data.
    """
    try:
        document = jsontext.parse(text)
        metadata = document.pop(_METADATA, None) or {}
        texts = [*metadata.keys(), *metadata.values()]
        if not all(type(one) is str for one in texts):
            raise ValueError("its metadata are not texts")
        tensors = [_tensor(name, entry) for name, entry in document.items()]
        _require_cover(tensors, data_bytes)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise FormatError(
            f"the header of {where} is not one of safetensors: {error!s:.300}"
        ) from error
    return tensors, metadata


def _tensor(name: str, entry: Mapping[str, Any]) -> Tensor:
    code, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
    if code not in _NAMES:
        raise ValueError(
            f"tensor {name!r:.80} has the dtype {code!r:.20}, which this package does "
            f"not have; it has {', '.join(_NAMES)}"
        )
    if not all(type(one) is int and one >= 0 for one in (*shape, *offsets)):
        raise ValueError(f"tensor {name!r:.80} has the place {shape}, {offsets}")
    start, stop = offsets
    tensor = Tensor(name=name, dtype=_NAMES[code], shape=tuple(shape), start=start)
    if tensor.nbytes != stop - start:
        raise ValueError(
            f"tensor {name!r:.80} has {stop - start} bytes; expected {tensor.nbytes}"
        )
    return tensor


def _require_cover(tensors: Sequence[Tensor], data_bytes: int) -> None:
    """As the format asks: no holes, no overlaps, nothing after the last."""
    end = 0
    for tensor in sorted(tensors, key=lambda one: (one.start, one.nbytes)):
        if tensor.start != end:
            raise ValueError(
                f"tensor {tensor.name!r:.80} begins at {tensor.start}; expected {end}"
            )
        end += tensor.nbytes
    if end != data_bytes:
        raise ValueError(
            f"its tensors take {end} bytes, and {data_bytes} follow it; the file was "
            "cut off, or is of something else"
        )
