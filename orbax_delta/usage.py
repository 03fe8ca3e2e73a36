"""Where the bytes of a root are: of each step alone, shared, of each leaf, of nobody.

Every byte is counted once, so that the figures add up to what the files take. Reads
MANIFESTs and parts, no records. A step that goes away meanwhile is left out. Does not
belong here: what will be needed (`costs`), deleting any of it.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from orbax_delta import filesizes, listing, registry, steps
from orbax_delta.codecs import Form
from orbax_delta.dtypes import Rule
from orbax_delta.errors import CorruptionError, DeltaError, NotFoundError
from orbax_delta.listing import Item, Progress, Root
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.marks import read_marks
from orbax_delta.parts import Ref, Row
from orbax_delta.places import SELF_CONTAINED_PACKS
from orbax_delta.store import STORE_NAME, Folder

_MAX_TRIES = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUsage:
    """What one step, or one kept base, takes.

    Attributes:
        name: Folder of the step, or of the base, relative to the root.
        number: Number of the step; None where its name has none.
        is_base: Whether it is a copy that the store keeps.
        alone_bytes: Records that nothing else needs.
        shared_bytes: Records that it shares with other steps, bases or roots.
        file_bytes: Files of its folder that are no packs.
        freed_bytes: Packs and files that go, now or with the next prune, if it is
            deleted: a pack stays as long as one of its records is needed.
    """

    name: str
    number: int | None
    is_base: bool
    alone_bytes: int
    shared_bytes: int
    file_bytes: int
    freed_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafUsage:
    """What the records of one leaf take, in all steps and bases together.

    Attributes:
        item: Its item.
        path: Its path.
        stored_bytes: Records; one that several leaves share counts for the first.
        newest_bytes: Of these, what the newest step needs.
    """

    item: str
    path: str
    stored_bytes: int
    newest_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Where the bytes of a root are.

    Attributes:
        owners: Steps in order, then kept bases.
        leaves: Leaves, the dearest first.
        alone_bytes: Records that one step or base alone needs.
        shared_bytes: Records that several need, each counted once.
        rest_bytes: Of packs that are needed: dead records, headers and indices, and of
            a shared store records of other roots.
        pinned_bytes: Packs that only pins keep: of saves under way, or left behind.
        dead_bytes: Packs that nothing names: the next prune deletes them.
        step_file_bytes: Files of steps and bases that are no packs.
        store_file_bytes: Other files of the store; of a shared one, those in the root.
        other_bytes: Other files of the root; None in a bucket, which does not say.
        elsewhere_bytes: Of a shared store, packs that this root does not need; they
            belong to others or to nobody, and count in no other figure.
        problems: What is damaged or cannot be read, as sentences.
        exit_code: Of the first of these; 0: there is none.
    """

    owners: Sequence[OwnerUsage]
    leaves: Sequence[LeafUsage]
    alone_bytes: int
    shared_bytes: int
    rest_bytes: int
    pinned_bytes: int
    dead_bytes: int
    step_file_bytes: int
    store_file_bytes: int
    other_bytes: int | None
    elsewhere_bytes: int
    problems: Sequence[str]
    exit_code: int

    @property
    def total_bytes(self) -> int:
        """Everything that belongs to the root: the sum of the figures."""
        return (
            self.alone_bytes
            + self.shared_bytes
            + self.rest_bytes
            + self.pinned_bytes
            + self.dead_bytes
            + self.step_file_bytes
            + self.store_file_bytes
            + (self.other_bytes or 0)
        )


def measure(root: Root, progress: Progress = listing.no_progress) -> Usage:
    """Find out where the bytes of a root are; changes nothing.

    Args:
        root: The root, as just read.
        progress: Told of every step whose rows are read.

    Raises:
        StorageError: The storage failed.

    Example:
        >>> usage = measure(listing.read_root("/checkpoints/run"))  # doctest: +SKIP
        >>> usage.total_bytes, usage.dead_bytes  # doctest: +SKIP
        (1482113, 0)
    """
    for _ in range(_MAX_TRIES):
        found = _Measuring(root)
        usage = found.run(progress)
        if not found.missing:
            return usage
        # Damage, or a step that was deleted and pruned while it was read.
        again = listing.read_root(root.folder.url)
        if [item.key for item in again.items] == [item.key for item in root.items]:
            return usage
        root = again
    return usage


