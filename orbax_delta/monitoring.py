"""Events of `jax.monitoring` at each save and restore, named as Orbax names its own.

For whoever listens to jax and Orbax already: `register_event_duration_secs_listener`
and `register_scalar_listener`. Each event carries `step` and `item`. Recorded on every
process, of the whole save. Does not belong here: what is kept on disk (`history`).
"""

import logging
from collections.abc import Mapping

import jax

from orbax_delta.reports import RestoreReport, SaveReport

_logger = logging.getLogger("orbax_delta")

SAVE_DURATIONS: Mapping[str, str] = {
    "/jax/orbax_delta/write/blocking_duration_secs": "blocking_seconds",
    "/jax/orbax_delta/write/total_duration_secs": "total_seconds",
}
SAVE_SCALARS: Mapping[str, str] = {
    "/jax/orbax_delta/write/raw_bytes": "full_bytes",
    "/jax/orbax_delta/write/written_bytes": "written_bytes",
    "/jax/orbax_delta/write/read_bytes": "read_bytes",
}
RESTORE_DURATIONS: Mapping[str, str] = {
    "/jax/orbax_delta/read/total_duration_secs": "total_seconds",
}
RESTORE_SCALARS: Mapping[str, str] = {
    "/jax/orbax_delta/read/raw_bytes": "restored_bytes",
    "/jax/orbax_delta/read/reused_bytes": "reused_bytes",
    "/jax/orbax_delta/read/read_bytes": "read_bytes",
}


def saved(report: SaveReport) -> None:
    """Tell listeners of a committed save; what they raise is logged."""
    _record(report, SAVE_DURATIONS, SAVE_SCALARS)


def restored(report: RestoreReport) -> None:
    """Tell listeners of a restore; what they raise is logged."""
    _record(report, RESTORE_DURATIONS, RESTORE_SCALARS)


def _record(
    report: SaveReport | RestoreReport,
    durations: Mapping[str, str],
    scalars: Mapping[str, str],
) -> None:
    about = {"step": report.step, "item": report.item}
    try:
        for event, name in durations.items():
            seconds = getattr(report, name)
            jax.monitoring.record_event_duration_secs(event, seconds, **about)
        for event, name in scalars.items():
            jax.monitoring.record_scalar(event, getattr(report, name), **about)
    except Exception:  # somebody else's code; the step is there, and must not fail
        _logger.exception("a listener of jax.monitoring failed at %s", about)
