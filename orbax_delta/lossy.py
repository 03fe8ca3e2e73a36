"""Which leaf of a state has which policy, and what that means for its chunks.

Patterns and structure are resolved in the blocking phase, alike on all processes: what
matches nothing, or a leaf that no policy fits, is an error before anything is written.
Does not belong here: arithmetic (`rounding`, `grids`).
"""

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from orbax_delta import codecs, dtypes, grids, leaves, policies, reports, rounding
from orbax_delta.changes import Chunk, Finding
from orbax_delta.chunks import Box
from orbax_delta.errors import InvalidInputError
from orbax_delta.grids import Grid, Kind
from orbax_delta.leaves import HostLeaf
from orbax_delta.manifests import LOSSY, VALUE_KINDS, LeafEntry
from orbax_delta.parts import Ref
from orbax_delta.policies import AdamW, Policy
from orbax_delta.rounding import Errors

# What float32 rounds is far less than this part of a step, but on very fine grids.
_MARGIN = 1 - 2.0**-8
_STEPS_AN_OCTAVE = 4
_FLOAT = "float32"
_ADAM = {"count", "mu", "nu"}
_WRAPPERS = {"inner_state", "inner_states", "inner_opt_state", "opt_state"}
_COUNT_TAILS = (("count",), ("count", "value"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The policy of one leaf.

    Attributes:
        policy: It.
        source: Index of the leaf that it refers to.
    """

    policy: Policy
    source: int | None = None


# What these make of a value follows from the value alone.
_REFERRED_TO = (policies.Grid, policies.LogGrid, policies.Narrow)

Plan = Mapping[int, Resolved]
"""Policies by index of the leaf; leaves that are stored bit for bit are left out."""


def plan(state: Sequence[HostLeaf], lossy: Mapping[str, Policy] | AdamW | None) -> Plan:
    """Find out which leaf has which policy.

    Args:
        state: The leaves.
        lossy: As the option.

    Raises:
        InvalidInputError: A pattern matches no leaf, a policy does not fit the leaf
            that it is for, or Adam's moments or weights cannot be told.
    """
    entries = [leaf.entry for leaf in state]
    if lossy is None:
        return {}
    if isinstance(lossy, AdamW):
        return _Adam(state, lossy).plan()
    matched = _match(entries, lossy)
    indices = {entry.path: index for index, entry in enumerate(entries)}
    found = {
        index: Resolved(
            policy=policy, source=_source(entries[index], policy, entries, indices)
        )
        for index, policy in matched.items()
        if not isinstance(policy, policies.Lossless) and _fits(entries[index], policy)
    }
    for index, resolved in found.items():
        other = found.get(resolved.source) if resolved.source is not None else None
        if other is not None and not isinstance(other.policy, _REFERRED_TO):
            raise InvalidInputError(
                f"leaf {entries[index].name} has the policy {resolved.policy!r}, but "
                f"the leaf that it refers to has {other.policy!r}; expected Lossless, "
                "Grid, LogGrid or Narrow there"
            )
    return found


def _match(
    entries: Sequence[LeafEntry], lossy: Mapping[str, Policy]
) -> dict[int, Policy]:
    """The policy of the first pattern that a leaf's path fits."""
    matched: dict[int, Policy] = {}
    for pattern, policy in lossy.items():
        fitting = [
            index
            for index, entry in enumerate(entries)
            if fnmatch.fnmatchcase(entry.name, pattern)
        ]
        if not fitting:
            names = ", ".join(entry.name for entry in entries[:5])
            raise InvalidInputError(
                f"DeltaOptions.lossy has the pattern {pattern!r}, which no leaf fits; "
                f"the first leaves are {names}"
            )
        for index in fitting:
            matched.setdefault(index, policy)
    return matched


def _fits(entry: LeafEntry, policy: Policy) -> bool:
    """Whether there is anything to round; raises where the policy is out of place."""
    wanted = dtypes.CAST_TARGETS if isinstance(policy, policies.CastOf) else (_FLOAT,)
    if entry.kind not in ("jax", "numpy", "numpy_scalar") or entry.dtype not in wanted:
        raise InvalidInputError(
            f"leaf {entry.name} is {entry.dtype or 'a Python ' + entry.kind}; "
            f"{type(policy).__name__} is for {' and '.join(wanted)}. Give it "
            "Lossless() by an earlier pattern"
        )
    if isinstance(policy, policies.Threshold) and "nu" in entry.path:
        raise InvalidInputError(
            f"leaf {entry.name} is called nu; a small absolute error of it is a large "
            "one, and training from such a state blows up. Use LogGrid()"
        )
    return math.prod(entry.shape) > 0


def _source(
    entry: LeafEntry,
    policy: Policy,
    entries: Sequence[LeafEntry],
    indices: Mapping[tuple[str, ...], int],
) -> int | None:
    """Index of the leaf that a policy refers to by a key in its path."""
    if not isinstance(policy, policies.RelativeTo | policies.CastOf):
        return None
    places = [i for i, key in enumerate(entry.path) if key == policy.instead_of]
    for place in reversed(places):
        path = (*entry.path[:place], policy.leaf, *entry.path[place + 1 :])
        if path in indices:
            _check_source(entry, policy, entries[indices[path]])
            return indices[path]
    raise InvalidInputError(
        f"leaf {entry.name} has the policy {policy!r}, but there is no leaf whose path "
        f"has {policy.leaf!r} in the place of {policy.instead_of!r}"
    )


def _check_source(entry: LeafEntry, policy: Policy, source: LeafEntry) -> None:
    arrays = ("jax", "numpy", "numpy_scalar")
    fits = source.kind in arrays and source.dtype == _FLOAT
    if not fits or source.shape != entry.shape:
        raise InvalidInputError(
            f"leaf {entry.name} has the policy {policy!r}, but leaf {source.name} is "
            f"{source.dtype or source.kind} of shape {source.shape}; expected {_FLOAT} "
            f"of shape {entry.shape}"
        )


# --- Adam -----------------------------------------------------------------------------


class _Adam:
    """Adam's leaves in a state, by their paths and shapes."""

    def __init__(self, state: Sequence[HostLeaf], wanted: AdamW) -> None:
        self._state = state
        self._entries = [leaf.entry for leaf in state]
        self._wanted = wanted
        self._indices = {entry.path: i for i, entry in enumerate(self._entries)}
        ends: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for index, entry in enumerate(self._entries):
            if entry.path:
                ends.setdefault((entry.path[-1], tuple(entry.shape)), []).append(index)
        self._ends = ends
        nodes: dict[tuple[str, ...], set[str]] = {}
        for path in self._indices:
            for place, key in enumerate(path):
                nodes.setdefault(path[:place], set()).add(key)
        self._nodes = nodes

    def plan(self) -> Plan:
        found: dict[int, Resolved] = {}
        rates: dict[tuple[str, ...], float] = {}
        wanted = self._wanted
        pairs = list(self._moments())
        if not pairs:
            raise InvalidInputError(
                "policies.adamw found no moments of Adam in the state: no node of "
                "count, mu and nu alone in which two float32 leaves are of one shape"
            )
        for mu, nu, place in pairs:
            entry = self._entries[mu]
            if math.prod(entry.shape) < wanted.least_elements:
                continue
            found[nu] = Resolved(policy=policies.LogGrid(octaves=wanted.nu_octaves))
            relative = policies.RelativeTo(bound=wanted.mu, floor=wanted.floor)
            found[mu] = Resolved(policy=relative, source=nu)
            node, tail = entry.path[:place], entry.path[place + 1 :]
            optimizer = _optimizer(node)
            master = None
            if wanted.weights:
                master = self._master(entry, tail, optimizer)
            if master is None:
                continue
            if node not in rates:
                rates[node] = self._rate(node)
            policy = self._for_weights(rates[node])
            if policy is None:
                continue
            found[master] = Resolved(policy=policy)
            if isinstance(policy, policies.Grid) and wanted.copies == "follow":
                found |= self._copies(master, tail, optimizer)
        return found

    def _for_weights(self, rate: float) -> Policy | None:
        """None where nothing is learned any more: there is no unit for a bound."""
        weights = self._wanted.weights
        if isinstance(weights, str):
            return policies.Narrow(dtype=weights)
        return policies.Grid(bound=rate * weights) if rate * weights > 0 else None

    def _moments(self) -> list[tuple[int, int, int]]:
        """Index of mu, of nu, and where in the paths these keys stand."""
        pairs = []
        for mu, entry in enumerate(self._entries):
            for place, key in enumerate(entry.path):
                path = (*entry.path[:place], "nu", *entry.path[place + 1 :])
                adam = key == "mu" and self._nodes.get(entry.path[:place]) == _ADAM
                nu = self._indices.get(path) if adam else None
                if nu is None:
                    continue
                other = self._entries[nu]
                if entry.dtype == other.dtype == _FLOAT and entry.shape == other.shape:
                    pairs.append((mu, nu, place))
        return pairs

    def _alike(
        self, tail: tuple[str, ...], shape: Sequence[int], optimizer: tuple[str, ...]
    ) -> list[int]:
        """Leaves outside of an optimizer whose path ends so, of that shape."""
        if not tail:
            return []
        return [
            index
            for index in self._ends.get((tail[-1], tuple(shape)), ())
            if self._entries[index].path[-len(tail) :] == tail
            and self._entries[index].path[: len(optimizer)] != optimizer
        ]

    def _master(
        self, moment: LeafEntry, tail: tuple[str, ...], optimizer: tuple[str, ...]
    ) -> int | None:
        alike = [
            index
            for index in self._alike(tail, moment.shape, optimizer)
            if self._entries[index].dtype == _FLOAT
            and fnmatch.fnmatchcase(self._entries[index].name, self._wanted.master)
        ]
        # Of several models each has its optimizer beside it.
        shared = [self._shared_keys(moment, index) for index in alike]
        alike = [
            i for i, keys in zip(alike, shared, strict=True) if keys == max(shared)
        ]
        if len(alike) > 1:
            names = ", ".join(self._entries[index].name for index in alike)
            raise InvalidInputError(
                f"policies.adamw cannot tell whose moments {moment.name} are: {names} "
                'end alike. Name the weights by adamw(master="pattern/*")'
            )
        return alike[0] if alike else None

    def _shared_keys(self, moment: LeafEntry, index: int) -> int:
        """How many first keys two paths have in common."""
        pairs = zip(moment.path, self._entries[index].path, strict=False)
        return sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        )

    def _copies(
        self, master: int, tail: tuple[str, ...], optimizer: tuple[str, ...]
    ) -> dict[int, Resolved]:
        """Narrower leaves that end as the weights do: copies, if their bits say so."""
        # The keys tell nothing here: the source is known.
        policy = policies.CastOf(leaf="weights", instead_of="copy")
        return {
            index: Resolved(policy=policy, source=master)
            for index in self._alike(tail, self._entries[master].shape, optimizer)
            if self._entries[index].dtype in dtypes.CAST_TARGETS
        }

    def _rate(self, node: tuple[str, ...]) -> float:
        """The learning rate in force."""
        rate = self._wanted.learning_rate
        if not callable(rate):
            return float(rate)
        paths = [(*node, *tail) for tail in _COUNT_TAILS]
        index = next((self._indices[p] for p in paths if p in self._indices), None)
        if index is None:
            raise InvalidInputError(
                "policies.adamw has a schedule, but the state has no count beside "
                f"{'/'.join((*node, 'mu'))}; give the learning rate as a number"
            )
        given = rate(_number(self._state[index]))
        try:
            value = float(given)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"the schedule of policies.adamw gives {given!r:.80} at this count; "
                "expected a learning rate"
            ) from error
        if not 0 <= value < math.inf:
            raise InvalidInputError(
                f"the schedule of policies.adamw gives {value} at this count; expected "
                "a learning rate"
            )
        return value


