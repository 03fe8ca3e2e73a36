"""Option values: every field has a range, and what is out of it is named."""

import dataclasses
import json
import os
import pathlib
import types

import hypothesis
import hypothesis.strategies as st
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_delta
from orbax_delta.errors import InvalidInputError
from orbax_delta.options import DeltaOptions

RANGES = {
    "chunk_bytes": (64, 1 << 30),
    "pack_bytes": (1024, 1 << 31),
    "full_every": (0, 199),
    "max_chain": (1, 200),
    "read_budget": (1.0, 100.0),
    "refresh_every": (1, 30_000),
    "keep_bases": (0, 100),
    "threads": (1, 256),
    "vote_timeout": (0.1, 86_400),
}
"""Smallest and largest value of each field that is a number."""


def test_defaults_are_those_of_the_documentation():
    """The advertised line uses these, and nothing else."""
    assert dataclasses.asdict(DeltaOptions()) == {
        "chunk_bytes": 1 << 20,
        "pack_bytes": None,
        "full_every": 10,
        "max_chain": 20,
        "read_budget": 2.0,
        "refresh_every": 100,
        "keep_bases": 2,
        "threads": None,
        "base": "auto",
        "compare_on": "auto",
        "auto_prune": True,
        "vote_timeout": 900.0,
        "processes": None,
        "store": None,
        "lossy": None,
        "encryption": None,
    }


@pytest.mark.parametrize(
    ("state_bytes", "pack_bytes"),
    [(0, 1 << 20), (128 << 20, 4 << 20), (1 << 40, 16 << 20), (None, 16 << 20)],
)
def test_packs_are_a_part_of_the_state_on_disks(state_bytes, pack_bytes):
    """So that what one chunk keeps on the disk is little beside all of it."""
    found = DeltaOptions().pack_size(local=True, state_bytes=state_bytes)
    assert found == pack_bytes


def test_packs_are_larger_in_buckets():
    """Unless a size is asked for: there each file costs a request."""
    assert DeltaOptions().pack_size(local=False, state_bytes=0) == 64 << 20
    for local in (True, False):
        given = DeltaOptions(pack_bytes=4096)
        assert given.pack_size(local=local, state_bytes=1 << 40) == 4096


def test_every_number_has_a_range_here():
    """A new option comes with its range in this table."""
    names = {field.name for field in dataclasses.fields(DeltaOptions)}
    others = {"auto_prune", "base", "compare_on", "encryption", "lossy", "processes"}
    others |= {"store"}
    assert names == set(RANGES) | others


@pytest.mark.parametrize("processes", [(), 0, (0, 0), (-1,), (True,), "01", {0: 1}])
def test_processes_are_different_indices(processes):
    """The first of them publishes, so there is an order and no doubt."""
    with pytest.raises(InvalidInputError, match=r"DeltaOptions\.processes is "):
        DeltaOptions(processes=processes)


def test_what_processes_must_have_alike_and_a_step_keeps():
    """Threads are a matter of each host; who saved is no matter of the step."""
    given = DeltaOptions(processes=(2, 0), threads=3, compare_on="host")
    assert DeltaOptions(processes=(2, 0)).shared() == given.shared()
    # It is compared with what another process has sent as JSON.
    assert json.loads(json.dumps(given.shared())) == given.shared()
    left_out = set(dataclasses.asdict(given)) - set(given.recorded())
    assert left_out == {
        *("base", "compare_on", "encryption", "processes", "vote_timeout")
    }


@pytest.mark.parametrize(("name", "limits"), RANGES.items())
def test_the_ends_of_each_range_are_allowed(name, limits):
    """Smallest and largest value."""
    for value in limits:
        assert getattr(DeltaOptions(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "limits"), RANGES.items())
def test_what_lies_outside_a_range_is_named(name, limits):
    """Just past either end, and values of another type."""
    low, high = limits
    outside = [low - 1, high + 1, "8", [], float("nan"), float("inf"), -(10**30)]
    outside += [True] if isinstance(low, int) else []
    outside += [None] if name not in ("threads", "pack_bytes") else []
    for value in outside:
        with pytest.raises(InvalidInputError, match=f"DeltaOptions.{name} is"):
            DeltaOptions(**{name: value})


