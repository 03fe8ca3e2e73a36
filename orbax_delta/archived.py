"""Steps that were moved to an archive: the file that they leave behind.

Where an item of a step was, ARCHIVED says in which archive it is now. An archive is a
root like others, so that from there on a reader goes on as in any root. Does not belong
here: moving a step (`archives`), reading its MANIFEST (`steps`).
"""

from orbax_delta.errors import DeltaError, NotFoundError
from orbax_delta.manifests import Manifest
from orbax_delta.places import Place, locate
from orbax_delta.store import Folder
from orbax_delta.storefiles import ARCHIVED_FILE, Archived, parse_archived

MOST_MOVES = 3
"""Archives in a row that a reader follows: one may have been archived in its turn."""


def read(item: Folder) -> Archived | None:
    """What ARCHIVED in an item's folder says; None where there is none.

    Raises:
        FormatError: It is no such file.
        CorruptionError: Its digest does not match.
        UnsupportedVersionError: A newer format wrote it.
    """
    data = item.read(ARCHIVED_FILE)
    return None if data is None else parse_archived(data, item.url + ARCHIVED_FILE)


def place_of(link: Archived) -> Place:
    """Where the item lies that a link leads to."""
    return locate(f"{link.archive.rstrip('/')}/{link.path}")


def saved_us(manifest: Manifest) -> int:
    """When a step was saved, in microseconds since 1970."""
    return round(manifest.wall_time * 1e6)


def leads_to(link: Archived, manifest: Manifest) -> bool:
    """Whether it is that save which a link is about, repaired or not."""
    same_try = link.attempt == manifest.attempt
    same_time = link.saved_us == saved_us(manifest)
    return link.store_uuid == manifest.store_uuid and (same_try or same_time)


def is_same_save(one: Manifest, other: Manifest) -> bool:
    """Whether two MANIFESTs are of one save: a repair changes the attempt alone."""
    known_by = [
        (m.store_uuid, m.item, m.step, m.save_index, saved_us(m)) for m in (one, other)
    ]
    return one.attempt == other.attempt or known_by[0] == known_by[1]


def lost(place: Place, link: Archived, found: str) -> NotFoundError:
    """What to tell where a link leads to nothing."""
    return NotFoundError(f"{_was_moved(place, link)}, {found}. {_remedy(place, link)}")


def unreachable(place: Place, link: Archived, error: DeltaError) -> DeltaError:
    """The error of an archive, with the step that is wanted of it."""
    return type(error)(
        f"{_was_moved(place, link)}, which cannot be read: {error}. "
        f"{_remedy(place, link)}"
    )


def _was_moved(place: Place, link: Archived) -> str:
    return f"{place.label} was moved to the archive {link.archive} ({link.path})"


def _remedy(place: Place, link: Archived) -> str:
    root = place.root_url or place.item_url.rstrip("/").rpartition("/")[0]
    step = link.path.partition("/")[0]
    return (
        "Make the archive reachable there; if it lies elsewhere now, `orbax-delta "
        f"archive {root} ELSEWHERE --steps {step} --move` tells the step so"
    )