def held_bytes(root: Root) -> int:
    """Bytes of the packs and parts that steps and kept bases of a root need.

    Raises:
        StorageError: The storage failed.

    Example:
        >>> held_bytes(listing.read_root("/checkpoints/run"))  # doctest: +SKIP
        1480021
    """
    manifests = [item.manifest for item in root.everything if item.manifest]
    named = {pack for manifest in manifests for pack in manifest.packs}
    folders = [root.folder] + ([root.store.folder] if root.store.shared else [])
    sizes = {
        path.rpartition("/")[2]: size
        for folder in folders
        for path, size in filesizes.file_sizes(folder).items()
    }
    parts = sum(part.length for manifest in manifests for part in manifest.parts)
    return parts + sum(sizes.get(pack, 0) for pack in named)


class _Record(NamedTuple):
    """A record that something needs."""

    length: int
    owner: int
    leaf: int


_Key = tuple[str, int]
"""A record: its pack, by name in the store or by path in the root, and its offset."""

_Needed = dict[_Key, tuple[int, int]]
"""Length and leaf of records."""

_SHARED = -1


class _Measuring:
    """One look at a root.

    Attributes:
        missing: Packs that are needed and not there.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._store = root.store
        self._errors: list[DeltaError] = []
        self._unread: list[tuple[Folder, str, DeltaError]] = []
        self._records: dict[_Key, _Record] = {}
        self._leaves: dict[tuple[str, str], int] = {}
        self._newest: _Needed = {}
        self._named: dict[str, set[int]] = {}
        self._by_pack: collections.Counter[tuple[int, str]] = collections.Counter()
        by_folder: dict[str, list[Item]] = {}
        for item in root.everything:
            by_folder.setdefault(item.step, []).append(item)
        self._owners = list(by_folder.values())
        self._elsewhere = len(self._owners)
        self.missing: set[str] = set()

    def run(self, progress: Progress) -> Usage:
        self._errors += [self._root.store_error] if self._root.store_error else []
        for index, items in enumerate(self._owners):
            self._errors += [item.error for item in items if item.error is not None]
            needed = self._needed(items, index)
            self._add(needed, index)
            if not items[0].is_base:
                self._newest = needed
            progress("steps", index + 1, len(self._owners))
        # Only a shared store has other roots.
        others = registry.reachable(self._store) if self._store.link else ()
        self._errors += self._damage()
        errors, self._errors = self._errors, []
        for folder in others:
            with contextlib.suppress(NotFoundError):
                found = listing.read_root(folder.url).everything
                needed = self._needed(found, self._elsewhere)
                own = needed.keys() & self._records.keys()
                self._add({key: needed[key] for key in own}, self._elsewhere)
        self._errors = errors  # what is wrong with other roots is not for here
        return self._summed()

    # --- who needs what -------------------------------------------------------------

    def _needed(self, items: Sequence[Item], owner: int) -> _Needed:
        needed: _Needed = {}
        for item in items:
            if item.manifest is None:
                continue
            prefix = ""
            if item.manifest.self_contained:
                above = item.key.removesuffix(MANIFEST_NAME)
                prefix = f"{above}{SELF_CONTAINED_PACKS}/"
            for pack in item.manifest.packs:
                self._named.setdefault(prefix + pack, set()).add(owner)
            for row, refs in self._rows(item):
                name = item.place.item, item.manifest.leaves[row.leaf].name
                leaf = self._leaves.setdefault(name, len(self._leaves))
                for ref in refs:
                    if ref.pack:
                        key = prefix + ref.pack, ref.offset
                        needed.setdefault(key, (ref.length, leaf))
        return needed

    def _rows(self, item: Item) -> Iterator[tuple[Row, Sequence[Ref]]]:
        """Rows with their own records; then all, for what their sources had before."""
        if item.manifest is None:
            return
        try:
            rows = steps.read_rows(item.place.folder, item.manifest)
        except DeltaError as error:
            self._unread.append((item.place.folder, item.manifest.attempt, error))
            return
        for row in rows:
            if row.rule is Rule.NONE:
                forms = [ref.form for ref in row.refs]
                start = forms.index(Form.RELATIVE) if Form.RELATIVE in forms else 0
                yield row, row.refs[start:]
        yield from ((row, row.refs) for row in rows)

    def _damage(self) -> list[DeltaError]:
        """Why parts could not be read, but of steps that went away meanwhile."""
        if self._unread:
            steps.let_deletions_end()
        return [
            error
            for folder, attempt, error in self._unread
            if not steps.is_gone(folder, attempt)
        ]

    def _add(self, needed: _Needed, owner: int) -> None:
        for key, (length, leaf) in needed.items():
            self._by_pack[owner, key[0]] += length
            known = self._records.get(key)
            if known is None:
                self._records[key] = _Record(length, owner, leaf)
            elif known.owner != owner:
                self._records[key] = known._replace(owner=_SHARED)

    # --- what it takes --------------------------------------------------------------

    def _summed(self) -> Usage:
        in_root = filesizes.file_sizes(self._root.folder)
        in_store = self._in_store(in_root)
        packs, in_store = _parted(in_store, "packs/")
        packs |= {name: in_root.pop(name) for name in self._named if name in in_root}
        self._drop_missing(packs)
        files = self._files_of_owners(in_root, in_store)
        own = {name for name, users in self._named.items() if users - {self._elsewhere}}
        needed = own & packs.keys()
        pinned = self._pinned(packs) - needed
        rest = packs.keys() - needed - pinned
        alone: collections.Counter[int] = collections.Counter()
        for record in self._records.values():
            if record.owner != _SHARED:
                alone[record.owner] += record.length
        live_bytes = sum(record.length for record in self._records.values())
        needed_bytes = sum(packs[name] for name in needed)
        rest_bytes = sum(packs[name] for name in rest)
        is_shared = self._store.shared
        is_local = self._root.folder.is_local
        return Usage(
            owners=self._owner_usages(alone, files, packs, pinned),
            leaves=self._leaf_usages(),
            alone_bytes=alone.total(),
            shared_bytes=live_bytes - alone.total(),
            rest_bytes=needed_bytes - live_bytes,
            pinned_bytes=sum(packs[name] for name in pinned),
            dead_bytes=0 if is_shared else rest_bytes,
            step_file_bytes=files.total(),
            store_file_bytes=sum(in_store.values()),
            other_bytes=sum(in_root.values()) if is_local else None,
            elsewhere_bytes=rest_bytes if is_shared else 0,
            problems=[str(error) for error in self._errors],
            exit_code=self._errors[0].exit_code if self._errors else 0,
        )

    def _in_store(self, in_root: dict[str, int]) -> dict[str, int]:
        """Files of the store, taken out of those of the root; of bases only its own."""
        below, rest = _parted(in_root, f"{STORE_NAME}/")
        in_root.clear()
        in_root.update(rest)
        if not self._store.shared:
            return below
        stored = filesizes.file_sizes(self._store.folder)
        bases = tuple(f"{_base_folder(item)}/" for item in self._root.bases)
        return below | {
            name: size
            for name, size in stored.items()
            if name.startswith(("packs/", *bases))
        }

    def _drop_missing(self, packs: Mapping[str, int]) -> None:
        """What is not there takes nothing."""
        own = (n for n, users in self._named.items() if users - {self._elsewhere})
        self.missing = set(own) - packs.keys()
        for pack in sorted(self.missing):
            error = CorruptionError(f"the pack {pack} is missing; steps need it")
            self._errors.append(error)
        for key in [key for key in self._records if key[0] not in packs]:
            del self._records[key]

    def _files_of_owners(
        self, in_root: dict[str, int], in_store: dict[str, int]
    ) -> collections.Counter[int]:
        """Bytes of their folders, which are taken out of the others."""
        steps_of, bases_of = {}, {}
        for index, items in enumerate(self._owners):
            if items[0].is_base:
                bases_of[_base_folder(items[0])] = index
            else:
                steps_of[_step_folder(items[0])] = index
        found: collections.Counter[int] = collections.Counter()
        for files, owners in ((in_root, steps_of), (in_store, bases_of)):
            for name in list(files):
                folders = itertools.accumulate(
                    name.split("/")[:-1], lambda above, below: f"{above}/{below}"
                )
                owner = next((owners[f] for f in folders if f in owners), None)
                owner = owners.get("") if owner is None else owner
                if owner is not None:
                    found[owner] += files.pop(name)
        return found

    def _pinned(self, packs: Mapping[str, int]) -> set[str]:
        """Packs that saves under way keep; of a shared store nobody knows whose."""
        if self._store.shared:
            return set()
        try:
            pins = read_marks(self._store.pins)
        except DeltaError as error:
            self._errors.append(error)
            return set()
        alive = {name: pin for name, pin in pins.items() if not pin.owner.known_dead}
        attempts = {name.partition("-")[0] for name in alive}
        named = {pack for pin in alive.values() for pack in pin.packs}
        return {p for p in packs if p in named or p.partition("-")[0] in attempts}

    def _owner_usages(
        self,
        alone: Mapping[int, int],
        files: Mapping[int, int],
        packs: Mapping[str, int],
        pinned: Set[str],
    ) -> list[OwnerUsage]:
        needed: collections.Counter[int] = collections.Counter()
        for (owner, pack), stored_bytes in self._by_pack.items():
            needed[owner] += stored_bytes if pack in packs else 0
        freed: collections.Counter[int] = collections.Counter()
        for pack, users in self._named.items():
            if len(users) == 1 and pack in packs and pack not in pinned:
                freed[min(users)] += packs[pack]
        return [
            OwnerUsage(
                name=items[0].step,
                number=_number(items[0]),
                is_base=items[0].is_base,
                alone_bytes=alone[index],
                shared_bytes=needed[index] - alone[index],
                file_bytes=files[index],
                freed_bytes=freed[index] + files[index],
            )
            for index, items in enumerate(self._owners)
        ]

    def _leaf_usages(self) -> list[LeafUsage]:
        stored: collections.Counter[int] = collections.Counter()
        newest: collections.Counter[int] = collections.Counter()
        for key, record in self._records.items():
            stored[record.leaf] += record.length
            newest[record.leaf] += record.length if key in self._newest else 0
        found = [
            LeafUsage(
                item=item,
                path=path,
                stored_bytes=stored[leaf],
                newest_bytes=newest[leaf],
            )
            for (item, path), leaf in self._leaves.items()
            if leaf in stored
        ]
        return sorted(found, key=lambda leaf: -leaf.stored_bytes)


def _parted(
    files: Mapping[str, int], prefix: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Files whose names begin with `prefix`, without it; and the others."""
    inside = {
        name.removeprefix(prefix): size
        for name, size in files.items()
        if name.startswith(prefix)
    }
    return inside, {n: s for n, s in files.items() if not n.startswith(prefix)}


def _base_folder(item: Item) -> str:
    return item.key.removesuffix(f"/{MANIFEST_NAME}").removeprefix(f"{STORE_NAME}/")


def _step_folder(item: Item) -> str:
    """Folder of a step relative to the root; empty where it is the root."""
    folder = item.key.removesuffix(MANIFEST_NAME).rstrip("/")
    alone = item.place.root_url is None
    return folder if alone else folder.rpartition("/")[0]


def _number(item: Item) -> int | None:
    if item.manifest is not None and item.is_base:
        return item.manifest.step
    return item.place.step
