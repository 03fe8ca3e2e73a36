"""Leaves within a bound: it holds at every step, whatever was saved or deleted."""

import shutil

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import second_reader
import strategies
from strategies import open_run, read_step

import orbax_delta
from orbax_delta import check, cli, codecs, following, policies
from orbax_delta.codecs import Form
from orbax_delta.errors import InvalidInputError
from orbax_delta.policies import (
    CastOf,
    Grid,
    LogGrid,
    Lossless,
    Narrow,
    RelativeTo,
    Threshold,
)

ELEMENTS = 3000
SMALL = {"chunk_bytes": 4096, "pack_bytes": 16 << 10, "full_every": 3, "threads": 1}
EPSILON = 1e-8

MASTER, MU, OCTAVES, MOVED = 1e-3, 0.2, 1.0, 1e-2
POLICIES = {
    "master": Grid(bound=MASTER),
    "mu/*": RelativeTo(bound=MU, floor=EPSILON),
    "nu/*": LogGrid(octaves=OCTAVES),
    "lazy": Threshold(abs=MOVED, rel=1e-3),
    "half": CastOf(leaf="master", instead_of="half"),
}


@pytest.fixture(autouse=True, scope="module")
def _unsynced():
    with pytest.MonkeyPatch.context() as monkeypatch:
        strategies.skip_disk_sync(monkeypatch)
        yield


def first_state(seed):
    """Moments, weights and their copy, and a leaf that moves now and then."""
    rng = np.random.default_rng(seed)
    nu = (rng.standard_normal(ELEMENTS) ** 2 * 1e-4).astype(np.float32)
    nu[:5] = 0
    master = rng.standard_normal(ELEMENTS).astype(np.float32)
    return with_copy(
        {
            "master": master,
            "mu": {"w": (rng.standard_normal(ELEMENTS) * np.sqrt(nu)).astype("f4")},
            "nu": {"w": nu},
            "lazy": rng.standard_normal(ELEMENTS).astype(np.float32),
            "exact": rng.standard_normal(700).astype(np.float32),
            "count": 0,
        }
    )


def with_copy(state):
    """With the bf16 copy that computes."""
    return state | {"half": state["master"].astype(ml_dtypes.bfloat16)}


def trained(state, seed, moved):
    """The state after a step in which weights move by about this."""
    rng = np.random.default_rng(seed)

    def noise(scale=1.0):
        return (rng.standard_normal(ELEMENTS) * scale).astype(np.float32)

    gradient = noise(1e-2)
    nu = (np.float32(0.95) * state["nu"]["w"] + np.float32(0.05) * gradient**2).astype(
        "f4"
    )
    nu[:5] = 0
    mu = (np.float32(0.9) * state["mu"]["w"] + np.float32(0.1) * gradient).astype("f4")
    mu[:5] = 0
    return with_copy(
        state
        | {
            "master": state["master"] + noise(moved),
            "mu": {"w": mu},
            "nu": {"w": nu},
            "lazy": state["lazy"] + noise(MOVED / 3) * (rng.random(ELEMENTS) < 0.3),
            "count": state["count"] + 1,
        }
    )


def check_bounds(found, true, *, exact=False):
    """Every leaf is within its bound, those without one are equal bit for bit."""
    if exact:
        jax.tree.map(check_equal, found, true)
        return
    check_equal(found["exact"], true["exact"])
    assert found["count"] == true["count"]
    check_within(found["master"], true["master"], MASTER)
    nu, true_nu = found["nu"]["w"], true["nu"]["w"]
    with np.errstate(invalid="ignore"):
        room = np.maximum(true_nu.astype(np.float64), 2.0**-126) * OCTAVES / 2
        check_within(nu, true_nu, np.where(np.isfinite(room), room, 0))
        scale = np.sqrt(nu) + np.float32(EPSILON)
        check_within(found["mu"]["w"], true["mu"]["w"], MU * scale.astype(np.float64))
    assert ((nu == 0) == (true_nu == 0)).all()
    assert not (nu < 0).any() or (true_nu < 0).any()
    lazy = true["lazy"].astype(np.float64)
    check_within(found["lazy"], true["lazy"], np.maximum(MOVED, 1e-3 * np.abs(lazy)))
    # The copy is one of what is restored, or it is what it was.
    copies = found["master"].astype(ml_dtypes.bfloat16).view(np.uint16)
    half = found["half"].view(np.uint16)
    boxes = np.arange(ELEMENTS) // 1000
    for box in np.unique(boxes):
        one = boxes == box
        same = (half[one] == copies[one]).all()
        assert same or (half[one] == true["half"].view(np.uint16)[one]).all()


