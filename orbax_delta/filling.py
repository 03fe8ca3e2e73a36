"""Leaves of a restore, each made when its last chunk has come.

Does not belong here: where content comes from.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from orbax_delta import buffers, trees
from orbax_delta.assemble import LeafPlan
from orbax_delta.codecs import Bytes
from orbax_delta.reader import Request


class Filling:
    """Plans on their way to become leaves.

    Attributes:
        values: What is made of each plan, in order.
    """

    def __init__(self, plans: Sequence[LeafPlan], wanted: Iterable[Request]) -> None:
        self._plans = plans
        self._position = {plan.entry.path: index for index, plan in enumerate(plans)}
        self._missing = collections.Counter(request.leaf.path for request in wanted)
        self.values: list[Any] = [
            None if self._missing[plan.entry.path] else plan.finish() for plan in plans
        ]

    def plan(self, path: trees.Path) -> LeafPlan:
        """The plan of a leaf."""
        return self._plans[self._position[path]]

    def missing(self, path: trees.Path) -> int:
        """How many chunks of a leaf have not come."""
        return self._missing[path]

    def window(self, request: Request) -> Bytes | None:
        """The memory that a chunk may be decoded into; any thread may ask."""
        plan = self._plans[self._position[request.leaf.path]]
        return buffers.window(plan.buffers, plan.entry, request.row.box)

    def put(self, request: Request, content: Bytes, *, placed: bool = False) -> None:
        """A chunk has come.

        Args:
            request: The chunk.
            content: Its content.
            placed: It lies in the memory that `window` has given.
        """
        path = request.leaf.path
        plan = self.plan(path)
        buffers.place(plan.buffers, plan.entry, request.row.box, content, placed=placed)
        self._missing[path] -= 1
        if not self._missing[path]:
            self._take(path, plan.finish())

    def replace(self, path: trees.Path, value: Any) -> None:
        """All chunks of a leaf are at hand in an array that can stand for it."""
        self._missing[path] = 0
        self._take(path, value)

    def _take(self, path: trees.Path, value: Any) -> None:
        self.values[self._position[path]] = value
        # Nobody else may hold what jax has taken over.
        self.plan(path).buffers = {}