def _optimizer(node: tuple[str, ...]) -> tuple[str, ...]:
    """Path of the whole optimizer that a node of Adam's lies in.

    What chains and wrappers of optax put between is none of the user's. Of a state that
    is an optimizer's alone it is empty, and all leaves lie in it.
    """
    found = node
    while found and (found[-1].isdecimal() or found[-1] in _WRAPPERS):
        found = found[:-1]
    if not found and len(node) > 1 and all(key.isdecimal() for key in node):
        return node[:1]  # a tuple of weights and optimizer, most likely
    return found


def _number(leaf: HostLeaf) -> int:
    if leaf.entry.kind in VALUE_KINDS:
        return int(leaves.plain_value(leaf.entry).real)
    if math.prod(leaf.entry.shape) != 1 or not leaf.shards:
        raise InvalidInputError(
            f"policies.adamw has a schedule, but leaf {leaf.entry.name} is not one "
            "number that every process has; give the learning rate as a number"
        )
    _, held = leaf.shards[0]
    return int(np.asarray(held).reshape(-1)[0])


# --- chunks ---------------------------------------------------------------------------


def attach(own: Sequence[Chunk], found: Plan, seed: int) -> list[Chunk]:
    """Chunks that know what they become.

    Args:
        own: All chunks of this process.
        found: Policies of their leaves.
        seed: Of the dither of this run, not 0.
    """
    if not found:
        return list(own)
    sources = {resolved.source for resolved in found.values()}
    made: dict[tuple[int, Box], Chunk] = {}
    # What others refer to comes first; nothing refers to what itself refers.
    for chunk in sorted(own, key=lambda chunk: chunk.leaf_index not in sources):
        resolved = found.get(chunk.leaf_index)
        if resolved is not None:
            other = None
            if resolved.source is not None:
                other = made.get((resolved.source, chunk.box))
            made_rounding = _rounding(chunk, resolved.policy, other, seed)
            chunk = dataclasses.replace(chunk, rounding=made_rounding)
        if chunk.leaf_index in sources:
            chunk = dataclasses.replace(chunk, referred=True)
        made[chunk.leaf_index, chunk.box] = chunk
    return [made[chunk.leaf_index, chunk.box] for chunk in own]


