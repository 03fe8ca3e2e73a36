"""Small whole numbers as bytes: several to a byte, the few large ones apart.

FORMAT.md section 4.8 is the contract. An entropy coder of bytes spends a bit on each;
numbers that are mostly 0 need less, so up to eight of them share a byte. Does not
belong here: what the numbers mean.
"""

import math
import struct

import numpy as np

from orbax_delta import gridkernels, kernels, planes, scratch
from orbax_delta.differences import Bytes
from orbax_delta.errors import CorruptionError

_HEAD = struct.Struct("<BBI")

LANE_BITS = (1, 2, 4, 8)
_WIDTHS = (1, 2, 4)
# By the noise that it makes in its lane a number apart costs more than its entropy.
_APART_BITS = 1.0
# So many numbers tell how many there are of each.
_SAMPLE = 1 << 12
_LARGEST = 255


def encode(codes: np.ndarray, centre: int) -> bytes:
    """Payload of whole numbers that are mostly near `centre`.

    Args:
        codes: int32[n].
        centre: The number that takes least.
    """
    lane_bits = _best_lane(_zigzag(codes[:: max(1, codes.size // _SAMPLE)], centre))
    packed, apart = _split(codes, centre, lane_bits)
    widest = int(apart.max(initial=0))
    width = next(w for w in _WIDTHS if widest < 1 << 8 * w)
    words = apart.astype(np.dtype(f"<u{width}")).view(np.uint8)
    return b"".join(
        (
            _HEAD.pack(lane_bits, width, apart.size),
            planes.encode(packed, 1),
            planes.encode(words, width),
        )
    )


def _zigzag(codes: np.ndarray, centre: int) -> np.ndarray:
    """Numbers 0, 1, 2, 3, ... for 0, -1, 1, -2, ...: uint32[n]."""
    near = codes - np.int32(centre)
    return ((near << 1) ^ (near >> 31)).view(np.uint32)


def _best_lane(some: np.ndarray) -> int:
    """Bits of a lane for which the payload of such numbers is expected to be least.

    All take the entropy of the numbers; this compares what comes on top of it.
    """
    counts = np.bincount(np.minimum(some, _LARGEST), minlength=_LARGEST + 1)
    logs = (counts * np.log2(np.maximum(counts, 1))).cumsum()
    counts = counts.cumsum()
    total = int(counts[-1])

    def excess(lane_bits: int) -> float:
        last = (1 << lane_bits) - 2
        apart = total - int(counts[last])
        lanes = _times_log(total) - float(logs[last]) - _times_log(apart)
        # A coder of bytes takes a bit for each at least.
        return _APART_BITS * apart + max(0.0, total * lane_bits / 8 - lanes)

    return min(LANE_BITS, key=excess)


def _times_log(count: int) -> float:
    return count * math.log2(max(count, 1))


def _split(codes: np.ndarray, centre: int, lane_bits: int) -> tuple[Bytes, np.ndarray]:
    """Numbers in lanes, and by how much those that do not fit exceed the largest."""
    if kernels.pay(codes.nbytes):
        packed = scratch.array("packed", -(-codes.size * lane_bits // 8), 1)
        apart = scratch.array("apart", codes.size, 4)
        run = gridkernels.pack(lane_bits)
        return packed, apart[: run(codes, np.int32(centre), packed, apart)]
    numbers, escape = _zigzag(codes, centre), (1 << lane_bits) - 1
    low = np.minimum(numbers, escape).astype(np.uint8)
    return pack(low, lane_bits), numbers[low == escape] - np.uint32(escape)


def decode(view: memoryview, count: int, centre: int) -> np.ndarray:
    """The int32[count] about `centre` that fill `view`, in a thread's own array.

    Raises:
        CorruptionError: They do not.
    """
    if len(view) < _HEAD.size:
        raise CorruptionError(f"packed numbers of {len(view)} bytes have no header")
    lane_bits, width, apart_count = _HEAD.unpack_from(view)
    if lane_bits not in LANE_BITS or width not in _WIDTHS or apart_count > count:
        raise CorruptionError(
            f"packed numbers claim lanes of {lane_bits} bits and {apart_count} of "
            f"{count} apart in {width} bytes each"
        )
    packed_bytes = -(-count * lane_bits // 8)
    packed, rest = planes.decode(view[_HEAD.size :], packed_bytes, 1)
    words = planes.decode_exactly(rest, apart_count * width, width)
    apart = words.view(np.dtype(f"<u{width}"))
    escape = (1 << lane_bits) - 1
    if apart.size and int(apart.max()) > 0xFFFFFFFF - escape:
        raise CorruptionError(
            f"a number that stands apart is {int(apart.max())} above {escape}, too much"
        )
    codes = scratch.array("numbers", count, 4).view(np.int32)
    found = _joined(packed, apart.astype(np.uint32), lane_bits, centre, codes)
    past = unpack(packed[-1:], lane_bits)[(count - 1) % (8 // lane_bits) + 1 :]
    if past.any() or found != apart_count:
        raise CorruptionError(
            f"{found} of {count} packed numbers stand apart, expected {apart_count}; "
            "or bits are set past the last one"
        )
    return codes


def _joined(
    packed: Bytes, apart: np.ndarray, lane_bits: int, centre: int, codes: np.ndarray
) -> int:
    """Put together what `_split` took apart; returns how many have to stand apart."""
    if kernels.pay(codes.nbytes):
        run = gridkernels.unpack(lane_bits)
        return run(packed, apart, np.int32(centre), codes)
    escape = (1 << lane_bits) - 1
    numbers = unpack(packed, lane_bits)[: codes.size].astype(np.uint32)
    places = np.flatnonzero(numbers == escape)
    if places.size == apart.size:
        numbers[places] += apart
    signs = np.negative(numbers & np.uint32(1))
    np.copyto(codes, ((numbers >> np.uint32(1)) ^ signs).view(np.int32))
    codes += np.int32(centre)  # sums wrap; what a writer has made is far from that
    return places.size


def pack(low: Bytes, lane_bits: int) -> Bytes:
    """Numbers below 2^lane_bits, several to a byte, the first in its lowest bits."""
    per_byte = 8 // lane_bits
    if per_byte == 1:
        return low
    lanes = np.zeros((-(-low.size // per_byte), per_byte), np.uint8)
    lanes.reshape(-1)[: low.size] = low
    packed = lanes[:, 0].copy()
    for lane in range(1, per_byte):
        packed |= lanes[:, lane] << np.uint8(lane * lane_bits)
    return packed


def unpack(packed: Bytes, lane_bits: int) -> Bytes:
    """The numbers of lanes, those past the last one too."""
    per_byte = 8 // lane_bits
    lanes = np.empty((packed.size, per_byte), np.uint8)
    for lane in range(per_byte):
        lanes[:, lane] = (packed >> np.uint8(lane * lane_bits)) & np.uint8(
            (1 << lane_bits) - 1
        )
    return lanes.reshape(-1)
