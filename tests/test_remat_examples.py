"""The examples in the docstrings of remat_policies are right as they stand."""

import doctest
import importlib
import pkgutil

import compilers
import pytest

import remat_policies

COMPILING = ("verify", "targets")
MODULES = [found.name for found in pkgutil.iter_modules(remat_policies.__path__)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=compilers.needs_tpu_compiler)
        if name in COMPILING
        else name
        for name in MODULES
    ],
)
def test_examples_run(name):
    """Each says what it says."""
    module = importlib.import_module(f"remat_policies.{name}")
    assert doctest.testmod(module).failed == 0


def test_there_are_examples():
    """Of each public function there is one; this notices if none are found."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    documented = {
        name
        for name in MODULES
        for test in finder.find(importlib.import_module(f"remat_policies.{name}"))
        if test.examples
    }
    assert {
        *("applying", "devices", "gradients", "hlo", "linen", "nnx"),
        *("policies", "presets", "report", "suiting", "verify"),
    } <= documented