def check_equal(found, true):
    """Bits, of arrays and numbers."""
    found, true = np.asarray(found), np.asarray(true)
    assert found.tobytes() == true.tobytes()


def check_within(found, true, bound):
    """Every element, but for those that have to be equal, bit for bit."""
    with np.errstate(invalid="ignore"):
        moved = np.abs(np.subtract(found, true, dtype=np.float64))
        equal = found.view(np.uint32) == true.view(np.uint32)
        assert ((moved <= bound) | equal).all()


def awkward(state, where, what):
    """A state with something that no grid holds."""
    leaf = {"nu": state["nu"]["w"], "mu": state["mu"]["w"]}.get(where)
    leaf = state[where] if leaf is None else leaf
    changed = leaf.copy()
    changed[::500] = what
    if where in ("nu", "mu"):
        return state | {where: {"w": changed}}
    return with_copy(state | {where: changed})


AWKWARD = st.tuples(
    st.sampled_from(["master", "mu", "nu", "lazy"]),
    st.sampled_from([np.nan, np.inf, -np.inf, 1e-40, 1e38, -1e-30, -0.0, 0.0]),
)

ACTIONS = st.one_of(
    st.tuples(st.just("save"), st.sampled_from([0.0, 1e-5, 1e-3, 1e-2])),
    st.tuples(st.just("save awkward"), AWKWARD),
    st.tuples(st.just("save exactly"), st.none()),
    st.tuples(st.just("save without policies"), st.none()),
    st.tuples(st.just("restore"), st.integers(0, 9)),
    st.tuples(st.just("delete"), st.integers(0, 9)),
    st.tuples(st.just("same again"), st.none()),
)


@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    max_examples=12,
)
@hypothesis.given(
    st.integers(0, 999),
    st.lists(ACTIONS, min_size=3, max_size=9),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from(["auto", "keep", "store"]),
)
def test_the_bound_holds_at_every_step(
    tmp_path, seed, actions, full_every, max_chain, base
):
    """Whatever is saved, restored and deleted in between, and however it is cut."""
    root = tmp_path / "run"
    shutil.rmtree(root, ignore_errors=True)
    options = SMALL | {"full_every": full_every, "max_chain": max_chain, "base": base}
    kept: dict[int, tuple] = {}
    state, step = first_state(seed), 0
    lossy = POLICIES
    for action, value in [("save", 0.0), *actions]:
        with open_run(root, lossy=lossy, refresh_every=4, **options) as run:
            if action == "restore" and kept:
                chosen = sorted(kept)[value % len(kept)]
                state = run.restore(chosen)
                check_bounds(state, kept[chosen][0], exact=kept[chosen][1])
            if action == "delete" and len(kept) > 1:
                chosen = sorted(kept)[value % len(kept)]
                run.manager.delete(chosen)
                del kept[chosen]
                continue
        lossless = action == "save without policies"
        with open_run(
            root, lossy=None if lossless else lossy, refresh_every=4, **options
        ) as run:
            if step and action != "restore":
                run.restore(max(kept))  # the next save goes on from there
            if action == "save":
                state = trained(state, seed + step, value)
            saved = awkward(state, *value) if action == "save awkward" else state
            exact = action == "save exactly"
            arguments = orbax_delta.DeltaSave(saved, exact=exact)
            # Two in a row: the second is a delta in the same life.
            for _ in range(2):
                assert run.manager.save(step, args=arguments)
                run.manager.wait_until_finished()
                kept[step] = saved, exact or lossless
                step += 1
    with open_run(root, **options) as run:
        for number, (true, exact) in kept.items():
            found = run.restore(number)
            check_bounds(found, true, exact=exact)
            second = second_reader.read_step(root / str(number) / "default")
            assert second["master",].data == np.asarray(found["master"]).tobytes()
    assert check.verify(str(root)).ok


# --- what is written ----------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    """A folder for a run."""
    return tmp_path / "run"


def forms_of(root, step, leaf):
    """Forms of the lists of a leaf's chunks."""
    opened = read_step(root, step)
    names = [entry.name for entry in opened.manifest.leaves]
    return [
        tuple(ref.form for ref in row.refs)
        for row in opened.rows
        if names[row.leaf] == leaf
    ]


