"""The items of a step copied: parts and packs of their own, then MANIFESTs.

Every part is held against the digest in its MANIFEST on the way. Does not belong here:
packs of a store (`packcopies`), the rest of the step's folder (`stepcopies`).
"""

from collections.abc import Mapping

from orbax_delta import archived, records, steps
from orbax_delta.errors import ConflictError, CorruptionError, StorageError
from orbax_delta.filecopies import inner, put
from orbax_delta.manifests import MANIFEST_NAME, Manifest, parse_manifest
from orbax_delta.packcopies import PackCopier, Span, records_of
from orbax_delta.places import SELF_CONTAINED_PACKS
from orbax_delta.store import Folder


def copy_items(origin: Folder, copied: Folder, items: Mapping[str, Manifest]) -> int:
    """Parts of all items, then their MANIFESTs; returns the bytes written.

    Args:
        origin: Folder of the step.
        copied: Where it goes to.
        items: MANIFESTs by the folder of their item in that of the step.

    Raises:
        ConflictError: The step is not there any more, or another one is there.
        CorruptionError: A file is not what its MANIFEST says.
        StorageError: The storage refused something.
    """
    written = 0
    for item, manifest in items.items():
        here, there = inner(origin, item), inner(copied, item)
        if manifest.self_contained:
            needed = needed_records(manifest, here)
            written += copy_own_packs(here, there, needed, strict=False)
        for part in manifest.parts:
            data = here.read(part.name)
            if data is None or records.digest(data).hex() != part.digest:
                what = "is missing" if data is None else "has another digest"
                raise CorruptionError(f"the part {here.url}{part.name} {what}")
            written += put(there, part.name, data)
    for item, manifest in items.items():
        here, there = inner(origin, item), inner(copied, item)
        data = here.read(MANIFEST_NAME)
        where = here.url + MANIFEST_NAME
        if data is None or parse_manifest(data, where=where).attempt != (
            manifest.attempt
        ):
            raise ConflictError(f"{where} was deleted or replaced meanwhile")
        written += _put_manifest(there, manifest, data)
    return written


def needed_records(manifest: Manifest, item: Folder) -> dict[str, set[Span]]:
    """Every pack that a MANIFEST names, with the records that its rows need.

    Raises:
        CorruptionError: A part is missing or damaged.
        FormatError: A part is none.
    """
    found = records_of(steps.read_rows(item, manifest))
    return {pack: found.get(pack, set()) for pack in manifest.packs}


def copy_own_packs(
    here: Folder, there: Folder, needed: Mapping[str, set[Span]], *, strict: bool
) -> int:
    """Copy the packs of a self-contained item; returns the bytes written."""
    copier = PackCopier(
        here.child(SELF_CONTAINED_PACKS), there.child(SELF_CONTAINED_PACKS)
    )
    return sum(copier.bring(needed, strict=strict))


def _put_manifest(folder: Folder, manifest: Manifest, data: bytes) -> int:
    if folder.create(MANIFEST_NAME, data):
        if folder.read(MANIFEST_NAME) != data:
            raise StorageError(f"{folder.url}{MANIFEST_NAME} does not read back")
        return len(data)
    there = steps.read_manifest(folder)
    if there is None or not archived.is_same_save(there, manifest):
        raise ConflictError(f"{folder.url} holds another step, which was left as it is")
    return 0
