"""Which preset a device gets, and the reason in words."""

import dataclasses
import functools

import pytest

import remat_policies as rp
from remat_policies.demo import D2048, TINY, pure

BLOCK = functools.partial(pure.apply, D2048)
AVALS = pure.avals(D2048, 2, 2048)


def test_the_smaller_the_device_the_less_is_kept():
    """From all on a large one to nothing on one that just holds the inputs."""
    found = []
    for hbm in (150e9, 20e9, 14e9, 11e9):
        variant = dataclasses.replace(
            rp.device("v5p"), hbm_bytes=int(hbm), host_bytes_per_second=1.0
        )
        found.append(rp.for_device(variant, BLOCK, *AVALS, layers=40))
    again = [one.recompute_flops for one in found]
    assert again == sorted(again)
    assert len({one.policy for one in found}) == 4
    assert found[0].policy.label == "none"
    assert found[-1].policy.label == "full"
    for one in found:
        assert one.kept_bytes <= one.available_bytes
        assert one.host_bytes == 0


def test_the_reason_says_what_the_next_better_one_takes():
    """Figures, the device, and the share of a forward pass."""
    found = rp.for_device("v5e", BLOCK, *AVALS, layers=40)
    assert repr(found.policy) in found.reason
    for part in ("v5e", "40 layers", "of a forward pass again", "would keep", "GB"):
        assert part in found.reason


def test_offloading_counts_where_the_link_is_fast_enough():
    """A layer's bytes are on the host before the layer is done."""
    base = dataclasses.replace(rp.device("v5e"), hbm_bytes=int(11.5e9))
    slow = dataclasses.replace(base, host_bytes_per_second=1e6)
    fast = dataclasses.replace(base, host_bytes_per_second=1e12)
    of_slow = rp.for_device(slow, BLOCK, *AVALS, layers=40)
    of_fast = rp.for_device(fast, BLOCK, *AVALS, layers=40)
    assert of_slow.host_bytes == 0
    assert of_fast.policy.label == "minimal_offloaded"
    assert of_fast.host_bytes > 0
    assert "go to the host" in of_fast.reason
    assert of_fast.recompute_flops < of_slow.recompute_flops


def test_blocks_without_names_get_presets_that_need_none():
    """Instead of presets that would recompute everything."""
    config = dataclasses.replace(TINY, names=False)
    block = functools.partial(pure.apply, config)
    avals = pure.avals(config, 2, 128)
    found = rp.for_device("h100", block, *avals, layers=2, resident_bytes=0)
    assert found.policy.label == "none"


def test_what_does_not_fit_at_all():
    """Figures, and what to do; a target that is none; no layers."""
    with pytest.raises(rp.OverBudgetError, match="even `full` does not fit") as error:
        rp.for_device("v5e", BLOCK, *AVALS, layers=40, resident_bytes=int(16e9))
    assert error.value.required_bytes > error.value.available_bytes
    with pytest.raises(rp.InvalidInputError, match="v5"):
        rp.for_device("v5x", BLOCK, *AVALS, layers=1)
    with pytest.raises(
        rp.InvalidInputError, match="layers is a whole number from 1: 0"
    ):
        rp.for_device("v5e", BLOCK, *AVALS, layers=0)
