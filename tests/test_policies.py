"""Policies: values, what they refuse, and which leaf gets which."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import orbax_delta
from orbax_delta import leaves, lossy, policies
from orbax_delta.errors import InvalidInputError
from orbax_delta.hosts import ALONE
from orbax_delta.options import DeltaOptions
from orbax_delta.policies import (
    CastOf,
    Grid,
    LogGrid,
    Lossless,
    Narrow,
    RelativeTo,
    Threshold,
)

SHAPE = (128, 160)
"""More than 16,384 elements."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid(bound=0.0), "Grid.bound is 0.0; expected a number from 1e-30"),
        (lambda: Grid(bound=-1), "Grid.bound is -1"),
        (lambda: Grid(bound=float("nan")), "Grid.bound is nan"),
        (lambda: Grid(bound=True), "Grid.bound is True"),
        (lambda: Grid(bound="1"), "Grid.bound is '1'"),
        (lambda: Grid(bound=1.0, dither=1), "Grid.dither is 1; expected True or False"),
        (lambda: Threshold(), "Threshold needs abs or rel"),
        (lambda: Threshold(abs=-1.0), "Threshold.abs is -1.0"),
        (lambda: Threshold(rel=float("inf")), "Threshold.rel is inf"),
        (lambda: LogGrid(octaves=0.3), "LogGrid.octaves is 0.3; expected one of"),
        (lambda: LogGrid(octaves=4), "LogGrid.octaves is 4"),
        (lambda: LogGrid(dither=None), "LogGrid.dither is None"),
        (lambda: Narrow(dtype="float32"), "Narrow.dtype is 'float32'; expected"),
        (lambda: RelativeTo(bound=0.0), "RelativeTo.bound is 0.0"),
        (lambda: RelativeTo(bound=0.1, floor=-1.0), "RelativeTo.floor is -1.0"),
        (lambda: RelativeTo(bound=0.1, leaf="mu"), "expected two different keys"),
        (lambda: CastOf(leaf="", instead_of="a"), "expected two different keys"),
        (lambda: policies.adamw(0.0), "adamw's learning_rate is 0.0"),
        (lambda: policies.adamw("3e-4"), "adamw's learning_rate is '3e-4'"),
        (lambda: policies.adamw(1e-3, weights=-1), "adamw's weights is -1"),
        (lambda: policies.adamw(1e-3, mu=0.0), "RelativeTo.bound is 0.0"),
        (lambda: policies.adamw(1e-3, nu_octaves=3.0), "LogGrid.octaves is 3.0"),
        (lambda: policies.adamw(1e-3, copies="no"), "adamw's copies is 'no'"),
        (lambda: policies.adamw(1e-3, weights="float32"), "Narrow.dtype is 'float32'"),
        (lambda: policies.adamw(1e-3, weights=[1]), "adamw's weights is [1]"),
        (lambda: policies.adamw(1e-3, master=None), "adamw's master is None"),
        (lambda: policies.adamw(1e-3, least_elements="x"), "least_elements is 'x'"),
        (lambda: Narrow(dtype=["bfloat16"]), "Narrow.dtype is ['bfloat16']"),
        (lambda: DeltaOptions(lossy={"a": 1e-3}), "DeltaOptions.lossy is {'a'"),
        (lambda: DeltaOptions(lossy={1: Lossless()}), "DeltaOptions.lossy is {1"),
        (lambda: DeltaOptions(lossy=Grid(bound=1)), "expected a mapping from patterns"),
    ],
)
def test_bad_values_are_refused_at_once(make, message):
    """By name, with what is expected."""
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        make()


