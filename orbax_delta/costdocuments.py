"""What history, du, diff, watch and advise know, as JSON documents.

Pure functions from values of the flows, as `documents`. Does not belong here: reading
anything, wording.
"""

import dataclasses
import datetime as dt
from collections.abc import Sequence

from orbax_delta.advice import Advice
from orbax_delta.costs import Costs, Forecast
from orbax_delta.differing import StepDiff
from orbax_delta.documents import Document
from orbax_delta.history import RestoreCost, SaveCost
from orbax_delta.usage import Usage


def of_history(costs: Costs, forecast: Forecast | None) -> Document:
    """What `history` shows."""
    return {
        "root": costs.root.folder.url,
        "saves": [of_save(save) for save in costs.saves],
        "restores": [_of_restore(restore) for restore in costs.restores],
        "forecast": of_forecast(forecast),
        "problems": list(costs.damaged),
    }


def of_save(save: SaveCost) -> Document:
    """One save, as `watch` and `history` print it."""
    return dataclasses.asdict(save) | {
        "started_at": _iso(save.started),
        "times_smaller": save.full_bytes / max(save.written_bytes, 1),
    }


def _of_restore(restore: RestoreCost) -> Document:
    return dataclasses.asdict(restore) | {"started_at": _iso(restore.started)}


def _iso(seconds: float) -> str:
    then = dt.datetime.fromtimestamp(seconds).astimezone()
    return then.isoformat(timespec="seconds")


def of_forecast(forecast: Forecast | None) -> Document | None:
    """What the next saves will take."""
    if forecast is None:
        return None
    return dataclasses.asdict(forecast) | {
        "bytes_per_day": forecast.bytes_per_day,
        "growth_bytes_of_100_saves": forecast.growth_bytes(100),
    }


def of_usage(root: str, usage: Usage, forecast: Forecast | None) -> Document:
    """What `du` shows."""
    document = dataclasses.asdict(usage)
    del document["exit_code"]
    return {
        "root": root,
        "total_bytes": usage.total_bytes,
        **document,
        "forecast": of_forecast(forecast),
    }


def of_diff(before: str, after: str, diffs: Sequence[StepDiff]) -> Document:
    """What `diff` shows."""
    return {
        "before": before,
        "after": after,
        "items": [_of_item_diff(diff) for diff in diffs],
    }


def _of_item_diff(diff: StepDiff) -> Document:
    document = dataclasses.asdict(diff)
    del document["exit_code"]
    leaves = [dataclasses.asdict(leaf) | {"share": leaf.share} for leaf in diff.leaves]
    return document | {"leaves": leaves}


def of_advice(root: str, advice: Advice) -> Document:
    """What `advise` shows."""
    return {"root": root, **dataclasses.asdict(advice)}
