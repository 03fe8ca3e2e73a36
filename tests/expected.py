"""What a job must have restored: the bits of `job_states.content`, by numpy alone.

Nothing of what is judged here, jax, Orbax or this package, takes part in the judgement.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import job_states
import numpy as np

Answer = Mapping[str, Any]

KINDS = {"key": "key threefry2x32", "host": "numpy"}


def assert_restored(
    answers: Sequence[Answer],
    version: int,
    *,
    names: Collection[str] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> None:
    """The members hold a version, each part bit for bit, and together all of it.

    Args:
        answers: What each member says of its restored tree.
        version: The version that was saved.
        names: Leaves that were asked for; None: all.
        kinds: Leaves restored as something else than they were saved as.
    """
    wanted = job_states.content(version)
    names = wanted.keys() if names is None else names
    for rank, answer in enumerate(answers):
        assert set(answer) == set(names), f"member {rank}"
    for name in names:
        described = [answer[name] for answer in answers]
        _assert_leaf(name, wanted[name], described, (kinds or {}).get(name))


def _assert_leaf(
    name: str, value: Any, described: Sequence[Answer], kind: str | None
) -> None:
    if not isinstance(value, np.ndarray):
        for rank, found in enumerate(described):
            where = f"leaf {name} on member {rank}"
            assert found["kind"] == type(value).__name__, where
            assert found["value"] == value, where
        return
    seen = np.zeros(value.shape, bool)
    for rank, found in enumerate(described):
        where = f"leaf {name} on member {rank}"
        assert found["kind"] == (kind or KINDS.get(name, "jax")), where
        assert tuple(found["shape"]) == value.shape, where
        for box, digest in found["parts"]:
            part = tuple(slice(start, stop) for start, stop in box)
            assert digest == job_states.digest(value[part]), f"{where}, {box}"
            seen[part] = True
    assert seen.all(), f"of leaf {name} {np.sum(~seen)} elements are nowhere"