def test_which_forms_are_written(root):
    """Grids and changes of codes; mu after the records of nu; copies take nothing."""
    state = first_state(0)
    with open_run(root, lossy=POLICIES, **SMALL) as run:
        run.save(0, state)
        run.save(1, trained(state, 1, 1e-5))
        assert not run.handler.last_save_report.lossy["master"]["exact_chunks"]
    assert set(forms_of(root, 0, "master")) == {(Form.GRID,)}
    assert set(forms_of(root, 1, "nu/w")) == {(Form.GRID, Form.GRID_CHANGE)}
    assert set(forms_of(root, 1, "mu/w")) == {
        (Form.GRID, Form.GRID_CHANGE, Form.RELATIVE)
    }
    assert forms_of(root, 1, "half") == forms_of(root, 1, "master")
    assert read_step(root, 1).manifest.required_features == ["lossy"]


def test_states_without_policies_need_no_feature(root):
    """Older readers read them."""
    with open_run(root, **SMALL) as run:
        run.save(0, first_state(0))
    manifest = read_step(root, 0).manifest
    assert list(manifest.required_features) == []
    assert manifest.lossy == {}


def test_what_builds_on_a_grid_needs_the_feature(root):
    """Also where no leaf has a policy any more."""
    state = first_state(0)
    with open_run(root, lossy=POLICIES, **SMALL) as run:
        run.save(0, state)
    with open_run(root, **SMALL) as run:
        restored = run.restore(0)
        run.save(1, restored)
        found = run.restore(1)
    jax.tree.map(check_equal, found, restored)
    manifest = read_step(root, 1).manifest
    assert manifest.required_features == ["lossy"]
    assert manifest.lossy == {}


def test_saving_what_was_restored_changes_nothing(root):
    """Within one life; after a restore the grid is another, and so are the values."""
    with open_run(root, lossy=POLICIES, **SMALL) as run:
        run.save(0, first_state(0))
        run.save(1, first_state(0))
        report = run.handler.last_save_report
        assert set(report.chunks_by_form) <= {"reference", "derived", "constant"}
        restored = run.restore(1)
        run.save(2, restored)
        again = run.restore(2)
    assert (again["master"] != restored["master"]).any()
    check_bounds(again, restored)


def test_reports_and_show_say_what_is_lossy(root, capsys):
    """Bounds, errors and names; a restore says which leaves are reconstructions."""
    state = first_state(0)
    with open_run(root, lossy=POLICIES, **SMALL) as run:
        run.save(0, state)
        errors = run.handler.last_save_report.lossy
        found = run.restore(0)
        report = run.handler.last_restore_report
    assert set(errors) == {"master", "mu/w", "nu/w", "lazy", "half"}
    moved = np.abs(np.subtract(found["master"], state["master"], dtype=np.float64))
    master = errors["master"]
    assert master["bound"] == MASTER
    assert master["largest"] == moved.max() <= MASTER
    assert master["rms"] == pytest.approx(np.sqrt((moved**2).mean()))
    assert master["elements"] == ELEMENTS
    assert set(report.lossy_leaves) == set(errors)
    assert "5 leaves within bounds, not bit for bit" in report.line()
    assert cli.main(["show", str(root), "0"]) == 0
    shown = capsys.readouterr().out
    assert "RelativeTo" in shown
    assert f"{master['largest']:.3g}" in shown
    assert orbax_delta.save_report(root / "0").lossy == errors


def test_an_exact_save_is_one_argument(root):
    """The last one of a run, in the middle of others."""
    state = first_state(0)
    with open_run(root, lossy=POLICIES, **SMALL) as run:
        run.save(0, state)
        run.manager.save(1, args=orbax_delta.DeltaSave(state, exact=True))
        run.manager.wait_until_finished()
        run.save(2, state)
        for step in range(3):
            check_bounds(run.restore(step), state, exact=step == 1)
        assert run.handler.last_restore_report.lossy_leaves
        run.restore(1)
        assert not run.handler.last_restore_report.lossy_leaves


def test_exact_is_a_bool():
    """A word that is not meant does not decide about bits."""
    args = orbax_delta.DeltaSave({}, exact="no")
    with pytest.raises(InvalidInputError, match=r"DeltaSave\.exact is 'no'"):
        args.options(orbax_delta.DeltaOptions())