def _rounding(
    chunk: Chunk, policy: Policy, other: Chunk | None, seed: int
) -> rounding.Rounding:
    start = chunk.spread % grids.DITHER_PLACES
    if isinstance(policy, policies.Grid):
        grid = Grid(
            kind=Kind.LINEAR,
            step=_step(policy.bound),
            seed=seed if policy.dither else 0,
            start=start if policy.dither else 0,
        )
        return rounding.OnGrid(grid=grid, bound=policy.bound)
    if isinstance(policy, policies.LogGrid):
        grid = Grid(
            kind=Kind.LOG,
            shift=23 + int(math.log2(policy.octaves)),
            seed=seed if policy.dither else 0,
            start=start if policy.dither else 0,
        )
        return rounding.OnGrid(grid=grid, bound=policy.bound)
    if isinstance(policy, policies.Narrow):
        rule = dtypes.cast_rule(policy.dtype)
        return rounding.Narrowing(rule=rule, bound=policy.bound)
    if isinstance(policy, policies.Threshold):
        entry = chunk.stored
        return rounding.Lazily(
            abs=policy.abs,
            rel=policy.rel,
            before=entry.checked_content if entry else _nothing,
        )
    if other is None:
        return rounding.Exactly(elements=chunk.word_count)
    if isinstance(policy, policies.RelativeTo):
        step = float(np.float32(2 * policy.bound * _MARGIN))
        floor = float(np.float32(policy.floor))
        grid = Grid(kind=Kind.RELATIVE, step=step, floor=floor)
        return rounding.OnGrid(grid=grid, bound=policy.bound, source=other)
    if isinstance(policy, policies.CastOf):
        rule = dtypes.cast_rule(chunk.leaf.dtype)
        return rounding.Following(rule=rule, source=other)
    raise AssertionError(f"{policy!r} rounds nothing")


