"""What the processes of a job tell each other about one save, and what must be alike.

The primary announces what it is about to save and where; the others compare. Each votes
with what it has written, and the primary checks that it adds up to the whole state.
"""

import base64
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_delta import chunks, records
from orbax_delta.base import Base
from orbax_delta.errors import DisagreementError
from orbax_delta.leaves import Snapshot
from orbax_delta.manifests import LeafEntry, PartEntry
from orbax_delta.options import DeltaOptions
from orbax_delta.places import Place
from orbax_delta.reports import SaveReport
from orbax_delta.store import DeltaStore, Folder

# Network file systems show a new file late to those who have looked for it before.
_APPEARS_WITHIN_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.2

_LINE_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What the primary is about to save.

    Attributes:
        step: Name of the step.
        item_url: The item's folder, as the primary calls it.
        store_uuid: Store of the root; empty if the step is to be self-contained.
        base: Attempt of the save that the primary's rows come from; empty for none.
        options: Options that decide how leaves are cut and coded.
        key: Fingerprint of the key that it is sealed with; empty for none.
        outline: A short digest of each leaf's path, kind, shape and dtype.
    """

    step: str
    item_url: str
    store_uuid: str
    base: str
    options: Mapping[str, Any]
    key: str
    outline: str

    @classmethod
    def of(
        cls,
        place: Place,
        store: DeltaStore | None,
        base: Base,
        options: DeltaOptions,
        snapshot: Snapshot,
        key: str,
    ) -> "Announcement":
        """What this process would announce."""
        digests = (
            records.digest(line.encode("utf-8", "surrogatepass"))[:_LINE_BYTES]
            for line in snapshot.outline()
        )
        return cls(
            step=place.step_name,
            item_url=place.item_url,
            store_uuid=store.uuid if store else "",
            base=str((base.predecessor or {}).get("attempt", "")),
            options=options.shared(),
            key=key,
            outline=base64.b64encode(b"".join(digests)).decode(),
        )

    def require_same(self, primary: "Announcement", snapshot: Snapshot) -> None:
        """Whether this process is about to save what the primary is.

        Raises:
            DisagreementError: It is another step, another tree, or with other options.
        """
        if self.step != primary.step:
            raise DisagreementError(
                f"this process saves step {self.step} to {self.item_url} while the "
                f"primary saves step {primary.step} to {primary.item_url}. All "
                "processes must save the same steps in the same order"
            )
        if self.options != primary.options:
            differing = {
                name: (value, primary.options.get(name))
                for name, value in self.options.items()
                if value != primary.options.get(name)
            }
            raise DisagreementError(
                "the options of this process and of the primary differ: "
                + ", ".join(
                    f"{k} is {a!r} and {b!r}" for k, (a, b) in differing.items()
                )
                + ". Give all processes the same DeltaOptions"
            )
        if self.key != primary.key:
            own, theirs = (x.key or "none" for x in (self, primary))
            raise DisagreementError(
                f"this process encrypts with the key {own} (its fingerprint) and the "
                f"primary with {theirs}. Give all processes the same key"
            )
        if self.outline != primary.outline:
            raise DisagreementError(_difference(primary.outline, snapshot))


def _difference(outline: str, snapshot: Snapshot) -> str:
    theirs = base64.b64decode(outline)
    lines = snapshot.outline()
    for index, line in enumerate(lines):
        digest = records.digest(line.encode("utf-8", "surrogatepass"))[:_LINE_BYTES]
        if digest != theirs[index * _LINE_BYTES : (index + 1) * _LINE_BYTES]:
            found = f"the first leaf that differs here is {line}"
            break
    else:
        found = "all leaves here are alike there"
    return (
        f"the tree of this process is not that of the primary: {len(lines)} leaves "
        f"here, {len(theirs) // _LINE_BYTES} there; {found}. All processes must save "
        "trees of the same structure, shapes, dtypes and shardings"
    )


def shared_store(place: Place, uuid: str) -> DeltaStore | None:
    """The store that the primary saves to, as this process sees it.

    Raises:
        DisagreementError: This process does not see it.
    """
    if place.root_url is None or not uuid:
        return None
    deadline = time.monotonic() + _APPEARS_WITHIN_SECONDS
    while (store := DeltaStore.open(Folder(place.root_url))) is None:
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_AGAIN_SECONDS)
    if store is not None and store.uuid == uuid:
        return store
    found = "no store" if store is None else f"store {store.uuid}"
    raise DisagreementError(
        f"this process sees {found} in {place.root_url}, not the primary's store "
        f"{uuid}: the directory is not shared between the hosts. Save to a file system "
        "or bucket that all of them see under this name"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one process has written of a save.

    Attributes:
        part: Its part; what it says of packs counts in `packs`.
        packs: Names of the packs that its rows refer to.
        report: Its share of the save's report.
        cover: Measure of its chunks; see `chunks.cover`.
        features: What a reader of its rows must know.
    """

    part: PartEntry
    packs: Sequence[str]
    report: SaveReport
    cover: int
    features: Sequence[str] = ()

    def to_document(self) -> Mapping[str, Any]:
        """JSON document."""
        return dataclasses.asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Ballot":
        """The ballot that another process has cast."""
        return cls(
            part=PartEntry(**document["part"]),
            packs=document["packs"],
            report=SaveReport.from_document(document["report"]),
            cover=document["cover"],
            features=document["features"],
        )


def count(
    ballots: Sequence[Ballot], leaves: Sequence[LeafEntry]
) -> tuple[list[PartEntry], list[str]]:
    """The parts and packs of a whole save.

    Raises:
        DisagreementError: Some of the state was written by no process, or by several.
    """
    whole = chunks.cover(
        (index, chunks.whole(leaf.shape))
        for index, leaf in enumerate(leaves)
        if leaf.dtype
    )
    if (sum(ballot.cover for ballot in ballots) - whole) % chunks.COVER_MODULUS:
        raise DisagreementError(
            "the chunks that the processes have written do not make up the state: they "
            "do not remember the same earlier saves. All of them forget these now; "
            "save again"
        )
    packs = sorted({pack for ballot in ballots for pack in ballot.packs})
    position = {name: index for index, name in enumerate(packs)}
    parts = [
        dataclasses.replace(
            ballot.part, packs=tuple(position[pack] for pack in ballot.packs)
        )
        for ballot in ballots
    ]
    return parts, packs