def test_a_leaf_may_change_its_policy(root):
    """Each save obeys its own options; deltas across grids are as good as any."""
    state = first_state(0)
    fine, coarse = Grid(bound=1e-4), Grid(bound=1e-1, dither=False)
    lazy = Threshold(abs=1e-2)
    for step, policy in enumerate([fine, coarse, Lossless(), lazy, fine]):
        with open_run(root, lossy={"master": policy}, **SMALL) as run:
            if step:
                run.restore(step - 1)
            run.save(step, state)
            found = run.restore(step)["master"]
        check_within(found, state["master"], policy.bound)
        exact = policy in (Lossless(), lazy)  # nothing has moved since it was exact
        assert exact == bool((found == state["master"]).all())
    assert check.verify(str(root)).ok


def test_what_no_grid_holds_is_stored_exactly(root):
    """By chunks: NaN, infinities, negative nu, values of too many steps."""
    state = first_state(0)
    odd = state["master"].copy()
    odd[0], odd[1] = np.nan, 1e30
    nu = state["nu"]["w"].copy()
    nu[7] = -1e-6
    state = with_copy(state | {"master": odd, "nu": {"w": nu}})
    with open_run(root, lossy=POLICIES, **SMALL) as run:
        run.save(0, state)
        errors = run.handler.last_save_report.lossy
        found = run.restore(0)
    assert errors["master"]["exact_chunks"] == 1
    assert errors["nu/w"]["exact_chunks"] == 1
    assert errors["half"]["exact_chunks"] == 1
    check_equal(found["master"][:1000], odd[:1000])
    check_equal(found["half"][:1000], state["half"][:1000])
    check_bounds(found, state)


@pytest.mark.parametrize("base", ["auto", "keep", "store"])
def test_a_threshold_catches_up(root, base):
    """Small moves are dropped until they add up, against what is stored."""
    value = np.linspace(1, 2, ELEMENTS).astype(np.float32)
    lossy = {"*": Threshold(abs=0.1)}
    changed, true = [], {}
    with open_run(root, lossy=lossy, base=base, refresh_every=5, **SMALL) as run:
        for step in range(9):
            run.save(step, {"w": value})
            changed.append(run.handler.last_save_report.elements_changed)
            true[step] = value
            value = value + np.float32(0.03)
        for step, wanted in true.items():
            check_within(run.restore(step)["w"], wanted, 0.1)
    # 0.03, 0.06 and 0.09 are dropped, 0.12 is not; and so on.
    assert changed == [ELEMENTS, 0, 0, 0, ELEMENTS, 0, 0, 0, ELEMENTS]
    with open_run(root, lossy=lossy, base=base, **SMALL) as run:
        found = run.restore(8)["w"]
        for step in range(9, 12):
            run.save(step, {"w": found + np.float32(0.03 * (step - 9))})
            changed.append(run.handler.last_save_report.elements_changed)
    assert changed[-3:] == [0, 0, 0]


def test_a_threshold_does_not_hold_what_is_infinite(root):
    """However wide it is."""
    value = np.ones(ELEMENTS, np.float32)
    with open_run(root, lossy={"*": Threshold(abs=1.0, rel=1.0)}, **SMALL) as run:
        run.save(0, {"w": value})
        value = value.copy()
        value[::7] = np.inf
        value[3] = np.nan
        run.save(1, {"w": value})
        found = run.restore(1)["w"]
    check_equal(found[::7], value[::7])
    assert np.isnan(found[3])