def _nothing() -> None:
    return None


def _step(bound: float) -> float:
    """The largest step for a bound, of a few an octave.

    A falling learning rate would otherwise move the grid at every save, and changes
    from one grid to another are larger than those along one.
    """
    power = math.floor(_STEPS_AN_OCTAVE * math.log2(2 * bound * _MARGIN))
    return float(np.float32(2.0 ** (power / _STEPS_AN_OCTAVE)))


def documents(found: Plan, entries: Sequence[LeafEntry]) -> dict[str, dict[str, Any]]:
    """What the MANIFEST says of policies, by path of the leaf."""
    return {
        entries[index].name: _document(resolved, entries)
        for index, resolved in found.items()
    }


def _document(resolved: Resolved, entries: Sequence[LeafEntry]) -> dict[str, Any]:
    document = policies.document(resolved.policy)
    if resolved.source is not None:
        # The leaf itself, instead of how it was found.
        del document["leaf"], document["instead_of"]
        document["of"] = entries[resolved.source].name
    return document


def features(lists: Iterable[Sequence[Ref]]) -> list[str]:
    """What a reader must know to read these lists of records."""
    rounded = any(ref.form in codecs.GRID_FORMS for refs in lists for ref in refs)
    return [LOSSY] if rounded else []


def summed(found: Plan, findings: Sequence[Finding]) -> dict[str, dict[str, float]]:
    """What a report says of each leaf with a policy.

    Args:
        found: The policies.
        findings: All chunks of this process, compared.
    """
    by_leaf: dict[int, list[Errors]] = {index: [] for index in found}
    names: dict[int, str] = {}
    for finding in findings:
        index = finding.chunk.leaf_index
        if finding.errors is not None:
            by_leaf[index].append(finding.errors)
            names[index] = finding.chunk.leaf.name
    return {
        name: _summed(found[index].policy, by_leaf[index])
        for index, name in names.items()
    }


def _summed(policy: Policy, errors: Sequence[Errors]) -> dict[str, float]:
    measured = not isinstance(policy, policies.CastOf)
    return reports.leaf_errors(
        bound=getattr(policy, "bound", None),
        largest=max(one.largest for one in errors) if measured else None,
        square_sum=sum(one.square_sum for one in errors),
        elements=sum(one.elements for one in errors),
        exact_chunks=sum(one.exact for one in errors),
    )