def test_bits_promise_nothing():
    """A number of bits bounds no error, so there is none to ask for."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'bits'"):
        Grid(bits=8)
    with pytest.raises(TypeError, match="bound"):
        Grid()


def test_numpy_numbers_are_numbers():
    """A learning rate often comes from an array."""
    assert policies.adamw(np.float32(1e-3)).learning_rate == np.float32(1e-3)
    assert Grid(bound=np.float64(0.5)).bound == 0.5


def plan_of(tree, lossy_option):
    """Policies by path of the leaf."""
    state = leaves.snapshot(tree, ALONE).leaves
    entries = [leaf.entry for leaf in state]
    found = lossy.plan(state, lossy_option)
    return {entries[index].name: resolved.policy for index, resolved in found.items()}


def test_the_first_pattern_that_fits_counts():
    """And leaves that none fits stay as they are."""
    tree = {"a": {"x": np.zeros(4, np.float32), "y": np.zeros(4, np.float32)}, "b": 1}
    fine, coarse = Grid(bound=1e-3), Grid(bound=1.0)
    assert plan_of(tree, {"a/x": fine, "a/*": coarse}) == {"a/x": fine, "a/y": coarse}
    assert plan_of(tree, {"a/x": Lossless(), "*/*": fine}) == {"a/y": fine}
    assert plan_of(tree, None) == {}


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(4, np.int32),
        np.zeros(4, bool),
        jax.random.key(0),
        np.zeros(4, np.float64),
        jnp.zeros(4, jnp.bfloat16),
        np.zeros(4, np.complex64),
        3,
        2.5,
        "text",
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", [Grid(bound=1.0), LogGrid(), Threshold(abs=1.0)])
def test_only_float32_is_ever_rounded(value, policy):
    """Integers, keys, booleans and all else refuse, whatever the pattern."""
    with pytest.raises(InvalidInputError, match=r"leaf a is .* is for float32"):
        plan_of({"a": value}, {"*": policy})


def test_a_pattern_that_fits_nothing_is_an_error():
    """It would be a silent no-op."""
    with pytest.raises(InvalidInputError, match=r"'opt/nu/\*', which no leaf fits"):
        plan_of({"a": np.zeros(4, np.float32)}, {"opt/nu/*": LogGrid()})


def test_a_threshold_is_refused_for_nu():
    """Where training would blow up."""
    tree = {"nu": {"w": np.ones(4, np.float32)}}
    with pytest.raises(InvalidInputError, match=r"nu/w is called nu.*Use LogGrid"):
        plan_of(tree, {"*": Threshold(abs=1e-6)})


def test_what_a_policy_refers_to_must_be_there():
    """By the key in its path."""
    tree = {"mu": {"w": np.ones(4, np.float32)}}
    with pytest.raises(InvalidInputError, match="no leaf whose path has 'nu'"):
        plan_of(tree, {"mu/*": RelativeTo(bound=0.1)})
    both = tree | {"nu": {"w": np.ones(4, np.float32)}}
    assert plan_of(both, {"mu/*": RelativeTo(bound=0.1)})


@pytest.mark.parametrize(
    "other",
    [
        np.ones(4, np.int32),
        np.ones(4, np.float64),
        jnp.ones(4, jnp.bfloat16),
        np.ones(5, np.float32),
        3,
    ],
    ids=str,
)
@pytest.mark.parametrize("cast", [True, False])
def test_what_a_policy_refers_to_is_float32_of_its_shape(other, cast):
    """Whether that has a policy or not."""
    value = jnp.ones(4, jnp.bfloat16) if cast else np.ones(4, np.float32)
    policy = CastOf(leaf="b", instead_of="a")
    if not cast:
        policy = RelativeTo(bound=0.1, leaf="b", instead_of="a")
    message = r"but leaf b is .*; expected float32 of shape \(4,\)"
    with pytest.raises(InvalidInputError, match=message):
        plan_of({"a": value, "b": other}, {"a": policy})


@pytest.mark.parametrize(
    "policy",
    [Threshold(abs=1.0), RelativeTo(bound=0.1, leaf="c", instead_of="b")],
)
def test_what_a_policy_refers_to_follows_from_its_value_alone(policy):
    """Not from what was stored before, nor from yet another leaf."""
    tree = {key: {"w": np.ones(4, np.float32)} for key in "abc"}
    relative = RelativeTo(bound=0.1, leaf="b", instead_of="a")
    message = "leaf a/w has the policy .* refers to has"
    with pytest.raises(InvalidInputError, match=message):
        plan_of(tree, {"a/*": relative, "b/*": policy})
    assert plan_of(tree, {"a/*": relative, "b/*": Grid(bound=1.0)})


# --- adamw --------------------------------------------------------------------------


def adam_state(*, chain=False, schedule=1e-3):
    """What mixed precision keeps, with a small leaf."""
    params = {"w": jnp.ones(SHAPE), "b": jnp.ones(8)}
    optimizer = optax.adamw(schedule)
    if chain:
        optimizer = optax.chain(optax.clip(1.0), optimizer)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    return {"half": half, "master": params, "opt": optimizer.init(params), "step": 3}


@pytest.mark.parametrize("chain", [False, True])
def test_adam_is_found_by_structure(chain):
    """Moments, weights and their copies; small leaves stay exact."""
    found = plan_of(adam_state(chain=chain), policies.adamw(1e-3))
    place = "opt/1/0" if chain else "opt/0"
    assert {name: type(policy) for name, policy in found.items()} == {
        "half/w": CastOf,
        "master/w": Grid,
        f"{place}/mu/w": RelativeTo,
        f"{place}/nu/w": LogGrid,
    }
    assert found["master/w"].bound == 1e-3


def test_what_adamw_is_asked_for():
    """Exact weights, exact copies, other bounds."""
    tree = adam_state()
    exact = plan_of(tree, policies.adamw(1e-3, weights=0))
    assert set(exact) == {"opt/0/mu/w", "opt/0/nu/w"}
    copies = plan_of(tree, policies.adamw(1e-3, weights=0.5, copies="exact"))
    assert set(copies) == {"master/w", "opt/0/mu/w", "opt/0/nu/w"}
    assert copies["master/w"].bound == 5e-4
    narrow = plan_of(tree, policies.adamw(1e-3, weights="bfloat16"))
    assert narrow["master/w"] == Narrow()
    assert "half/w" not in narrow
    all_leaves = plan_of(tree, policies.adamw(1e-3, least_elements=1, mu=0.1))
    assert all_leaves["opt/0/mu/b"] == RelativeTo(bound=0.1)


def test_a_schedule_is_asked_with_adams_count():
    """The rate in force, not the one of another phase."""
    schedule = optax.linear_schedule(1e-2, 0.0, 100)
    tree = adam_state(schedule=schedule)
    for count, bound in ((0, 1e-2), (50, 5e-3)):
        adam = tree["opt"][0]._replace(count=jnp.int32(count))
        now = tree | {"opt": (adam, *tree["opt"][1:])}
        found = plan_of(now, policies.adamw(schedule))
        assert found["master/w"].bound == pytest.approx(bound)
    adam = tree["opt"][0]._replace(count=jnp.int32(100))
    found = plan_of(tree | {"opt": (adam,)}, policies.adamw(schedule))
    assert set(found) == {"opt/0/mu/w", "opt/0/nu/w"}  # nothing is learned any more


def test_whose_moments_they_are_must_be_plain():
    """An average ends as the weights do; it is not theirs to round."""
    tree = adam_state()
    tree["average"] = tree["master"]
    with pytest.raises(
        InvalidInputError, match=r"average/w, master/w end alike.*adamw\(master="
    ):
        plan_of(tree, policies.adamw(1e-3))
    found = plan_of(tree, policies.adamw(1e-3, master="master/*"))
    assert "average/w" not in found
    assert "master/w" in found


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.rmsprop(1e-3, centered=True),
        optax.amsgrad(1e-3),
        optax.sgd(1e-3, momentum=0.9),
    ],
)
def test_what_is_not_adam_is_not_taken_for_it(optimizer):
    """Mean and mean of squares are no moments; nu_max is no weight."""
    params = {"w": jnp.ones(SHAPE)}
    with pytest.raises(InvalidInputError, match="found no moments of Adam"):
        plan_of({"p": params, "opt": optimizer.init(params)}, policies.adamw(1e-3))


def test_modules_called_mu_and_nu_stay_exact():
    """As parameters they are weights, not moments."""
    params = {"mu": {"w": jnp.ones(SHAPE)}, "nu": {"w": jnp.ones(SHAPE)}}
    tree = {"params": params, "opt": optax.adam(1e-3).init(params)}
    found = plan_of(tree, policies.adamw(1e-3))
    assert {name: type(policy) for name, policy in found.items()} == {
        "params/mu/w": Grid,
        "params/nu/w": Grid,
        "opt/0/mu/mu/w": RelativeTo,
        "opt/0/mu/nu/w": RelativeTo,
        "opt/0/nu/mu/w": LogGrid,
        "opt/0/nu/nu/w": LogGrid,
    }


def test_what_else_an_optimizer_keeps_stays_exact():
    """Gradients that gather, averages in a chain; also where weights are elsewhere."""
    params = {"w": jnp.ones(SHAPE)}
    adam = optax.chain(optax.adam(1e-3), optax.ema(0.9))
    steps = optax.MultiSteps(adam, 4).init(params)
    moments = {"inner_opt_state/0/0/mu/w", "inner_opt_state/0/0/nu/w"}
    assert set(plan_of(steps, policies.adamw(1e-3))) == moments
    for tree, master in (
        ({"params": params, "opt": steps}, "params/w"),
        ((params, adam.init(params)), "0/w"),
    ):
        found = plan_of(tree, policies.adamw(1e-3))
        assert len(found) == 3
        assert isinstance(found[master], Grid)


def test_a_schedule_may_be_any_object():
    """It is asked, and not looked into."""

    class Schedule:
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, count):
            return 1e-3

    options = DeltaOptions(lossy=policies.adamw(Schedule()))
    assert "schedule" in options.recorded()["lossy"]
    assert plan_of(adam_state(), options.lossy)["master/w"].bound == 1e-3


def test_several_models_each_have_their_own():
    """Each optimizer's weights are those beside it."""
    one = {"params": {"w": jnp.ones(SHAPE)}}
    tree = {name: one | {"opt": optax.adam(1e-3).init(one["params"])} for name in "ab"}
    found = plan_of(tree, policies.adamw(1e-3))
    assert {"a/params/w", "b/params/w"} < set(found)


