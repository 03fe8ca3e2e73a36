"""Reads what XLA's compilers say in text: programs, and why there is none.

Text is the one form in which all of them tell of their kernels and of what they
recompute on their own. Does not belong here: judging it (see `verify`).
"""

import collections
import re

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>\S+) = ")
_REMATTED = re.compile(r"\.remat(?:_compressed|_uncompressed)?\d*(?:\.|$)")
_VIEW = re.compile(r" bitcast\(")

_CUSTOM_CALL = re.compile(r'custom-call\(.*custom_call_target="(?P<target>[^"]+)"')
_OPERATION = re.compile(r'op_name="(?P<path>[^"]*)"')

# How compilers write down where a buffer is, or that one is a view of others.
_BOOKKEEPING = frozenset({"AllocateBuffer", "ConcatBitcast"})

_OVERFLOW = re.compile(
    r"Ran out of memory on HBM.*?\((?P<required>[\d.]+)(?P<required_unit>[KMGT]?)\)"
    r" exceeds available HBM \((?P<available>[\d.]+)(?P<available_unit>[KMGT]?)\)",
    re.DOTALL,
)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def kernel_counts(text: str) -> dict[str, int]:
    """How often a compiled program calls each hand-written kernel, by name.

    A kernel of Pallas goes by its own name, or by that of the jitted function around
    it; any other custom call (cuDNN's attention, a foreign function) by its target.
    One in a loop counts once, as the program holds it once.

    Args:
        text: An HLO module as `Compiled.as_text()` prints it.

    Example:
        >>> kernel_counts('%f = f32[] custom-call(%x), custom_call_target="my_ffi"')
        {'my_ffi': 1}
    """
    found: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        call = _CUSTOM_CALL.search(line)
        if call and call["target"] not in _BOOKKEEPING:
            found[_kernel_name(line, call["target"])] += 1
    return dict(sorted(found.items()))


def _kernel_name(line: str, target: str) -> str:
    operation, instruction = _OPERATION.search(line), _INSTRUCTION.match(line)
    if operation and operation["path"].endswith("/pallas_call"):
        # "jit(step)/transpose(jvp(flash))/pallas_call": transforms wrap the name.
        name = operation["path"].split("/")[-2].rsplit("(", 1)[-1].rstrip(")")
        if name:
            return name
    if target == "tpu_custom_call" and instruction:
        # What the compiler made of the name, before its numbers and operands' names.
        return instruction["name"].split(".", 1)[0]
    return target


def hidden_remats(text: str) -> int:
    """How many instructions XLA doubled on its own, to recompute their results.

    It does so where a program would not fit otherwise, without regard to a policy.
    Views of other arrays, which cost nothing, do not count.

    Args:
        text: An HLO module as `Compiled.as_text()` prints it.

    Example:
        >>> hidden_remats("  %fusion.7.remat2 = f32[8]{0} fusion(%x)")
        1
    """
    lines = (line for line in text.splitlines() if not _VIEW.search(line))
    found = (_INSTRUCTION.match(line) for line in lines)
    return sum(1 for made in found if made and _REMATTED.search(made["name"]))


def hbm_overflow(message: str) -> tuple[int, int] | None:
    """Bytes required and available, if this is a TPU compiler's lack of HBM.

    The message gives them to two decimals: of a GiB, about 10 MB. "HLO temporaries" in
    it are all that is resident, arguments and outputs too.

    Example:
        >>> hbm_overflow("Ran out of memory on HBM, the total memory required for HLO "
        ...              "temporaries (2.00G) exceeds available HBM (1.00G).")
        (2147483648, 1073741824)
    """
    found = _OVERFLOW.search(message)
    if found is None:
        return None
    required = float(found["required"]) * _UNITS[found["required_unit"]]
    available = float(found["available"]) * _UNITS[found["available_unit"]]
    return int(required), int(available)
