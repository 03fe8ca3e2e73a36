"""What a step leaves behind that was moved to an archive: links, and no packs or parts.

A link comes before anything goes, and the MANIFEST goes first: so at any moment either
that is there, or a link to where it is. Does not belong here: following a link
(`archived`).
"""

from orbax_delta import archived, registry, steps, storefiles
from orbax_delta.archiveplans import ItemPlan, StepPlan
from orbax_delta.errors import ConflictError
from orbax_delta.manifests import MANIFEST_NAME, PART_NAME, Manifest
from orbax_delta.places import SELF_CONTAINED_PACKS
from orbax_delta.store import Folder
from orbax_delta.storefiles import ARCHIVED_FILE, Archived


def leave(step: StepPlan, target: Folder) -> None:
    """Leave links to the archive, then delete what they stand for.

    Raises:
        ConflictError: The step was deleted or saved again meanwhile, here or there.
        StorageError: The storage refused something; the step restores all the same.
    """
    location = registry.location(target)
    links = []
    for item in step.items:
        path = f"{step.name}/{item.path}".rstrip("/")
        found = steps.read_manifest(target.child(path))
        if found is None:
            raise ConflictError(
                f"{target.url}{path}/{MANIFEST_NAME} was deleted meanwhile"
            )
        links.append(_link(location, path, found))
    require_unchanged(step)
    for item, link in zip(step.items, links):
        if item.link != link:
            item.source.replace(ARCHIVED_FILE, storefiles.archived_document(link))
    for item in step.items:
        item.source.delete(MANIFEST_NAME)
    for item in step.items:
        _clear(item)


def _link(location: str, path: str, manifest: Manifest) -> Archived:
    return Archived(
        archive=location,
        path=path,
        store_uuid=manifest.store_uuid,
        attempt=manifest.attempt,
        saved_us=archived.saved_us(manifest),
    )


def _clear(item: ItemPlan) -> None:
    """Delete what a link stands for, and what a killed run has left of it."""
    for name in item.source.names():
        own_pack = name.startswith(f"{SELF_CONTAINED_PACKS}/")
        if own_pack or PART_NAME.fullmatch(name):
            item.source.delete(name)
    item.source.child(SELF_CONTAINED_PACKS).remove_if_empty()


def require_unchanged(step: StepPlan) -> None:
    """Whether the step is still what was planned.

    Raises:
        ConflictError: It was deleted, saved again or repaired.
    """
    for item in step.items:
        if item.manifest is None:
            continue
        found = steps.read_manifest(item.source)
        if found is None or found.attempt != item.manifest.attempt:
            what = "replaced" if found else "deleted"
            raise ConflictError(
                f"{item.source.url}{MANIFEST_NAME} was {what} meanwhile"
            )