def test_ten_thousand_leaves_are_resolved_at_once():
    """The caller waits for it: nothing is looked for by looking at all leaves."""
    small = {f"{i:05d}": np.ones(2, np.float32) for i in range(3_000)}
    tree = {"master": small, "opt": {"mu": small, "nu": small, "count": 3}}
    state = leaves.snapshot(tree, ALONE).leaves
    calls = 0

    class Counting(tuple):
        def __getitem__(self, key):
            nonlocal calls
            calls += 1
            return super().__getitem__(key)

    adam = lossy._Adam(state, policies.adamw(1e-3, least_elements=1))
    adam._entries = Counting(adam._entries)
    assert len(adam.plan()) == 9_000
    assert calls < 20 * 9_000


def test_a_state_without_adam_is_an_error():
    """It would be a silent no-op."""
    with pytest.raises(InvalidInputError, match="found no moments of Adam"):
        plan_of({"a": np.zeros(4, np.float32)}, policies.adamw(1e-3))


@pytest.mark.parametrize(
    "rate",
    [
        lambda count: float("nan"),
        lambda count: -1.0,
        lambda count: None,
        lambda count: np.ones(2),
    ],
)
def test_a_schedule_that_gives_no_rate_is_an_error(rate):
    """Before anything is written."""
    with pytest.raises(InvalidInputError, match="expected a learning rate"):
        plan_of(adam_state(), policies.adamw(rate))


def test_policies_are_recorded():
    """What a step says of its options is JSON; a schedule has no JSON."""
    options = DeltaOptions(lossy=policies.adamw(lambda count: 1e-3))
    assert '"learning_rate": "schedule"' in options.recorded()["lossy"]
    options = DeltaOptions(lossy={"a/*": Grid(bound=0.5)})
    assert options.shared()["lossy"] == [
        ["a/*", {"policy": "Grid", "bound": 0.5, "dither": True}]
    ]
    assert orbax_delta.DeltaOptions().recorded()["lossy"] is None
