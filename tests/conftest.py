"""Shared set-up: eight CPU devices, strict dtypes, Hypothesis profiles, one state."""

import json
import os
import shutil

# Before the first import of jax: meshes of 1, 2, 4 and 8 devices on any machine.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import buckets
import hypothesis
import pytest
import roots
import tensorstore as ts

from orbax_delta import cli, keys, store

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    max_examples=40,
    stateful_step_count=25,
    print_blob=True,
    # A shared build must not fail by the luck of the draw; everybody else explores.
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "long",
    parent=hypothesis.settings.get_profile("default"),
    derandomize=False,
    max_examples=1000,
    stateful_step_count=60,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def root(tmp_path):
    """An empty folder for a CheckpointManager."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server on loopback, behind a proxy; skips where moto is not installed."""
    with buckets.serving() as proxy:
        yield proxy


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The same, known to the environment; what fails is asked again without delay."""
    for name, value in buckets.environment(s3_server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "_CONTEXT", ts.Context(buckets.QUICK_RETRIES))
    return s3_server


# --- what was tried, in one line at the end -------------------------------------------

_TRIED = {
    "crash_points": "crash points",
    "failures": "injected failures",
    "kills": "killed processes",
    "damage_cases": "damage cases",
    "races": "interleavings",
    "restores": "restores by several processes",
    "fuzz_inputs": "hostile inputs",
    "bucket_faults": "broken requests",
}
"""Properties that tests record (`record_property`), and what they count."""


def _write_tables(terminalreporter, reports):
    """Rows that tests recorded as `record_property("table: TITLE", row)`, by title."""
    tables = {}
    for report in reports:
        for name, row in report.user_properties:
            kind, _, title = name.partition(": ")
            if kind == "table":
                tables.setdefault(title, []).append(row)
    for title, rows in tables.items():
        cells = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        terminalreporter.write_line(f"{title}:")
        for line in cells:
            padded = (cell.ljust(width) for cell, width in zip(line, widths))
            terminalreporter.write_line("  " + "  ".join(padded).rstrip())


def pytest_terminal_summary(terminalreporter):
    """Sum up what passed tests tried; a wrong value or a lost step fails its test."""
    passed = terminalreporter.stats.get("passed", [])
    _write_tables(terminalreporter, passed)
    totals = dict.fromkeys(_TRIED, 0)
    for report in passed:
        for name, value in report.user_properties:
            if name in totals:
                totals[name] += value
    for report in passed:
        for name, value in report.user_properties:
            if name == "bucket_requests":
                terminalreporter.write_line(f"requests to a bucket, {value}")
    if any(totals.values()):
        counts = ", ".join(f"{totals[name]:,} {noun}" for name, noun in _TRIED.items())
        failed = terminalreporter.stats.get("failed", [])
        verdict = (
            f"{len(failed)} tests failed, see above"
            if failed
            else "0 wrong values, 0 lost committed steps"
        )
        terminalreporter.write_line(f"tried {counts}: {verdict}")


@pytest.fixture
def forget(monkeypatch):
    """This process knows no key; a call makes it forget those that it has heard of."""
    monkeypatch.delenv("ORBAX_DELTA_KEY_FILE", raising=False)

    def call():
        monkeypatch.setattr(keys, "_known", keys._Known())

    call()
    return call


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A healthy root that no test changes; some modules have their own."""
    return roots.make(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture
def run(made, root):
    """A copy of the healthy root, to be damaged."""
    shutil.copytree(made, root)
    return root


@pytest.fixture
def command(capsys):
    """Runs a command line; returns exit code, stdout and stderr."""

    def call(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def document(command):
    """Runs a command line with `--json`; returns exit code and document."""

    def call(*arguments):
        code, out, _ = command(*arguments, "--json")
        return code, json.loads(out)

    return call
