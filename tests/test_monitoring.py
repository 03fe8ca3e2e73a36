"""Events of jax.monitoring at saves and restores, and the file for Prometheus."""

import logging
import os
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import strategies
from prometheus_client.parser import text_string_to_metric_families
from strategies import open_run

import orbax_delta
from orbax_delta import costs, errors, monitoring, prometheus


@pytest.fixture
def events():
    """Durations and scalars of this package, as a listener receives them."""
    heard = []

    def hear(event, value, **about):
        if "orbax_delta" in event:
            heard.append((event, value, about))

    jax.monitoring.register_event_duration_secs_listener(hear)
    jax.monitoring.register_scalar_listener(hear)
    yield heard
    jax.monitoring.unregister_event_duration_listener(hear)
    jax.monitoring.unregister_scalar_listener(hear)


def test_a_listener_hears_of_saves_and_restores(root, events):
    """The reports' figures, under the names that the README lists."""
    with open_run(root) as run:
        run.save(3, {"w": np.arange(900.0)})
        saved = run.handler.last_save_report
        run.restore(3)
        restored = run.handler.last_restore_report
    about = {"step": "3", "item": "default"}
    assert events == [
        *(
            (event, getattr(saved, name), about)
            for names in (monitoring.SAVE_DURATIONS, monitoring.SAVE_SCALARS)
            for event, name in names.items()
        ),
        *(
            (event, getattr(restored, name), about)
            for names in (monitoring.RESTORE_DURATIONS, monitoring.RESTORE_SCALARS)
            for event, name in names.items()
        ),
    ]
    readme = (strategies.Path(__file__).parent.parent / "README.md").read_text()
    for event, _, _ in events:
        assert event.startswith("/jax/orbax_delta/")
        assert event.removeprefix("/jax/orbax_delta/") in readme


def test_a_self_contained_save_is_heard_of(tmp_path, events):
    """Plain checkpointers too."""
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        save = orbax_delta.DeltaSave({"w": np.arange(9.0)})
        checkpointer.save(tmp_path / "final", args=save)
    assert {event for event, _, _ in events} == {
        *monitoring.SAVE_DURATIONS,
        *monitoring.SAVE_SCALARS,
    }


def test_a_failed_save_is_not(root, events, monkeypatch):
    """Nothing was saved."""
    with open_run(root) as run:
        match = orbax_delta.testing.Match(url="*part-*", kind="write")
        with (
            orbax_delta.testing.faults(orbax_delta.testing.fail(28, match)),
            pytest.raises(errors.StorageError, match=r"part-.*No space left"),
        ):
            run.save(0, {"w": np.arange(9.0)})
        run.manager.reload()
    assert not events


def test_a_listener_that_fails(root, caplog):
    """The step is committed: no listener can take that back."""
    caplog.set_level(logging.ERROR, "orbax_delta")

    def fail(event, *_, **__):
        if "orbax_delta" in event:
            raise RuntimeError("a listener's own affair")

    jax.monitoring.register_scalar_listener(fail)
    try:
        with open_run(root) as run:
            run.save(0, {"w": np.arange(9.0)})
            assert run.restore(0)["w"].shape == (9,)
    finally:
        jax.monitoring.unregister_scalar_listener(fail)
    assert caplog.text.count("RuntimeError: a listener's own affair") == 2


# --- Prometheus -----------------------------------------------------------------------


def metrics_of(text):
    """Samples by name and item, as the reference parser reads them."""
    return {
        (sample.name, sample.labels["item"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_a_collector_reads(tmp_path):
    """Counters of all saves, gauges of the newest; read by the reference parser."""
    root = tmp_path / 'ru"n'
    for life in range(2):
        with open_run(root) as run:
            if life:
                run.restore(6)
            for step in (life, 6 + life):
                run.save(step, {"w": np.arange(900.0) + step}, force=True)
    known = costs.read(str(root))
    path = tmp_path / "run.prom"
    prometheus.write(path, known)
    text = path.read_text()
    found = metrics_of(text)
    saves = sorted(known.saves, key=lambda save: save.started)
    last = saves[-1]
    wanted = {
        "saves_total": len(saves),
        "blocking_seconds_total": sum(save.blocking_seconds for save in saves),
        "save_seconds_total": sum(save.total_seconds for save in saves),
        "written_bytes_total": sum(save.written_bytes for save in saves),
        "raw_bytes_total": sum(save.full_bytes for save in saves),
        "restores_total": 1,
        "restore_seconds_total": known.restores[0].total_seconds,
        "last_save_timestamp_seconds": last.started,
        "last_save_step": 7,
        "last_save_blocking_seconds": last.blocking_seconds,
        "last_save_seconds": last.total_seconds,
        "last_save_written_bytes": last.written_bytes,
        "last_save_raw_bytes": 7200,
        "steps": 4,
    }
    assert found == {
        (f"orbax_delta_{name}", "default"): value for name, value in wanted.items()
    }
    (labels,) = {
        sample.labels["root"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert labels == f"{root}/"
    assert os.listdir(tmp_path) in (["run.prom", root.name], [root.name, "run.prom"])


def test_steps_without_numbers(tmp_path):
    """Their names are no values; a lone surrogate is no text of a file."""
    with ocp.Checkpointer(orbax_delta.DeltaCheckpointHandler()) as checkpointer:
        save = orbax_delta.DeltaSave({"w": np.arange(9.0)})
        checkpointer.save(tmp_path / "final", args=save)
    text = prometheus.exposition(costs.read(str(tmp_path)))
    names = {name for name, _ in metrics_of(text)}
    assert "orbax_delta_saves_total" in names
    assert "orbax_delta_last_save_step" not in names
    assert prometheus._label("a\udcffb\n") == r"a\udcffb\n"


def test_who_reads_sees_the_old_file_or_the_new_one(root, tmp_path):
    """A reader beside a writer never finds half a file."""
    with open_run(root) as run:
        run.save(0, {"w": np.arange(9.0)})
    known = costs.read(str(root))
    path = tmp_path / "run.prom"
    prometheus.write(path, known)
    whole = path.read_text()
    wrong = []
    ended = threading.Event()

    def read():
        while not ended.is_set():
            if path.read_text() != whole:
                wrong.append(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        prometheus.write(path, known)
    ended.set()
    reader.join()
    assert not wrong


def test_a_folder_that_is_not_there(root, tmp_path):
    """Says what to name instead."""
    with open_run(root) as run:
        run.save(0, {"w": np.arange(9.0)})
    with pytest.raises(
        errors.StorageError, match=r"could not write the metrics to .*no"
    ):
        prometheus.write(tmp_path / "no" / "run.prom", costs.read(str(root)))
