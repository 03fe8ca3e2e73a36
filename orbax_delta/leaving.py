"""What a step leaves behind that was moved to an archive: links, and no packs or parts.

A link comes before anything goes, and the MANIFEST goes first: so at any moment either
that is there, or a link to where it is. Does not belong here: following a link
(`archived`).
"""

from orbax_delta import archived, registry, steps, storefiles
from orbax_delta.archiveplans import ItemPlan, StepPlan
from orbax_delta.errors import ConflictError, InvalidInputError
from orbax_delta.manifests import MANIFEST_NAME, PACK_NAME, PART_NAME
from orbax_delta.places import SELF_CONTAINED_PACKS
from orbax_delta.store import Folder
from orbax_delta.storefiles import ARCHIVED_FILE, Archived


def leave(step: StepPlan, target: Folder) -> None:
    """Leave links to the archive, then delete what they stand for.

    Raises:
        ConflictError: The step was deleted or saved again meanwhile, here or there.
        InvalidInputError: The archive is the root itself under another name.
        StorageError: The storage refused something; the step restores all the same.
    """
    links = [_link_to(target, step, item) for item in step.items]
    require_unchanged(step)
    for item, link in zip(step.items, links):
        if item.link != link:
            _write(item, link)
            _require_apart(item, target.child(link.path))
    for item in step.items:
        if item.manifest is not None:
            item.source.delete(MANIFEST_NAME)
    for item, link in zip(step.items, links):
        _clear(item, link)


def _link_to(target: Folder, step: StepPlan, item: ItemPlan) -> Archived:
    """A link to an item in the archive, as it is there now."""
    path = f"{step.name}/{item.path}".rstrip("/")
    found = steps.read_manifest(target.child(path))
    if found is None or not archived.is_same_save(found, item.in_force):
        what = "replaced" if found else "deleted"
        raise ConflictError(f"{target.url}{path}/{MANIFEST_NAME} was {what} meanwhile")
    return Archived(
        archive=registry.location(target),
        path=path,
        store_uuid=found.store_uuid,
        attempt=found.attempt,
        saved_us=archived.saved_us(found),
    )


def _write(item: ItemPlan, link: Archived) -> None:
    item.source.replace(ARCHIVED_FILE, storefiles.archived_document(link))
    try:
        _require_unchanged(item)
    except ConflictError:
        # It has made the folder of a deleted step again.
        item.source.delete(ARCHIVED_FILE)
        item.source.remove_if_empty()
        Folder(item.source.url.rstrip("/").rpartition("/")[0]).remove_if_empty()
        raise


def _require_apart(item: ItemPlan, there: Folder) -> None:
    """Whether the archive lies elsewhere, before the only copy is deleted.

    A mount and a bucket, or two mounts, can be one place under two names. A listing
    tells, where a cache could answer for a single name.
    """
    if item.manifest is not None and ARCHIVED_FILE in there.names():
        item.source.delete(ARCHIVED_FILE)
        raise InvalidInputError(
            f"{item.source.url} and {there.url} are one place under two names, so "
            "nothing was deleted; choose another folder for the archive"
        )


def _clear(item: ItemPlan, link: Archived) -> None:
    """Delete what a link stands for, and what a killed run has left of it.

    By their names, for another step may be saved to that folder just now.
    """
    attempts = {link.attempt, *([item.manifest.attempt] if item.manifest else ())}
    for key in item.source.names():
        name = key.removeprefix(f"{SELF_CONTAINED_PACKS}/")
        named = PART_NAME.fullmatch(name) or PACK_NAME.fullmatch(name)
        if named and named[1] in attempts:
            item.source.delete(key)
    item.source.child(SELF_CONTAINED_PACKS).remove_if_empty()


def require_unchanged(step: StepPlan) -> None:
    """Whether the step is still what was planned.

    Raises:
        ConflictError: It was deleted, saved again or repaired.
    """
    for item in step.items:
        _require_unchanged(item)


def _require_unchanged(item: ItemPlan) -> None:
    if item.manifest is None:
        return
    found = steps.read_manifest(item.source)
    if found is None or found.attempt != item.manifest.attempt:
        what = "replaced" if found else "deleted"
        raise ConflictError(f"{item.source.url}{MANIFEST_NAME} was {what} meanwhile")