def test_large_leaves_of_every_policy(root):
    """Compiled passes, and more than one batch of chunks."""
    rng = np.random.default_rng(0)
    count = (3 << 20) // 4 + 77
    nu = (rng.standard_normal(count) ** 2).astype(np.float32)
    state = {
        "master": rng.standard_normal(count).astype(np.float32),
        "mu": {"w": (rng.standard_normal(count) * np.sqrt(nu)).astype(np.float32)},
        "nu": {"w": nu},
        "lazy": rng.standard_normal(count).astype(np.float32),
    }
    state["half"] = state["master"].astype(ml_dtypes.bfloat16)
    true = {}
    with open_run(root, lossy=POLICIES, base="keep") as run:
        for step in range(3):
            run.save(step, state)
            true[step] = state
            moved = rng.standard_normal(count).astype(np.float32)
            master = state["master"] + moved * np.float32(1e-3)
            state = state | {
                "master": master,
                "mu": {"w": state["mu"]["w"] * np.float32(0.9)},
                "nu": {"w": state["nu"]["w"] * np.float32(0.97)},
                "lazy": state["lazy"] + moved * np.float32(MOVED / 2),
                "half": master.astype(ml_dtypes.bfloat16),
            }
        for step, wanted in true.items():
            found = run.restore(step)
            check_within(found["master"], wanted["master"], MASTER)
            scale = np.sqrt(found["nu"]["w"]) + np.float32(EPSILON)
            check_within(found["mu"]["w"], wanted["mu"]["w"], MU * np.float64(scale))
            room = np.float64(wanted["nu"]["w"]) / 2
            check_within(found["nu"]["w"], wanted["nu"]["w"], room)
            lazy = np.maximum(MOVED, 1e-3 * np.abs(np.float64(wanted["lazy"])))
            check_within(found["lazy"], wanted["lazy"], lazy)
            check_equal(found["half"], found["master"].astype(ml_dtypes.bfloat16))
    assert check.verify(str(root)).ok


def test_lists_leave_room_for_the_record_of_another_chunk(root):
    """That of mu comes after all of nu's, and no list is longer than allowed."""
    options = SMALL | {"full_every": 9, "max_chain": 4, "read_budget": 100.0}
    state = first_state(0)
    with open_run(root, lossy=POLICIES, **options) as run:
        for step in range(9):
            run.save(step, state)
            state = trained(state, step, 1e-5)
    longest = [max(map(len, forms_of(root, step, "mu/w"))) for step in range(9)]
    assert max(longest) == 4
    assert check.verify(str(root)).ok


def test_a_fine_bound_relative_to_another_leaf_is_kept_on_its_grid(root):
    """float32 rounds far less than a step there, and there is room for that."""
    rng = np.random.default_rng(0)
    nu = (rng.standard_normal(ELEMENTS) ** 2).astype(np.float32)
    mu = (rng.standard_normal(ELEMENTS) * np.sqrt(nu)).astype(np.float32)
    for bound in (1e-2, 1e-3, 1e-4):
        lossy = {"mu": RelativeTo(bound=bound)}
        with open_run(root / str(bound), lossy=lossy, **SMALL) as run:
            run.save(0, {"mu": mu, "nu": nu})
            assert not run.handler.last_save_report.lossy["mu"]["exact_chunks"]


def test_where_the_other_chunk_is_not_at_hand(root):
    """Cut otherwise, a leaf is exact, and the report says so."""
    placed = np.ones((64, 32), np.float32)
    tree = {
        "mu": strategies.sharded(placed, (4,), "x", "x"),
        "nu": strategies.sharded(placed * 2, (4,), "x", None, "x"),
    }
    with open_run(root, lossy={"mu": RelativeTo(bound=0.1)}, **SMALL) as run:
        run.save(0, tree)
        errors = run.handler.last_save_report.lossy["mu"]
        check_equal(run.restore(0)["mu"], placed)
    assert errors["exact_chunks"] == 4
    assert errors["elements"] == placed.size


def test_damage_of_nu_is_healed_for_mu_too(root):
    """Both lists name its record; another base has the same content."""
    state = first_state(0)
    with open_run(root, lossy=POLICIES, keep_bases=2, **SMALL) as run:
        run.save(0, state)
        found = run.restore(0)
    row = next(
        row
        for row in read_step(root, 0).rows
        if any(ref.form is Form.RELATIVE for ref in row.refs)
    )
    pack = root / strategies.STORE / "packs" / row.refs[0].pack
    data = bytearray(pack.read_bytes())
    data[row.refs[0].offset + 40] ^= 1
    pack.write_bytes(data)
    report = check.verify(str(root))
    assert {problem.leaf for problem in report.problems} >= {"mu/w", "nu/w"}
    with open_run(root, lossy=POLICIES, **SMALL) as run:
        with pytest.raises(orbax_delta.CorruptionError, match=r"mu/w|nu/w"):
            run.restore(0)
        run.save(1, state)
        check_bounds(run.restore(1), state)
    assert found["count"] == 0


