"""Writing a committed step anew, with other records for some of its chunks.

The order is that of a save: pin, packs, part, MANIFEST; a prune beside it sees the same
signs. The one difference: the MANIFEST takes the place of another, so it is read back,
and the files of the old attempt go only after that.
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
from orbax_delta.marks import Mark, read_marks
from orbax_delta.options import DeltaOptions
from orbax_delta.packs import PackWriter
from orbax_delta.parts import Ref, Row
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
    shared = {ref.pack for ref in written.values() if ref.pack}
    mark = Mark(
        owner=owners.this_process(), packs=sorted(shared.union(step.manifest.packs))
    )
    store.pins.write(pin, mark.encode())
    try:
        _forget_doomed(store, written)
        fresh = _put_records(store, attempt, renewed, written)
        rows = [
            dataclasses.replace(
                row, rule=Rule.NONE, refs=(fresh[row.leaf, row.box],), since=0, age=0
            )
            if (row.leaf, row.box) in fresh
            else row
            for row in step.rows
        ]
        old = Folder(step.place.item_url)
        new = store.bases.child(attempt.hex()) if as_base else old
        manifest = _put_part(new, attempt, step.manifest, rows)
        _publish(store, old, new, step.manifest, manifest, pin)
    finally:
        # Nothing renames the step now; its MANIFEST keeps the packs, or they are dead.
        with contextlib.suppress(StorageError):
            store.pins.delete(pin)
    if as_base:
        bases.release(store, step.manifest.attempt)
    else:
        for part in step.manifest.parts:
            old.delete(part.name)


def _forget_doomed(store: DeltaStore, written: Written) -> None:
    """As a save does after its pin: build on nothing that is being deleted."""
    condemned = read_marks(store.condemned).values()
    usable = set(store.packs.names()).difference(
        pack for mark in condemned for pack in mark.packs
    )
    for key, ref in list(written.items()):
        if ref.pack and ref.pack not in usable:
            del written[key]


def _put_records(
    store: DeltaStore, attempt: bytes, renewed: Iterable[Renewed], written: Written
) -> Mapping[tuple[int, Box], Ref]:
    """Full records of the chunks, one for each content."""
    writer = PackWriter(
        store.packs,
        attempt=attempt,
        process=_PROCESS,
        pack_bytes=DeltaOptions().pack_bytes,
    )
    refs: dict[tuple[int, Box], Ref] = {}
    for chunk in renewed:
        row, word_bytes = chunk.request.row, chunk.request.leaf.element.word_bytes
        key = row.digest, word_bytes
        if key not in written:
            written[key] = _put_record(writer, row, chunk.content, word_bytes)
        refs[row.leaf, row.box] = written[key]
    writer.finish()
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
    pack, offset = writer.add(record)
    return Ref(form=Form.PLANES, pack=pack, offset=offset, length=len(record))


def _put_part(
    folder: Folder, attempt: bytes, manifest: Manifest, rows: Sequence[Row]
) -> Manifest:
    packs = sorted({ref.pack for row in rows for ref in row.refs if ref.pack})
    data = parts.encode_part(attempt, rows, packs)
    part = PartEntry(
        name=f"part-{attempt.hex()}-p{_PROCESS}",
        length=len(data),
        digest=records.digest(data).hex(),
        rows=len(rows),
    )
    folder.write(part.name, data)
    if folder.read(part.name) != data:
        raise StorageError(f"{folder.url}{part.name} does not read back as written")
    return dataclasses.replace(
        manifest, attempt=attempt.hex(), packs=packs, parts=(part,)
    )


def _publish(
    store: DeltaStore,
    old: Folder,
    new: Folder,
    before: Manifest,
    manifest: Manifest,
    pin: str,
) -> None:
    data = old.read(MANIFEST_NAME)
    where = old.url + MANIFEST_NAME
    if data is None or parse_manifest(data, where=where).attempt != before.attempt:
        raise ConflictError(
            f"{where} was deleted or replaced meanwhile; it was left as it is"
        )
    new.replace(MANIFEST_NAME, encode_manifest(manifest))
    if store.pins.read(pin) is None:
        if new.url == old.url:
            old.replace(MANIFEST_NAME, data)
        else:
            new.delete(MANIFEST_NAME)
        raise ConflictError(
            f"{where}: its pin was removed by a prune; the step was left as it was"
        )
