"""Policies as values: what they say, how they combine, what jax gets."""

import json

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rematted import MODES, bytes_kept, mode

import remat_policies as rp
from remat_policies import blocknames
from remat_policies.policies import Policy

some_names = st.sets(st.sampled_from("abcdef"))


@st.composite
def policies(draw):
    """Any policy of names."""
    save = draw(some_names)
    offload = draw(some_names) - save
    return rp.names(save=save, offload=offload)


@given(policies())
def test_a_policy_survives_json(policy):
    """Equal, and so the same policy for jax: nothing is compiled again."""
    again = rp.from_json(policy.to_json())
    assert again == policy
    assert hash(again) == hash(policy)
    assert again.jax_policy() is policy.jax_policy()


@given(policies(), policies())
def test_any_of_keeps_what_one_keeps(one, two):
    """On the device if one of them does."""
    both = rp.any_of(one, two)
    assert set(both.save) == {*one.save, *two.save}
    assert set(both.offload) == {*one.offload, *two.offload} - set(both.save)


@given(policies(), policies())
def test_all_of_keeps_what_both_keep(one, two):
    """On the host if one of them does."""
    both = rp.all_of(one, two)
    assert set(both.keeps) == set(one.keeps) & set(two.keeps)
    assert set(both.save) == set(one.save) & set(two.save)


def test_none_and_full_are_the_ends():
    """Of any order of memory: nothing is more than `none` or less than `full`."""
    none, full, minimal = map(rp.preset, ("none", "full", "minimal"))
    assert rp.any_of(none, minimal) == none
    assert rp.all_of(none, none) == none
    assert set(rp.all_of(none, minimal).save) == set(minimal.save)
    assert set(rp.any_of(full, minimal).save) == set(minimal.save)
    assert rp.all_of(full, minimal).keeps == ()


@pytest.mark.parametrize("preset", rp.PRESETS.values(), ids=repr)
def test_presets_print_as_their_name_and_survive_json(preset):
    """A log that names the policy is enough to have it again."""
    assert rp.preset(repr(preset)) is preset
    assert rp.from_json(preset.to_json()) == preset
    assert hash(preset) == hash(rp.from_json(preset.to_json()))


def test_names_are_those_of_maxtext():
    """Blocks that are annotated for MaxText's policies work as they are."""
    assert set(rp.preset("save_qkv_proj").save) == {
        "query_proj",
        "key_proj",
        "value_proj",
        "qkv_proj",
    }
    assert blocknames.LAYER_INPUT == "decoder_layer_input"
    assert {"context", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"} <= set(
        rp.preset("minimal_with_context").save
    )


@pytest.mark.parametrize("which", MODES)
def test_jax_keeps_what_the_policy_says(which):
    """With plain `jax.checkpoint`, for names that stand where jax sees them."""

    def fn(x):
        y = jax.ad_checkpoint.checkpoint_name(x * 2, "double")
        return jnp.sin(jnp.sin(y))

    x = jnp.ones(4)
    with mode(which):
        kept = jax.checkpoint(fn, policy=rp.names(save=["double"]).jax_policy())
        assert bytes_kept(kept, x) == (16, 0)
        nothing = jax.checkpoint(fn, policy=rp.preset("full").jax_policy())
        assert bytes_kept(nothing, x) == (0, 0)


def test_offloading_is_refused_where_jax_would_ignore_it():
    """Jax 0.10 with the new remat would recompute, and say nothing."""
    policy = rp.names(offload=["double"])
    with mode("remat3"):
        if jax.__version_info__ < (0, 11):
            with pytest.raises(rp.InvalidInputError, match="JAX_REMAT3 ignores what"):
                policy.jax_policy()
        else:
            assert policy.jax_policy() is not None
    with mode("remat"):
        assert policy.jax_policy() is not None


def test_none_is_not_a_policy_of_jax():
    """There it would mean the opposite."""
    with pytest.raises(rp.InvalidInputError, match=r"leave jax\.checkpoint out"):
        rp.preset("none").jax_policy()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rp.names(save=["a"], offload=["a"]), "are to be saved and offloaded"),
        (lambda: rp.names(save="ab"), r"several names, as in \['ab'\]"),
        (lambda: rp.names(save=[""]), "texts that are not empty: ''"),
        (lambda: rp.names(offload=[3]), "texts that are not empty: 3"),
        (lambda: Policy(remat=False, save=("a",)), "every value is kept"),
        (lambda: rp.preset("minimum"), "did you mean 'minimal'"),
        (lambda: rp.preset("zzz"), "there are 'none', 'selective'"),
        (lambda: rp.any_of(), "at least one policy"),
        (lambda: rp.all_of(), "at least one policy"),
        (lambda: rp.all_of(rp.names(save=["a*"])), "whole names, not 'a"),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    """With what to write instead."""
    with pytest.raises(rp.InvalidInputError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: "{", "not a policy in JSON"),
        (lambda fields: json.dumps([]), "a policy has the fields"),
        (lambda fields: json.dumps(fields | {"more": 1}), "a policy has the fields"),
        (lambda fields: json.dumps(fields | {"save": "ab"}), "`save` is a list"),
        (lambda fields: json.dumps(fields | {"remat": 1}), "`remat` is a bool"),
        (lambda fields: json.dumps(fields | {"save": [1]}), "texts that are not empty"),
    ],
)
def test_json_of_something_else_is_refused(change, message):
    """It names the field."""
    fields = json.loads(rp.preset("minimal").to_json())
    with pytest.raises(rp.InvalidInputError, match=message):
        rp.from_json(change(fields))
