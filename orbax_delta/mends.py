"""What a repair can do about what a verification has found, each with its action.

Planners look and change nothing; what they yield changes something when it is called.
Chunks in damaged packs are stored anew, from their own records where these still
decode and from other lists with the same digest where not; lost files of a step come
from its kept base and the other way round; the small files are made anew.
"""

import dataclasses
import functools
import secrets
from collections.abc import Callable, Iterator, Sequence

from orbax_delta import bases, healing, owners, reader, registry, rewriting, steps
from orbax_delta.background import pool
from orbax_delta.check import Examination
from orbax_delta.errors import (
    ConflictError,
    CorruptionError,
    DeltaError,
    FormatError,
    StorageError,
    UnsupportedVersionError,
)
from orbax_delta.listing import Item
from orbax_delta.manifests import MANIFEST_NAME, PART_NAME
from orbax_delta.marks import Mark, parse_mark, warned_of
from orbax_delta.options import DeltaOptions
from orbax_delta.places import locate
from orbax_delta.reader import Request
from orbax_delta.rewriting import Renewed, Written
from orbax_delta.sealing import fingerprint
from orbax_delta.steps import Step
from orbax_delta.store import COMMIT_MARKER, STORE_NAME, Folder
from orbax_delta.storefiles import (
    ROOT_FILE,
    STORE_FILE,
    root_document,
    store_document,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """One thing that a repair does.

    Attributes:
        what: What, in words.
        file: The file or folder at fault, relative to the root.
        steps: Steps that it is about.
    """

    what: str
    file: str
    steps: tuple[str, ...] = ()


Action = tuple[Mend, Callable[[], object]]
"""What is to be done, and doing it."""


def packs_of(item: Item) -> Folder | None:
    """Where the packs of an item lie, if its MANIFEST and its store can be read."""
    if item.manifest is None:
        return None
    try:
        return steps.packs_of(item.manifest, item.place)
    except DeltaError:
        return None


# --- small files ----------------------------------------------------------------------


def small_files(found: Examination) -> Iterator[Action]:
    """STORE.json, its marker, and marks that nobody can read."""
    store = found.root.store
    astray = {
        item.manifest.store_uuid
        for item in found.root.everything
        # What needs a shared store is no reason to make one here.
        if item.manifest
        and bool(item.manifest.root_uuid) == store.shared
        and packs_of(item) is None
    }
    # Where nothing of a store lies there is none to mend, as in a step's own folder.
    # What needs a pack that lies here is of this store, names being random, and so is
    # a kept base; another step may have come from elsewhere.
    packs = set(store.packs.names())
    of_store = {
        item.manifest.store_uuid
        for item in found.root.everything
        if item.manifest and (item.is_base or not packs.isdisjoint(item.manifest.packs))
    }
    wanted = of_store or astray
    if len(wanted) == 1 and not store.uuid and store.folder.names():
        (uuid,) = wanted
        yield (
            Mend(
                what="written anew with the identity that its MANIFESTs name",
                file=found.file(store.url + STORE_FILE),
            ),
            lambda: store.folder.replace(
                STORE_FILE, store_document(uuid, shared=store.shared)
            ),
        )
    yield from _ties(found)
    if store.packs.names() and store.folder.read(COMMIT_MARKER) != b"":
        yield (
            Mend(what="written anew", file=found.file(store.url + COMMIT_MARKER)),
            lambda: store.folder.replace(COMMIT_MARKER, b""),
        )
    for folder in (store.pins, store.condemned):
        for name in _unreadable_marks(folder):
            # A save whose pin goes fails and is repeated; no step is harmed.
            mend = Mend(
                what="deleted, for nobody can tell what it is about",
                file=found.file(folder.url + name),
            )
            yield mend, functools.partial(folder.delete, name)


def _ties(found: Examination) -> Iterator[Action]:
    """What ties a root to a shared store: ROOT.json, its marker, the entry there."""
    store = found.root.store
    below = store.root.child(STORE_NAME)
    if store.link is None and below.read(STORE_FILE) is None:
        manifests = [item.manifest for item in found.root.items if item.manifest]
        link = registry.lost_link(store.root, manifests)
        if link is not None:
            document = root_document(link)
            yield (
                Mend(
                    what="written anew as its MANIFESTs and the registry agree",
                    file=found.file(below.url + ROOT_FILE),
                ),
                lambda: below.replace(ROOT_FILE, document),
            )
    elif store.link is not None:
        if below.read(COMMIT_MARKER) is None:
            yield (
                Mend(what="written anew", file=found.file(below.url + COMMIT_MARKER)),
                lambda: below.replace(COMMIT_MARKER, b""),
            )
        if store.uuid and registry.entry_of(store) is None:
            what = "registered with the shared store: no prune counted with this root"
            file = found.file(store.roots.url + store.root_uuid)
            yield Mend(what=what, file=file), lambda: registry.register(store)


def _unreadable_marks(folder: Folder) -> Iterator[str]:
    for name in folder.names():
        data = None if name[0] == "." else folder.read(name)
        try:
            if data is not None:
                parse_mark(data, where=folder.url + name)
        except UnsupportedVersionError:
            raise
        except (CorruptionError, FormatError):
            yield name


# --- files of a step that its base has, and the other way round -----------------------


def lost_files(found: Examination) -> Iterator[Action]:
    """MANIFESTs and parts that a copy of the same attempt can replace."""
    damage = {item.key: _damage(item) for item in found.root.everything}
    whole = {
        item.manifest.attempt: item
        for item in found.root.everything
        if item.manifest is not None and damage[item.key] is None
    }
    for item in found.root.everything:
        error = damage[item.key]
        if error is None or not found.is_there(item):
            continue
        copies = (whole.get(attempt) for attempt in _attempts_of(item))
        source = next((one for one in copies if one and _belongs(one, item)), None)
        if source is not None:
            yield _copy(found, source, item)
        elif item.is_base and not isinstance(error, StorageError):
            # What the storage does not give now may be whole, and come back.
            yield _drop(found, item)


def _damage(item: Item) -> DeltaError | None:
    """What is wrong with MANIFEST and parts; not the store's fault that it is lost."""
    if item.manifest is None:
        return item.error
    try:
        steps.read_rows(item.place.folder, item.manifest)
    except DeltaError as error:
        return error
    return None


def _attempts_of(item: Item) -> list[str]:
    """Attempts that may have written a step: by its MANIFEST, by its part's name."""
    if item.is_base:
        return [item.step.rpartition("/")[2]]
    names = map(PART_NAME.fullmatch, item.place.folder.names())
    by_part = {match[1] for match in names if match}
    # A MANIFEST can be another save's; with parts of several nobody can tell.
    return [
        *([item.manifest.attempt] if item.manifest else ()),
        *(by_part if len(by_part) == 1 else ()),
    ]


def _belongs(source: Item, item: Item) -> bool:
    """Whether a MANIFEST is of the step and item that a folder is named for.

    With files of another step that were copied over it, a folder must not become that
    one whole: it would restore as what its name does not say.
    """
    # What the folder is named, whatever kind of MANIFEST lies in it.
    manifest, place = source.manifest, locate(item.place.item_url)
    if manifest is None or item.is_base:
        return item.is_base
    known = None not in (place.step, manifest.step)
    return place.item == manifest.item and not (known and place.step != manifest.step)


def _copy(found: Examination, source: Item, item: Item) -> Action:
    def copy() -> None:
        if not found.is_there(item):
            raise ConflictError("it was deleted meanwhile; nothing was written")
        origin, folder = source.place.folder, item.place.folder
        parts = source.manifest.parts if source.manifest else ()
        for name in (*(part.name for part in parts), MANIFEST_NAME):
            data = origin.read(name)
            if data is not None:
                folder.replace(name, data)

    what = f"files copied from {source.step}, which are of the same save"
    return Mend(what=what, file=item.key, steps=(item.step,)), copy


def _drop(found: Examination, item: Item) -> Action:
    name = item.step.rpartition("/")[2]
    mend = Mend(what="base dropped: it does not restore", file=item.step)
    return mend, lambda: bases.release(found.root.store, name)


# --- chunks in damaged packs ----------------------------------------------------------


def damaged_records(found: Examination) -> Iterator[Action]:
    """Steps with chunks in damaged packs, and a warning to jobs about those packs."""
    store = found.root.store
    damaged = found.damaged_packs(store.packs.url)
    written: dict[str, Written] = {}
    for item in found.root.everything:
        step = _open(item)
        # What is still being saved is not touched, nor what has its packs elsewhere.
        if step is None or not item.finished or step.packs.url != store.packs.url:
            continue
        affected = [
            request
            for request in _requests(step)
            if found.fault(step.packs, request)
            or any(ref.pack in damaged for ref in request.row.refs)
        ]
        if affected:
            # What one key has sealed no step of another can refer to.
            of_key = written.setdefault(fingerprint(step.packs.key), {})
            yield from _renew(found, item, step, affected, of_key)
    for pack in sorted(damaged - warned_of(store.condemned)):
        yield (
            Mend(
                what="damaged pack condemned: jobs that run write anew what they need "
                "of it, and `prune` deletes it once no step names it",
                file=found.file(store.packs.url + pack),
            ),
            functools.partial(_condemn, found, [pack]),
        )


def _open(item: Item) -> Step | None:
    try:
        return steps.open_step(item.place)
    except DeltaError:
        return None  # told by the verification, or deleted meanwhile


def _requests(step: Step) -> list[Request]:
    leaves = step.manifest.leaves
    return [Request(leaf=leaves[row.leaf], row=row) for row in step.rows]


def _renew(
    found: Examination,
    item: Item,
    step: Step,
    affected: Sequence[Request],
    written: Written,
) -> Iterator[Action]:
    failing = [request for request in affected if found.fault(step.packs, request)]
    healed = healing.find(found.root, failing)
    lost = [r for r in failing if healing.wanted(r) not in healed]
    count = len(affected) - len(lost)
    if not count:
        return

    def contents() -> Iterator[Renewed]:
        sound = [
            request for request in affected if not found.fault(step.packs, request)
        ]
        with pool(DeltaOptions().worker_count) as executor:
            for got in reader.fetch(
                step.packs, sound, executor=executor, count=reader.ReadCount()
            ):
                if got.content is not None:
                    yield Renewed(request=got.request, content=got.content)
        for request in failing:
            one = healed.get(healing.wanted(request))
            if one is not None:
                yield Renewed(request=request, content=one.read())

    what = f"{count} chunks stored anew"
    if healed:
        sources = ", ".join(sorted({one.step for one in healed.values()}))
        what += f", {len(failing) - len(lost)} of them from records of {sources}"
    if lost:
        what += f"; {len(lost)} lost (first: {lost[0].where})"
    yield (
        Mend(what=what, file=item.key, steps=(item.step,)),
        lambda: rewriting.rewrite(
            found.root.store,
            step,
            contents(),
            as_base=item.is_base,
            written=written,
        ),
    )


def _condemn(found: Examination, packs: Sequence[str]) -> None:
    """Keep jobs from building on packs that are damaged; a prune removes the mark."""
    mark = Mark(owner=owners.NOBODY, packs=packs)
    found.root.store.condemned.write(secrets.token_hex(16), mark.encode())
