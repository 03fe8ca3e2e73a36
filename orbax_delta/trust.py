"""Whether this process believes what its devices say of its leaves.

A program that makes digests is believed once it was seen to make them: of one shard,
which is copied to the host at the same save, numpy makes them too. Until then nothing
that it made is kept, so that everything is copied; and if ever a device is wrong,
everything is from then on. A program that was compiled anew begins anew. Does not
belong here: what digests are used for (`selection`), how they are made (`digests`,
`device`).
"""

import dataclasses
import logging
import random
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from orbax_delta import codecs, device, digests, dtypes
from orbax_delta.chunks import Box
from orbax_delta.device import Detect, Shards
from orbax_delta.leaves import Brought, HostLeaf
from orbax_delta.transfers import Arrival, DeviceLeaf

_logger = logging.getLogger("orbax_delta")

PROVED_BYTES = 64 << 20
"""Of what the host makes digests at one save; of one shard, however large it is."""


class _Process:
    lost = False


def is_lost() -> bool:
    """Whether a device was wrong."""
    return _Process.lost


def lose(message: str) -> None:
    """Believe no device any more, and say why."""
    _Process.lost = True
    _logger.error(message)


def is_believed(shards: Shards) -> bool:
    """Whether digests of such shards say what changed."""
    return not is_lost() and device.is_proved(Detect(shards=shards))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One shard: what a program made of it, and what it holds.

    Attributes:
        program: The program.
        name: Of the leaf.
        box: Of the shard.
        made: Digests, and which of them differ from zeros.
        content: Waits for the shard.
    """

    program: Detect
    name: str
    box: Box
    made: Sequence[Arrival]
    content: Callable[[], np.ndarray]

    @classmethod
    def of(cls, leaf: DeviceLeaf, brought: HostLeaf, box: Box) -> "Proof":
        """That of a shard that comes to the host as a whole."""
        held = dict(brought.shards)[box]
        return cls(
            program=leaf.detector,
            name=leaf.leaf.entry.name,
            box=box,
            made=leaf.made_of(box),
            content=lambda: held.piece(box, box) if isinstance(held, Brought) else held,
        )

    def problem(self) -> str | None:
        """What is wrong with the program; to be found in the background."""
        array = self.content()
        element = dtypes.element_type(self.program.shards.dtype)
        expected = digests.block_digests(array, element)
        try:
            found, changed = (arrival.wait()[0] for arrival in self.made)
        except jax.errors.JaxRuntimeError as error:
            return f"it failed: {error}"
        wrong = (expected != found.T).any(axis=1) | (changed != expected.any(axis=1))
        if not wrong.any():
            return None
        first = int(wrong.argmax())
        return (
            f"{wrong.sum()} of {wrong.size} blocks are wrong, first block {first}: "
            f"expected digest {expected[first].tobytes().hex()}, found "
            f"{found.T[first].tobytes().hex()}, called changed: {changed[first]}"
        )

    def is_telling(self) -> bool:
        """Whether the content can tell a right program from a wrong one.

        Zeros, of a fresh optimizer say, are the same in any order and of any width.
        """
        element = dtypes.element_type(self.program.shards.dtype)
        content = element.to_content(self.content())
        return codecs.constant_word(content, element.word_bytes) is None


def choose(compared: Mapping[int, DeviceLeaf], turn: int) -> dict[int, Box]:
    """Shards to prove programs by, by number of the leaf.

    One of each program that made digests and is not proved yet, as far as PROVED_BYTES
    allow; others at each turn, as not every content is telling. To be called when the
    leaves have their chunks.
    """
    if is_lost():
        return {}
    found: dict[Detect, list[tuple[int, Box]]] = {}
    for index, leaf in compared.items():
        own = [box for box, cut in leaf.chunks.items() if cut]
        fresh = leaf.found is not None and leaf.changed is None
        if own and fresh and not device.is_proved(leaf.detector):
            places = found.setdefault(leaf.detector, [])
            places += [(index, box) for box in own]
    draw = random.Random(turn)
    chosen: dict[int, Box] = {}
    size_bytes = 0
    for program, places in draw.sample(list(found.items()), len(found)):
        size_bytes += program.shards.size_bytes
        if not chosen or size_bytes <= PROVED_BYTES:
            index, box = draw.choice(places)
            chosen[index] = box
    return chosen


def prove(proofs: Sequence[Proof], where: str) -> None:
    """Look at what programs made, and believe those that are right; takes a while.

    Args:
        proofs: What they made.
        where: Step and item, for the message.
    """
    for proof in proofs:
        if is_lost():
            return
        problem = proof.problem()
        if problem is None:
            if proof.is_telling():
                device.set_proved(proof.program)
            continue
        kind = proof.program.devices[0].device_kind
        lose(
            f"{where}: leaf {proof.name}, shard {proof.box}: the program that finds "
            f"changes on {kind} does not do what it should, {problem}. This save "
            "is right, as it copied what is in question, and this process compares on "
            'the host from now on. Set compare_on="host", and report it with the '
            "versions of jax and of the device's driver"
        )
