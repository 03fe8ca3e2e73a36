"""What one process writes of a save: its chunks into packs, its rows into a part.

Cut, compare, code, put. Does not belong here: what the other processes do, pins, the
MANIFEST.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping, Sequence, Set

from orbax_delta import (
    changes,
    chunks,
    codecs,
    coding,
    device,
    following,
    lossy,
    parts,
    reader,
    recall,
    records,
    renewal,
    selection,
    trust,
)
from orbax_delta.agreement import Ballot
from orbax_delta.background import (
    Pool,
    Stopwatch,
    batches,
    ordered_map,
    pool,
)
from orbax_delta.base import Base, Entry
from orbax_delta.blocking import SaveRequest
from orbax_delta.changes import Cut, Finding, Status
from orbax_delta.chunks import Box
from orbax_delta.errors import DeltaError
from orbax_delta.kin import Kin
from orbax_delta.leaves import Snapshot
from orbax_delta.manifests import LeafEntry, PartEntry
from orbax_delta.options import DeltaOptions
from orbax_delta.packs import PackWriter
from orbax_delta.parts import Row
from orbax_delta.ranges import Packs
from orbax_delta.reports import SaveReport, chain_lengths
from orbax_delta.rows import SaveRows
from orbax_delta.store import Folder

_BLOCK_BYTES = codecs.BLOCK_BYTES
_LITTLE_OF_A_PACK = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a process has written.

    Attributes:
        ballot: What it votes for the save with.
        stored: Every chunk that it holds, as the next base knows them: leaf, box, and
            its entry unless another process writes it.
        layouts: Name of the layout of each leaf, by name of the leaf.
        pack_sizes: Bytes of packs that it refers to, as far as known.
        coded_bytes: Raw size of what was coded for it.
    """

    ballot: Ballot
    stored: Sequence[tuple[LeafEntry, Box, Entry | None]]
    layouts: Mapping[str, str]
    pack_sizes: Mapping[str, int]
    coded_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShareWriter:
    """One try of one process; its names are used by no other.

    Attributes:
        request: The save.
        taken: Its state.
        attempt: The random bits that name the attempt.
        base: What is stored already; it hears which entries change.
        kin: What other runs and items have stored.
        elsewhere: Packs that other runs need.
        packs: Where the records lie.
        item: Folder of the item.
        watch: Gets the time of each stage.
    """

    request: SaveRequest
    taken: Snapshot
    attempt: bytes
    base: Base
    kin: Kin
    elsewhere: Set[str]
    packs: Packs
    item: Folder
    watch: Stopwatch

    def write(self) -> Share:
        """Write it; on return it is durable.

        Raises:
            StorageError: The storage refused something; nothing is under way any more.
            DeltaError: Another process has given up.
        """
        with pool(self.request.options.worker_count) as executor:
            # Beside the writing: the first save has most to do, and no other waits.
            selected, where = self.request.selection, self.request.place.label
            for_next = [
                executor.submit(trust.prove, selected.proofs, where),
                executor.submit(device.compile_all, selected.programs),
            ]
            cut, stored, sizes = self._store_chunks(executor)
            for task in for_next:
                task.result()
        rows = [entry.row for entry in stored.entries]
        with self.watch.stage("part"):
            part, packs = self._put_part(rows)
        needed = set(packs)
        known = [
            (finding.chunk.leaf, finding.chunk.box, entry)
            for finding, entry in zip(stored.findings, stored.entries, strict=True)
        ]
        coded = (Status.CHANGED, Status.REFRESH)
        return Share(
            coded_bytes=sum(
                finding.chunk.content_bytes
                for finding in stored.findings
                if finding.status in coded
            ),
            ballot=Ballot(
                part=part,
                packs=packs,
                report=self._report(stored, rows, sum(sizes.values()) + part.length),
                cover=chunks.cover((row.leaf, row.box) for row in rows),
                features=lossy.features(row.refs for row in rows),
            ),
            stored=[*known, *((leaf, box, None) for leaf, box in cut.others)],
            layouts={leaf.entry.name: leaf.layout.name for leaf in self.taken.leaves},
            pack_sizes={
                name: size
                for name, size in {**self.base.pack_sizes, **sizes}.items()
                if name in needed
            },
        )

    @property
    def _options(self) -> DeltaOptions:
        """Those in force; nothing builds on what lies outside the store."""
        options = self.request.options
        if self.request.place.root_url is None:
            return dataclasses.replace(options, base="store")
        return options

    @property
    def _process(self) -> int:
        return self.request.round.job.process

    def _store_chunks(self, executor: Pool) -> tuple[Cut, SaveRows, Mapping[str, int]]:
        """Compare, code and put every chunk that is this process's.

        Returns:
            What it holds, what it has stored, and the sizes of the packs that it put.
        """
        options = self._options
        refresh_every = None if self.request.hurried else options.refresh_every
        with self.watch.stage("compare"):
            cut = changes.cut(
                self.taken.leaves, self.base, options, process=self._process
            )
            selected = self.request.selection
            own = selection.complete(cut.own, selected, self.packs, executor)
            own = lossy.attach(own, self.request.lossy, self._dither_seed())
            looked = changes.compare(
                own, refresh_every, executor, elsewhere=self.elsewhere
            )
            if not self.request.hurried:
                looked = self._moved(executor, looked)
            compared = following.find_sources(looked, executor)
            selection.audit(compared, selected, self.request.place.label)
            findings, read_bytes = self.kin.share(compared, options, executor)
        changed = [f for f in findings if f.status in (Status.CHANGED, Status.REFRESH)]
        for finding in changed:
            self.base.touch(finding.chunk.leaf, finding.chunk.box)
        writer = PackWriter(
            self.packs,
            attempt=self.attempt,
            process=self._process,
            pack_bytes=options.pack_size(
                local=self.packs.folder.is_local,
                state_bytes=sum(chunk.content_bytes for chunk in cut.own),
            ),
        )
        stored = SaveRows(findings, options)
        stored.read_bytes = read_bytes
        try:
            with self.watch.stage("code"):
                self._put_records(changed, writer, stored, executor)
            self.watch.move(writer.put_seconds, of="code", to="write")
            with self.watch.stage("write"):
                writer.finish()
        except BaseException:
            # Wait for our own writes: nothing may land after the error is known.
            with contextlib.suppress(DeltaError):
                writer.drain()
            raise
        with self.watch.stage("part"):
            stored.fill_in()
        return cut, stored, writer.sizes

    def _dither_seed(self) -> int:
        """Of this run: the same from save to save, another after each restore."""
        if not self.base.dither_seed:
            self.base.dither_seed = int.from_bytes(self.attempt[:4], "little") | 1
        return self.base.dither_seed

    def _moved(self, executor: Pool, findings: Sequence[Finding]) -> list[Finding]:
        moved = renewal.moved(
            findings,
            self.base.pack_sizes,
            own=f"-p{self._process}-",
            elsewhere=self.elsewhere,
        )
        return selection.filled(moved, self.packs, executor)

    def _put_records(
        self,
        changed: Sequence[Finding],
        writer: PackWriter,
        stored: SaveRows,
        executor: Pool,
    ) -> None:
        options = self._options
        new_bytes: collections.Counter[int] = collections.Counter()
        for finding in changed:
            new_bytes[finding.chunk.leaf_index] += finding.chunk.content_bytes
        read = reader.ReadCount()
        coded = ordered_map(
            executor,
            functools.partial(coding.code, options=options),
            batches(
                recall.ahead(
                    changed, options, self.packs, read, hurried=self.request.hurried
                ),
                lambda task: task.finding.chunk.content_bytes,
                least=changes.BATCH_BYTES,
            ),
            window=2 * options.worker_count,
        )
        previous = -1
        for result in itertools.chain.from_iterable(coded):
            leaf = result.finding.chunk.leaf_index
            fills_packs = writer.pack_bytes <= max(new_bytes[leaf], new_bytes[previous])
            if leaf != previous and fills_packs:
                # Large leaves may have small records; packs of little cost a file each.
                writer.cut(least=writer.pack_bytes // _LITTLE_OF_A_PACK)
            previous = leaf
            self.request.round.look()
            lifetime = result.lifetime(options)
            stored.add(result, *writer.add(result.record, lifetime))
        stored.read_bytes += read.bytes

    def _put_part(self, rows: Sequence[Row]) -> tuple[PartEntry, list[str]]:
        packs = sorted({ref.pack for row in rows for ref in row.refs if ref.pack})
        data = parts.encode_part(
            self.attempt, rows, packs, process=self._process, key=self.packs.key
        )
        entry = PartEntry(
            name=f"part-{self.attempt.hex()}-p{self._process}",
            length=len(data),
            digest=records.digest(data).hex(),
            rows=len(rows),
            packs=(),
        )
        self.item.write(entry.name, data)
        return entry, packs

    def _report(
        self, stored: SaveRows, rows: Sequence[Row], written_bytes: int
    ) -> SaveReport:
        request = self.request
        cut = [finding.chunk for finding in stored.findings]
        mean, longest = chain_lengths([len(row.refs) for row in rows])
        return SaveReport(
            step=request.place.step_name,
            item=request.place.item,
            full_bytes=sum(chunk.content_bytes for chunk in cut),
            written_bytes=written_bytes,
            read_bytes=stored.read_bytes,
            chunks=len(cut),
            chunks_by_form=dict(sorted(stored.chunks_by_form.items())),
            bytes_by_form=dict(sorted(stored.bytes_by_form.items())),
            elements=sum(chunk.word_count for chunk in cut),
            elements_changed=stored.elements_changed,
            blocks=sum(-(-chunk.content_bytes // _BLOCK_BYTES) for chunk in cut),
            blocks_changed=stored.blocks_changed,
            records_per_chunk_mean=mean,
            records_per_chunk_max=longest,
            copies=1,  # known once all have voted
            copies_wanted=request.options.keep_bases if request.place.root_url else 1,
            copied_bytes=self.taken.copied_bytes,
            stage_seconds=dict(self.watch.seconds),
            blocking_seconds=request.blocking_seconds,
            total_seconds=time.perf_counter() - request.started,
            lossy=lossy.summed(self.request.lossy, stored.findings),
            held_bytes=sum(
                entry.content.nbytes
                for entry in stored.entries
                if entry.content is not None
            ),
        )
