"""From "12GB" or the name of a device to bytes for each layer.

Of a device an estimate, made without compiling. Does not belong here: spending them.
"""

import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from remat_policies.devices import DEVICES, Device, device
from remat_policies.errors import InvalidInputError, OverBudgetError
from remat_policies.linearized import Linearized

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a device has for the layers of a model. Sizes in bytes.

    Attributes:
        resident_bytes: What is there all the time.
        input_bytes: Of one layer's input, which is always kept.
        working_bytes: One layer's values without any policy, while its backward runs.
        available_bytes: What is left for all that the layers keep, inputs too.
    """

    resident_bytes: int
    input_bytes: int
    working_bytes: int
    available_bytes: int


def parse_bytes(text: str) -> int:
    """A size with its unit: kB, MB, GB by thousands, KiB, MiB, GiB by 1024.

    Raises:
        InvalidInputError: It is no such text.

    Example:
        >>> parse_bytes("1.5 GB")
        1500000000
    """
    found = _SIZE.fullmatch(text)
    unit = found and next((u for u in _UNITS if u.lower() == found[2].lower()), None)
    if found is None or unit is None:
        raise InvalidInputError(
            f"{text!r} is no size: write one like '12GB' or '800 MiB' (units:"
            f" {', '.join(_UNITS)}), or the name of a device:"
            f" {', '.join(known.name for known in DEVICES)}"
        )
    return int(float(found[1]) * _UNITS[unit])


def whole_number(value: object, name: str, *, least: int) -> int:
    """A number of bytes or layers, of Python or numpy, as Python's.

    Raises:
        InvalidInputError: It is none, or too small.
    """
    integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integer or value < least:  # type: ignore[operator]
        raise InvalidInputError(f"{name} is a whole number from {least}: {value!r}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def share_to_leave(headroom: float) -> float:
    """The share of a device that stays free.

    Raises:
        InvalidInputError: It is no share.
    """
    if not 0 <= headroom < 1:
        raise InvalidInputError(f"headroom is a share from 0 to below 1: {headroom}")
    return headroom


def as_device(target: str | Device) -> Device:
    """A device, or the one of that name."""
    return device(target) if isinstance(target, str) else target


def device_named(budget: object) -> Device | None:
    """The device that a budget is, if it is one."""
    if isinstance(budget, Device):
        return budget
    names = [known.name for known in DEVICES]
    if isinstance(budget, str) and budget.lower() in names:
        return device(budget)
    return None


def room(
    chosen: Device,
    split: Linearized,
    layers: int,
    *,
    wanted: frozenset[int],
    resident_bytes: int | None,
    headroom: float,
    sizes: Mapping[int, int] = MappingProxyType({}),
) -> Room:
    """What a device has for the layers of a model.

    Args:
        chosen: The device.
        split: One layer.
        layers: How many there are.
        wanted: Numbers of the values that the backward pass reads.
        resident_bytes: Weights, gradients, optimizer state. None: the layers' weights
            and as much again for gradients.
        headroom: Share of the device's memory to leave free.
        sizes: Bytes of values on each device, where they are not whole there.

    Raises:
        InvalidInputError: `resident_bytes` is no number of bytes.
    """
    program = split.program

    def nbytes(value: int) -> int:
        return sizes.get(value, program.nbytes(value))

    input_bytes = max(map(nbytes, split.outputs), default=0)
    if resident_bytes is None:
        own = program.arguments[len(split.outside) :]
        whole = sum(nbytes(value) for value in own)
        resident_bytes = 2 * layers * max(whole - input_bytes, 0)
    whole_number(resident_bytes, "resident_bytes", least=0)
    working = sum(map(nbytes, wanted & set(program.producers())))
    limit = int(chosen.hbm_bytes * (1 - headroom))
    return Room(
        resident_bytes=resident_bytes,
        input_bytes=input_bytes,
        working_bytes=working,
        available_bytes=limit - resident_bytes - working,
    )


def no_room(chosen: Device, there_is: Room, layers: int) -> OverBudgetError:
    """What to raise where not even the inputs of all layers fit."""
    resident, working = there_is.resident_bytes, there_is.working_bytes
    inputs = layers * there_is.input_bytes
    return OverBudgetError(
        f"even `full` does not fit a {chosen.name}: {gigabytes(resident)} are"
        f" resident, one layer's backward pass takes {gigabytes(working)} and {layers}"
        f" layers' inputs {gigabytes(inputs)}, of {gigabytes(chosen.hbm_bytes)}."
        " Take a smaller batch, segments of layers (scan_layers(every='sqrt')),"
        " more devices, or a larger one.",
        required_bytes=resident + working + inputs,
        available_bytes=chosen.hbm_bytes,
    )


def gigabytes(count: int) -> str:
    """A number of bytes, to 10 MB."""
    return f"{count / 1e9:.2f} GB"
