"""Where a save or a restore takes place, read off the directory that Orbax hands over.

A manager's item directory is `<root>/<step>/<item>`, while it is written with a suffix
on one or both names; a plain Checkpointer's is just `<path>`. Only a directory that is
recognised as a manager's gets a store; any other save is self-contained.
"""

import dataclasses
import re

from orbax_delta.store import Folder

TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
SELF_CONTAINED_PACKS = "packs"

MAX_MANIFEST_DEPTH = 5
"""Folders between a root and a MANIFEST: step, item, and up to three of a trash."""

_STEP_DIGITS = 18
_STEP_NAME = re.compile(rf"(?:.*\D)?(\d{{1,{_STEP_DIGITS}}})")

MAX_STEP = 10**_STEP_DIGITS - 1
"""Of a manager's step; a folder with a longer number is taken for something else."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Names and folders of one item of one step.

    Attributes:
        item_url: The item's directory.
        step_name: Name of the step's directory, without suffix.
        item: Name of the item.
        root_url: The manager's root; None for a self-contained save.
        opened: The item's directory, where its URL alone does not tell how to open it.
    """

    item_url: str
    step_name: str
    item: str
    root_url: str | None
    opened: Folder | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def folder(self) -> Folder:
        """The item's directory."""
        return self.opened or Folder(self.item_url)

    @property
    def step(self) -> int | None:
        """The number at the end of the step's name, if there is one."""
        match = _STEP_NAME.fullmatch(self.step_name)
        return int(match[1]) if match else None

    @property
    def label(self) -> str:
        """Step and item in words, for messages."""
        return f"step {self.step_name}, item {self.item!r} ({self.item_url})"


def without_suffix(path: str) -> str:
    """`path` as it reads once the save is done.

    >>> without_suffix("7.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp/MANIFEST")
    '7/default/MANIFEST'
    """
    return "/".join(part.removesuffix(TEMPORARY_SUFFIX) for part in path.split("/"))


def locate(directory: str) -> Place:
    """The place that `directory` stands for.

    >>> locate("/run/7.orbax-checkpoint-tmp/default.orbax-checkpoint-tmp").root_url
    '/run'
    >>> locate("/models/final.orbax-checkpoint-tmp").root_url is None
    True
    """
    parent, _, name = directory.rstrip("/").rpartition("/")
    root, _, step_name = parent.rpartition("/")
    item, step = (part.removesuffix(TEMPORARY_SUFFIX) for part in (name, step_name))
    temporary = name != item
    # Both names carry the suffix, or neither does (a finished step, or an object store
    # where a marker file commits): a manager. Only the last one: a plain Checkpointer.
    by_manager = _STEP_NAME.fullmatch(step) and (not temporary or step_name != step)
    if by_manager and root:
        return Place(item_url=directory, step_name=step, item=item, root_url=root)
    return _alone(directory, item)


def locate_save(directory: str) -> Place:
    """The place of a save that begins; v1's free functions are told from managers too.

    A manager's temporary item lies in a temporary step. `v1.save_checkpointables(path)`
    gives the suffix to `path` alone, and what is saved there stands for itself whatever
    the path ends in. Only a save can tell: a step that is being finished reads like
    that for a moment.

    >>> locate_save("/models/v7.orbax-checkpoint-tmp/params").root_url is None
    True
    """
    parent, _, name = directory.rstrip("/").rpartition("/")
    if parent.endswith(TEMPORARY_SUFFIX) and not name.endswith(TEMPORARY_SUFFIX):
        return _alone(directory, name)
    return locate(directory)


def _alone(directory: str, name: str) -> Place:
    return Place(item_url=directory, step_name=name, item="", root_url=None)