def test_deltas_build_on_what_was_decoded(root):
    """An open loop, against the true state before, would drift away."""
    state = {"w": np.random.default_rng(0).standard_normal(ELEMENTS).astype("f4")}
    with open_run(root, lossy={"w": Grid(bound=0.1)}, **SMALL) as run:
        for step in range(12):
            run.save(step, state)
            rng = np.random.default_rng(step)
            moved = rng.standard_normal(ELEMENTS).astype("f4") * np.float32(0.05)
            state = {"w": state["w"] + moved}
        lengths = {len(forms) for forms in forms_of(root, 11, "w")}
    assert max(lengths) > 1
    with open_run(root) as run:
        true = np.random.default_rng(0).standard_normal(ELEMENTS).astype("f4")
        for step in range(12):
            check_within(run.restore(step)["w"], true, 0.1)
            rng = np.random.default_rng(step)
            true = true + rng.standard_normal(ELEMENTS).astype("f4") * np.float32(0.05)


@pytest.mark.parametrize("dither", [True, False])
def test_the_grid_trap(root, dither):
    """What moves by less than half a step between restores still gets on."""
    bound, moves = 0.1, 40
    value = np.zeros(ELEMENTS, np.float32)
    with open_run(root, lossy={"w": Grid(bound=bound, dither=dither)}, **SMALL) as run:
        run.save(0, {"w": value})
        for step in range(1, moves + 1):
            value = run.restore(step - 1)["w"] + np.float32(bound / 10)
            run.save(step, {"w": value})
        reached = float(run.restore(moves)["w"].mean())
    whole = moves * bound / 10
    if dither:
        assert reached == pytest.approx(whole, rel=0.1)
    else:
        assert reached < 0.1 * whole  # caught: each restore rounds it back


def test_nu_is_not_underestimated(root):
    """On average it comes back a little too large, never too small."""
    rng = np.random.default_rng(0)
    nu = np.exp(rng.uniform(-40, 0, 60_000)).astype(np.float32)
    with open_run(root, lossy={"nu/w": LogGrid()}) as run:
        run.save(0, {"nu": {"w": nu}})
        found = run.restore(0)["nu"]["w"]
    ratio = found.astype(np.float64) / nu
    assert ratio.min() > 0.66
    assert 1.0 <= ratio.mean() < 1.06


def test_a_bound_of_a_power_of_two_has_room_for_rounding(root):
    """float32 rounds at the bound; no chunk is stored exactly for that."""
    value = np.random.default_rng(0).uniform(-8, 8, 300_000).astype(np.float32)
    with open_run(root, lossy={"w": Grid(bound=2.0**-10)}) as run:
        run.save(0, {"w": value})
        errors = run.handler.last_save_report.lossy["w"]
        check_within(run.restore(0)["w"], value, 2.0**-10)
    assert errors["exact_chunks"] == 0
    assert errors["largest"] > 0.8 * 2.0**-10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_a_narrower_type(root, dtype):
    """Their copies are exact, and take nothing; what does not fit is exact."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(ELEMENTS).astype(np.float32)
    weights[1000] = 3e38  # no float16 comes near it
    weights[2000] = np.nan
    with np.errstate(over="ignore"):
        state = {"w": weights, "half": weights.astype(dtype)}
    with open_run(root, lossy={"w": Narrow(dtype=dtype)}, **SMALL) as run:
        run.save(0, state)
        report = run.handler.last_save_report
        found = run.restore(0)
    exact = 1 + (dtype == "float16")
    assert report.lossy["w"]["exact_chunks"] == exact
    check_within(found["w"], weights, np.abs(weights) * Narrow(dtype=dtype).bound)
    check_equal(found["half"], state["half"])
    assert report.chunks_by_form["derived"] == 3 - 1  # not the one with a NaN
    check_equal(found["w"][2000:], weights[2000:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_changes_of_narrower_weights_are_small(root, dtype):
    """They move by few of that type's steps; signs of zeros are kept."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(ELEMENTS).astype(np.float32)
    weights[::7] = -0.0
    moved = np.where(weights == 0, weights, weights * np.float32(1.01))
    with open_run(root, lossy={"w": Narrow(dtype=dtype)}, **SMALL) as run:
        run.save(0, {"w": weights})
        run.save(1, {"w": moved})
        report = run.handler.last_save_report
        found = run.restore(1)
    assert set(forms_of(root, 0, "w")) == {(Form.PLANES,)}
    assert set(forms_of(root, 1, "w")) == {(Form.PLANES, Form.GRID_CHANGE)}
    assert report.bytes_by_form["grid_change"] < ELEMENTS
    check_equal(found["w"], moved.astype(dtype).astype(np.float32))
    second = second_reader.read_step(root / "1" / "default")
    assert second["w",].data == found["w"].tobytes()


