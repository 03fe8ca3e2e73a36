"""Writing a committed step anew, with other records for some of its chunks.

The order is that of a save: pin, packs, part, MANIFEST; a prune beside it sees the same
signs. The one difference: the MANIFEST takes the place of another, and of no other, and
the files of the old attempt go only after that.
"""

import contextlib
import dataclasses
import secrets
from collections.abc import Iterable, Mapping, Sequence

from orbax_delta import bases, codecs, owners, parts, records
from orbax_delta.chunks import Box
from orbax_delta.codecs import Bytes, Form
from orbax_delta.dtypes import Rule
from orbax_delta.errors import ConflictError, StorageError
from orbax_delta.manifests import (
    MANIFEST_NAME,
    Manifest,
    PartEntry,
    encode_manifest,
    parse_manifest,
)
from orbax_delta.marks import Mark, usable_packs
from orbax_delta.options import DeltaOptions
from orbax_delta.packs import PackWriter
from orbax_delta.parts import Ref, Row
from orbax_delta.ranges import Packs
from orbax_delta.reader import Request
from orbax_delta.records import Record
from orbax_delta.steps import Step
from orbax_delta.store import DeltaStore, Folder

_PROCESS = 0

Written = dict[tuple[bytes, int], Ref]
"""Records made so far, by digest and word size of their content."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """A chunk with its content, to be stored anew."""

    request: Request
    content: Bytes


def rewrite(
    store: DeltaStore,
    step: Step,
    renewed: Iterable[Renewed],
    *,
    as_base: bool,
    written: Written,
) -> None:
    """Store some chunks of a step anew and publish the step with those records.

    Every other record is one that the step names already.

    Args:
        store: The store of the step.
        step: The step, or the kept base.
        renewed: Chunks with their content, whose digests have been checked.
        as_base: It is a base: it gets a folder of its new attempt.
        written: Records that steps before it were given; those of this one are added.

    Raises:
        ConflictError: The step changed or went meanwhile, or a prune took this for
            dead; the step is as it was.
        StorageError: The storage refused something; the step is as it was.
    """
    attempt = secrets.token_bytes(16)
    pin = f"{attempt.hex()}-p{_PROCESS}"
    old = step.place.folder
    new = store.bases.child(attempt.hex()) if as_base else old
    shared = {ref.pack for ref in written.values() if ref.pack}
    packs = sorted(shared.union(step.manifest.packs))
    store.pins.write(pin, Mark(owner=owners.this_process(), packs=packs).encode())
    try:
        _forget_doomed(store, written)
        fresh = _put_records(step.packs, attempt, renewed, written)
        rows = [_renewed(row, fresh.get((row.leaf, row.box))) for row in step.rows]
        # A write would make the folder of a deleted step again.
        _require_unchanged(old, step.manifest)
        manifest = _put_part(new, attempt, step, rows)
        try:
            _publish(store, old, new, step.manifest, manifest, pin)
        except ConflictError:
            _take_back(new, manifest)
            raise
    finally:
        # Nothing renames the step now; its MANIFEST keeps the packs, or they are dead.
        with contextlib.suppress(StorageError):
            store.pins.delete(pin)
    if as_base:
        bases.release(store, step.manifest.attempt)
    else:
        for part in step.manifest.parts:
            old.delete(part.name)


def _renewed(row: Row, ref: Ref | None) -> Row:
    if ref is None:
        return row
    return dataclasses.replace(row, rule=Rule.NONE, refs=(ref,), since=0, age=0)


def _forget_doomed(store: DeltaStore, written: Written) -> None:
    """As a save does after its pin: build on nothing that is being deleted."""
    usable = usable_packs(store)
    for key, ref in list(written.items()):
        if ref.pack and ref.pack not in usable:
            del written[key]


def _put_records(
    packs: Packs, attempt: bytes, renewed: Iterable[Renewed], written: Written
) -> Mapping[tuple[int, Box], Ref]:
    """Full records of the chunks, one for each content."""
    writer = PackWriter(
        packs,
        attempt=attempt,
        process=_PROCESS,
        pack_bytes=DeltaOptions().pack_size(local=packs.folder.is_local, state_bytes=0),
    )
    refs: dict[tuple[int, Box], Ref] = {}
    try:
        for chunk in renewed:
            row, word_bytes = chunk.request.row, chunk.request.leaf.element.word_bytes
            key = row.digest, word_bytes
            if key not in written:
                written[key] = _put_record(writer, row, chunk.content, word_bytes)
            refs[row.leaf, row.box] = written[key]
        writer.finish()
    except BaseException:
        # As a save does: nothing may land after the error is known.
        with contextlib.suppress(StorageError):
            writer.drain()
        raise
    return refs


def _put_record(writer: PackWriter, row: Row, content: Bytes, word_bytes: int) -> Ref:
    word = codecs.constant_word(content, word_bytes)
    if word is not None:
        return Ref(form=Form.CONSTANT, word=word)
    record = Record(
        form=Form.PLANES,
        word_bytes=word_bytes,
        content_bytes=content.size,
        content_digest=row.digest,
        payload=codecs.encode_full(content, word_bytes),
    ).encode()
    pack, offset, length = writer.add((record,))
    return Ref(form=Form.PLANES, pack=pack, offset=offset, length=length)


def _put_part(
    folder: Folder, attempt: bytes, step: Step, rows: Sequence[Row]
) -> Manifest:
    packs = sorted({ref.pack for row in rows for ref in row.refs if ref.pack})
    key = step.packs.key
    data = parts.encode_part(attempt, rows, packs, process=_PROCESS, key=key)
    part = PartEntry(
        name=f"part-{attempt.hex()}-p{_PROCESS}",
        length=len(data),
        digest=records.digest(data).hex(),
        rows=len(rows),
        packs=tuple(range(len(packs))),
    )
    folder.write(part.name, data)
    if folder.read(part.name) != data:
        raise StorageError(f"{folder.url}{part.name} does not read back as written")
    encryption = {**step.manifest.encryption}
    if key is not None:
        encryption["check"] = key.check(attempt)
    return dataclasses.replace(
        step.manifest,
        attempt=attempt.hex(),
        packs=packs,
        parts=(part,),
        encryption=encryption,
    )


def _require_unchanged(old: Folder, before: Manifest) -> bytes:
    """The MANIFEST that is to be replaced, if it is still the one that was read."""
    data = old.read(MANIFEST_NAME)
    where = old.url + MANIFEST_NAME
    if data is None or parse_manifest(data, where=where).attempt != before.attempt:
        raise ConflictError(
            f"{where} was deleted or replaced meanwhile; it was left as it is"
        )
    return data


def _take_back(folder: Folder, manifest: Manifest) -> None:
    """Remove the parts, and the folders of a step that was deleted before they came."""
    with contextlib.suppress(StorageError):
        for part in manifest.parts:
            folder.delete(part.name)
        folder.remove_if_empty()
        Folder(folder.url.rstrip("/").rpartition("/")[0]).remove_if_empty()


def _publish(
    store: DeltaStore,
    old: Folder,
    new: Folder,
    before: Manifest,
    manifest: Manifest,
    pin: str,
) -> None:
    data, written = _require_unchanged(old, before), encode_manifest(manifest)
    in_place = new.url == old.url
    _exchange(new, data if in_place else None, written)
    fresh = set(manifest.packs).difference(before.packs)
    # A prune that broke the pin has seen either MANIFEST, and may be deleting what only
    # the other one names: the old one comes back only if it is that of the fresh packs.
    if store.pins.read(pin) is None and not fresh <= usable_packs(store):
        if in_place:
            _exchange(old, written, data)
        else:
            new.delete(MANIFEST_NAME)
        raise ConflictError(
            f"{old.url}{MANIFEST_NAME}: its pin was removed by a prune; the step was "
            "left as it was"
        )


def _exchange(folder: Folder, before: bytes | None, data: bytes) -> None:
    """Put a MANIFEST in the place of another, and of no other."""
    if not folder.create(MANIFEST_NAME, data, instead_of=before):
        raise ConflictError(
            f"{folder.url}{MANIFEST_NAME} was deleted or replaced meanwhile; it was "
            "left as it is"
        )