@pytest.mark.parametrize("value", [1.5, 8.0])
@pytest.mark.parametrize("name", sorted(set(RANGES) - {"read_budget", "vote_timeout"}))
def test_counts_are_whole_numbers(name, value):
    """Not even a float without a fraction is taken for one."""
    with pytest.raises(InvalidInputError, match="a whole number"):
        DeltaOptions(**{name: value})


@hypothesis.given(
    st.builds(
        DeltaOptions,
        threads=st.none() | st.integers(1, 256),
        chunk_bytes=st.integers(64, 1 << 30),
        read_budget=st.floats(1, 100),
    )
)
def test_options_are_values(options):
    """Equal, hashable, frozen and without a dictionary."""
    assert options == dataclasses.replace(options)
    assert hash(options) == hash(dataclasses.replace(options))
    with pytest.raises(dataclasses.FrozenInstanceError, match="threads"):
        options.threads = 3
    assert not hasattr(options, "__dict__")


def test_threads_follow_the_machine_up_to_sixteen(monkeypatch):
    """One a core; an explicit number is taken as it is."""
    for cores, expected in ((None, 1), (1, 1), (4, 4), (64, 16)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert DeltaOptions().worker_count == expected
    assert DeltaOptions(threads=40).worker_count == 40


def test_a_chunk_that_is_only_renewed_has_not_changed(root):
    """With `refresh_every=1` all is written anew, and the report says what changed."""
    registry = orbax_delta.handler_registry(refresh_every=1)
    state = {"w": np.arange(5000, dtype=np.float32)}
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in range(2):
            manager.save(step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
    report = orbax_delta.save_report(root / "1")
    assert report.chunks_by_form == {"planes": 1}
    assert (report.elements_changed, report.blocks_changed) == (0, 0)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (None, None),
        ("/runs/store", "/runs/store"),
        ("/runs/./a/../store/", "/runs/store"),
        (pathlib.Path("/runs/store"), "/runs/store"),
        ("file:///runs/my%20store", "/runs/my store"),
        ("s3://bucket/store", "s3://bucket/store"),
        (
            {"driver": "file", "path": "/runs/../a/", "x": 1},
            {"driver": "file", "path": "/a/", "x": 1},
        ),
        ({"driver": "s3", "bucket": "b"}, {"driver": "s3", "bucket": "b"}),
        (
            types.MappingProxyType({"driver": "s3", "path": "a/"}),
            {"driver": "s3", "path": "a/"},
        ),
    ],
)
def test_what_can_be_a_store(given, taken):
    """Paths become absolute; options stay values that can be compared and hashed."""
    options = DeltaOptions(store=given)
    assert options.store == taken
    assert options == DeltaOptions(store=taken)
    assert hash(options) == hash(DeltaOptions(store=taken))
    document = options.recorded()
    text = document.pop("store")
    assert (json.loads(text) if isinstance(taken, dict) else text) == taken
    assert document == {
        name: value
        for name, value in DeltaOptions().recorded().items()
        if name != "store"
    }


def test_a_relative_store_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    """Of the process that makes the options, when it makes them."""
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path / "store")
    assert DeltaOptions(store="store").store == here
    spec = {"driver": "file", "path": "store"}
    assert DeltaOptions(store=spec).store == spec | {"path": here}


@pytest.mark.parametrize(
    "value",
    [
        *("", "a\0b", 3, b"/store", [], {}, {"bucket": "b"}, {"driver": 3}),
        *({"driver": "s3", "x": object()}, {"driver": "s3", "x": float("nan")}),
        *({"driver": "file"}, {"driver": "file", "path": 3}),
        *({"driver": "memory"}, "memory://store"),
    ],
)
def test_what_cannot_be_a_store(value):
    """Neither a path nor JSON with a driver."""
    with pytest.raises(InvalidInputError, match=r"DeltaOptions.store is .*; expected"):
        DeltaOptions(store=value)
