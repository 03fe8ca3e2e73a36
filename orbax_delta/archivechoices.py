"""Which steps of a root go to an archive: those that are named, or that fit a policy.

Does not belong here: what there is to copy of them (`archiveplans`).
"""

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from orbax_delta.errors import InvalidInputError, NotFoundError
from orbax_delta.listing import Item, Root

_logger = logging.getLogger("orbax_delta")

_MOST_FOLDERS = 2
"""Between a root and a MANIFEST of a step: step and item. Deeper ones are trash."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which steps: some by name, or those that fit a policy.

    Attributes:
        steps: Numbers or names.
        older_than: Seconds since they were saved.
        keep_every: Only steps whose number is a multiple of it.
    """

    steps: Sequence[int | str] = ()
    older_than: float | None = None
    keep_every: int | None = None

    def check(self) -> None:
        """Whether it says which steps, in one way.

        Raises:
            InvalidInputError: It does not.
        """
        if isinstance(self.steps, str):
            raise InvalidInputError(
                f"steps is the text {self.steps!r}; expected a list, as [100, 200]"
            )
        policies = (self.older_than, self.keep_every)
        by_policy = any(value is not None for value in policies)
        if by_policy == bool(self.steps):
            raise InvalidInputError(
                "archive needs to know which steps: give either some steps, or "
                "older_than, keep_every or both"
            )
        age, every = self.older_than, self.keep_every
        if age is not None and not (isinstance(age, int | float) and age >= 0):
            raise InvalidInputError(
                f"older_than is {age!r}; expected seconds, 0 or more"
            )
        if every is not None and not (type(every) is int and every >= 1):
            raise InvalidInputError(
                f"keep_every is {every!r}; expected a whole number from 1"
            )


def by_step(root: Root) -> Mapping[str, list[Item]]:
    """Items of steps that can be archived, by the folder of the step in the root."""
    found: dict[str, list[Item]] = {}
    for item in root.items:
        folders = item.key.count("/")
        own = item.place.root_url is None or item.place.step is not None
        if item.finished and own and 0 < folders <= _MOST_FOLDERS:
            found.setdefault(item.key.partition("/")[0], []).append(item)
    return found


def choose(root: Root, by_name: Mapping[str, list[Item]], choice: Choice) -> list[str]:
    """The folders of the chosen steps, oldest first.

    Raises:
        NotFoundError: A step that was named is not there, or of another handler.
    """
    if choice.steps:
        names = (_named(root, by_name, str(wanted)) for wanted in choice.steps)
        return sorted(set(names), key=lambda name: _order(name, by_name[name]))
    ordered = sorted(by_name, key=lambda name: _order(name, by_name[name]))
    newest = _newest(root, ordered, by_name)
    return [
        name
        for name in ordered
        if name != newest and _fits(name, by_name[name], choice)
    ]


def _named(root: Root, by_name: Mapping[str, list[Item]], wanted: str) -> str:
    for name, items in by_name.items():
        if name == wanted or any(item.answers_to(wanted) for item in items):
            return name
    others = {name: _number_of(name) for name in root.others}
    if wanted in others or (wanted.isdecimal() and int(wanted) in others.values()):
        raise NotFoundError(
            f"step {wanted} of {root.folder.url} holds no orbax_delta item: it was "
            "saved by another handler. Copy its folder as it is"
        )
    root.select([wanted])  # says which steps there are
    raise NotFoundError(
        f"{wanted} is no step of {root.folder.url} that can be archived: it is not "
        "finished, lies too deep, or is a kept base"
    )


def _number_of(name: str) -> int | None:
    return int(name) if name.isdecimal() else None


def _order(name: str, items: Sequence[Item]) -> tuple[float, float, str]:
    number, saved = items[0].place.step, _saved(items)
    return (-1 if number is None else number, saved or 0.0, name)


def _saved(items: Iterable[Item]) -> float | None:
    """When the last item of a step was saved; None if that is not known."""
    times = []
    for item in items:
        if item.manifest is not None:
            times.append(item.manifest.wall_time)
        elif item.archived is not None:
            times.append(item.archived.saved_us / 1e6)
        else:
            return None
    return max(times)


def _newest(
    root: Root, ordered: Sequence[str], by_name: Mapping[str, list[Item]]
) -> str | None:
    """The newest step, if it is one of ours."""
    if not ordered:
        return None
    last = by_name[ordered[-1]][0].place.step
    others = [number for name in root.others if (number := _number_of(name))]
    newer = last is not None and any(number > last for number in others)
    return None if newer else ordered[-1]


def _fits(name: str, items: Sequence[Item], choice: Choice) -> bool:
    saved, number = _saved(items), items[0].place.step
    if choice.keep_every is not None and (number is None or number % choice.keep_every):
        return False
    if saved is None:
        _logger.warning("step %s is damaged and is left where it is", name)
        return False
    return choice.older_than is None or time.time() - saved > choice.older_than