def test_without_room_in_the_other_list_mu_stands_for_itself(root, monkeypatch):
    """It is rounded as ever, and coded as words."""
    monkeypatch.setattr(following, "_leaves_room", lambda source: False)
    state = first_state(0)
    with open_run(root, lossy=POLICIES, **SMALL) as run:
        run.save(0, state)
        check_bounds(run.restore(0), state)
    assert set(forms_of(root, 0, "mu/w")) == {(Form.PLANES,)}


def test_a_list_that_continues_another_goes_on_from_there(root, monkeypatch):
    """What nu's records decode to is not decoded again for mu."""
    state = first_state(0)
    decoded = []
    real = codecs.decode

    def counting(form, *args):
        decoded.append(form)
        return real(form, *args)

    with open_run(root, lossy=POLICIES, **SMALL) as run:
        run.save(0, state)
        run.save(1, trained(state, 1, 1e-5))
        monkeypatch.setattr(codecs, "decode", counting)
        run.restore(1)
    chunks = len(forms_of(root, 1, "mu/w"))
    assert decoded.count(Form.RELATIVE) == chunks
    assert decoded.count(Form.GRID) == 2 * chunks  # of master and of nu


def test_sharded_states_and_other_meshes(root):
    """Chunks are rounded where they lie; a restore on another mesh is the same."""
    state = first_state(3)
    master = state["master"][:2048].reshape(64, 32)
    placed = strategies.sharded(master, (4, 2), "xy", "x", "y")
    tree = {"mu": {"w": placed}, "nu": {"w": jnp.abs(placed)}, "master": placed}
    lossy = {k: v for k, v in POLICIES.items() if k in ("master", "mu/*", "nu/*")}
    other = jax.ShapeDtypeStruct(
        (64, 32), np.float32, sharding=strategies.sharding_of((2,), "z", None, "z")
    )
    with open_run(root, lossy=lossy, **SMALL) as run:
        run.save(0, tree)
        assert "relative" in run.handler.last_save_report.chunks_by_form
        here = run.restore(0, jax.tree.map(lambda _: other, tree))
        plain = run.restore(0)
    for found, true in zip(jax.tree.leaves(here), jax.tree.leaves(plain), strict=True):
        check_equal(found, true)
    check_within(np.asarray(here["master"]), np.asarray(master), MASTER)


def test_adamw_on_a_real_optimizer(root):
    """Found in optax's own state, and trained on from what is restored."""
    params = {"w": jnp.ones((160, 128)) * 0.1}
    optimizer = optax.adamw(1e-3)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, key):
        gradient = jax.tree.map(lambda w: w + jax.random.normal(key, w.shape), params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for number in range(5):
        params, opt_state = step(params, opt_state, jax.random.key(number))
    state = {
        "half": jax.tree.map(lambda w: w.astype(jnp.bfloat16), params),
        "params": params,
        "opt": opt_state,
    }
    with open_run(root, lossy=policies.adamw(1e-3)) as run:
        run.save(0, state)
        found = run.restore(0, jax.tree.map(jnp.zeros_like, state))
        report = run.handler.last_save_report
    assert report.times_smaller > 6
    check_equal(found["half"]["w"], found["params"]["w"].astype(jnp.bfloat16))
    check_within(np.asarray(found["params"]["w"]), np.asarray(params["w"]), 1e-3)
    again, _ = step(found["params"], found["opt"], jax.random.key(9))
    assert np.isfinite(np.asarray(again["w"])).all()


def test_bad_policies_change_nothing_on_disk(root):
    """They are refused when save is called."""
    manager_options = strategies.refusing_options()
    with open_run(
        root, manager_options=manager_options, lossy={"nothing": Grid(bound=1.0)}
    ) as run:
        with pytest.raises(InvalidInputError, match="'nothing', which no leaf fits"):
            run.manager.save(0, args=orbax_delta.DeltaSave({"w": np.zeros(3, "f4")}))
        assert not list(root.glob("*/default/*"))
        assert not (root / strategies.STORE).exists()


def test_forms_on_grids_are_full_or_deltas():
    """GRID begins a list, the others do not."""
    full = {form for form in codecs.GRID_FORMS if form.is_full}
    assert full == {Form.GRID}
