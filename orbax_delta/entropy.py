"""Entropy coding of a byte plane: a zstd frame as small and fast as its kind allows.

FORMAT.md section 4.3 fixes what a frame may be; level and parameters are the writer's.
Does not belong here: planes that are no frame, decoding.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zstandard

try:
    _zstd: Any = importlib.import_module(
        "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    )
except ImportError:
    _zstd = None  # no wheel for this platform: all planes take the other coder

# A tiny hash table and long minimum match make zstd an entropy coder with run removal:
# on byte planes it is both faster and smaller than level 1 (DESIGN.md, decision 4).
_PARAMETERS = {
    "compression_level": 1,
    "window_log": 20,
    "hash_log": 6,
    "chain_log": 6,
    "min_match": 7,
    "target_length": 0,
    "strategy": zstandard.STRATEGY_FAST,
}
# Exponents of noise repeat in pairs and triples by chance only. Strides of this length
# skip such matches, which cost more than the literals that they replace, and most time.
_STRIDE = 256
# ZSTD_c_literalCompressionMode: with strides zstd would leave literals as they are. An
# experimental parameter of zstd, which has kept number and meaning since 1.4.0.
_LITERALS_MODE, _LITERALS_CODED = 1002, 1

Coder = Callable[[memoryview], bytes]


_FEATURES = zstandard.backend_features
# Fewer planes take less by themselves.
_MANY = 4


class _Coders(threading.local):
    """zstd contexts are not safe to share between threads."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(**_PARAMETERS)
        self.coder = zstandard.ZstdCompressor(compression_params=parameters)
        self.matches: Coder = self.coder.compress
        self.literals: Coder = _literal_coder() or self.matches


def _literal_coder() -> Coder | None:
    """A coder of literals that looks for few matches; None where zstd has none."""
    if _zstd is None:
        return None
    named = _zstd.CompressionParameter
    options = {getattr(named, name): value for name, value in _PARAMETERS.items()}
    options |= {named.target_length: _STRIDE, _LITERALS_MODE: _LITERALS_CODED}
    try:
        coder = _zstd.ZstdCompressor(options=options)
    except (_zstd.ZstdError, ValueError):
        return None

    def compress(plane: memoryview) -> bytes:
        coder.set_pledged_input_size(len(plane))
        frame: bytes = coder.compress(plane, mode=coder.FLUSH_FRAME)
        return frame

    return compress


_coders = _Coders()


def by_matches(plane: memoryview) -> bytes:
    """A zstd frame of `plane`, for planes with long runs or repeats."""
    return _coders.matches(plane)


def all_by_matches(planes: Sequence[memoryview]) -> Sequence[Any]:
    """The same frames, of many small planes by one call.

    Each call lets go of the interpreter's lock, and to get it back costs more.
    """
    if len(planes) < _MANY or "multi_compress_to_buffer" not in _FEATURES:
        return [by_matches(plane) for plane in planes]
    found: Any = _coders.coder.multi_compress_to_buffer(list(planes))
    return list(found)


def by_literals(plane: memoryview) -> bytes:
    """A zstd frame of `plane`, for planes of few values in no order.

    On these it takes half the time of `by_matches`, and so does the reader.
    """
    return _coders.literals(plane)
