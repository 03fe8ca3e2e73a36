"""Payloads of contents that lie on a grid: full, as a change, relative to another.

FORMAT.md section 4.10 is the contract. What is coded is exact: the codes of a content
say all of it. Does not belong here: making contents lie on grids.
"""

import struct

import numpy as np

from orbax_delta import grids, lanes
from orbax_delta.differences import Bytes
from orbax_delta.errors import CorruptionError
from orbax_delta.grids import Codes, Kind

_CENTRE = struct.Struct("<i")

# A median of so many elements tells where most codes are.
_SAMPLE = 1024


def encode(codes: Codes, before: Bytes | None = None) -> bytes:
    """Payload of the content that has these codes.

    Args:
        codes: They, and their grid.
        before: The content before it, of which the payload is to say what changed;
            None: it stands for itself, or relative to another chunk.
    """
    found = codes.numbers
    if before is not None:
        found = grids.codes(before, codes.grid)
        np.subtract(codes.numbers, found, out=found)
    some = np.sort(found[:: max(1, found.size // _SAMPLE)])
    centre = int(some[some.size // 2]) if some.size else 0
    return codes.grid.head() + _CENTRE.pack(centre) + lanes.encode(found, centre)


def decode(
    view: memoryview,
    other: Bytes | None,
    content_bytes: int,
    *,
    relative: bool,
    out: Bytes | None = None,
) -> Bytes:
    """The content that a payload stands for, in `out` or else in a fresh buffer.

    Args:
        view: The payload.
        other: Of a RELATIVE grid the chunk that it is relative to; otherwise the
            content before, or None where the payload stands for itself.
        content_bytes: Size of the content.
        relative: Whether the form is RELATIVE.
        out: It may be `other`.

    Raises:
        CorruptionError: The payload does not describe a content of this size.
    """
    grid, rest = grids.parse(view)
    if relative != (grid.kind is Kind.RELATIVE) or content_bytes % grids.WORD_BYTES:
        raise CorruptionError(
            f"a payload of {content_bytes} bytes of content has a grid of kind "
            f"{grid.kind.name}, which its form does not have"
        )
    if len(rest) < _CENTRE.size:
        raise CorruptionError("a payload ends before the centre of its codes")
    (centre,) = _CENTRE.unpack_from(rest)
    count = content_bytes // grids.WORD_BYTES
    found = lanes.decode(rest[_CENTRE.size :], count, centre)
    if other is not None and not relative:
        found += grids.codes(other, grid)
    made = np.empty(content_bytes, np.uint8) if out is None else out
    grids.values(found, grid, other if relative else None, made)
    return made
