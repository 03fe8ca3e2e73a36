"""Whatever is damaged, however: a restore is exact or an error, and nothing is lost.

Each case breaks a copy of a healthy root in one way (`damaged.py`), looks what every
step and kept base still gives, what verification says of it, and what a prune does.
"""

import contextlib
import logging
import re
import shutil

import damaged
import pytest
import roots
import strategies
from etils import epath
from strategies import STORE, packs_on_disk, read_manifest

import orbax_delta
from orbax_delta import check, listing, prune, restore
from orbax_delta.errors import DeltaError, StorageError
from orbax_delta.options import DeltaOptions
from orbax_delta.store import DeltaStore, Folder

CASES = list(damaged.cases(flips=6, others=2))
"""On a root in which each chunk is stored once."""

HEALING = [
    *(case for case in damaged.cases(flips=5, others=1) if case.file == "pack"),
    *(damaged.Case(spot=file, kind="swap", seed=0) for file in damaged.OF_BASES),
]
"""On a root in which chunks were written again, so that another record may do."""

LATER = [
    case
    for case in damaged.cases(flips=1, others=1)
    if case.kind in ("flip", "cut_inside", "delete", "swap", "replace")
]
"""What a job finds that goes on."""

SILENT = {
    (file, kind) for file in ("pin", "mark") for kind in ("delete", "swap", "replace")
} | {("base manifest", "delete")}
"""What no look can tell from a store that has changed by itself: a pin or mark that is
not there, or says another thing; a base without MANIFEST, which is one half copied."""


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    strategies.skip_disk_sync(monkeypatch)


def _made(folder, seed, **options):
    root = roots.make(folder, **options)
    damaged.add_small_files(root, seed)
    return root


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A root with two pins, two marks, a kept base and a dead pack."""
    return _made(tmp_path_factory.mktemp("healthy") / "run", 0)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """Another root of the same run."""
    return _made(tmp_path_factory.mktemp("twin") / "run", 1)


@pytest.fixture(scope="module")
def renewed(tmp_path_factory):
    """Two such roots in which what does not change was written again."""
    often = {"refresh_every": 2, "full_every": 1}
    return [
        _made(tmp_path_factory.mktemp("renewed") / "run", seed, **often)
        for seed in range(2)
    ]


STATES = {step: roots.state(step) for step in (1, *roots.STEPS, 6, 7)}


def states_of(root):
    """What each step and kept base holds, by name."""
    states = {str(step): STATES[step] for step in roots.STEPS}
    for base in sorted((root / STORE / "bases").iterdir()):
        kept = read_manifest(base / "MANIFEST").step
        states[f"{STORE}/bases/{base.name}"] = STATES[kept]
    return states


def restored(root, name):
    """A step by the handler that Orbax calls, a kept base by what stands in for it."""
    if "/" not in name:
        handler = orbax_delta.DeltaCheckpointHandler()
        return handler.restore(epath.Path(root / name / "default"))
    (item,) = listing.read_root(str(root)).select([name])
    if item.error is not None:
        raise item.error
    return restore.run(item.place, None, DeltaOptions()).tree


def outcomes(root, states):
    """By name None, or the error that came instead of the exact state."""
    found = {}
    for name, state in states.items():
        try:
            tree = restored(root, name)
        except DeltaError as error:
            found[name] = error
        else:
            strategies.assert_same_tree(tree, state)
            found[name] = None
    return found


def test_the_roots_are_healthy(healthy, renewed):
    """What the cases begin with: nothing is wrong, and a prune has something to do."""
    for root in (healthy, *renewed):
        states = states_of(root)
        assert len(states) > len(roots.STEPS)
        report = check.verify(str(root))
        assert report.problems == []
        assert {*report.whole_steps, *report.whole_bases} == set(states)
        assert outcomes(root, states) == dict.fromkeys(states)
        plan = prune.plan(DeltaStore.open(Folder(str(root))))
        assert list(plan.dead) == [damaged.DEAD_PACK]


def test_the_cases_are_many():
    """Every kind of file is damaged in every way that it can be."""
    assert len(CASES) == len({str(case) for case in CASES}) >= 350
    assert {case.file for case in CASES} == set(damaged.FILES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_damage(healthy, twin, root, case, caplog, record_property):
    """Restores are exact or say why not; verification and prune are not misled."""
    record_property("damage_cases", 1)
    _judge(healthy, twin, root, case, caplog)


@pytest.mark.parametrize("case", HEALING, ids=str)
def test_damage_that_may_heal(renewed, root, case, caplog, record_property):
    """The same where content may come from another record, which is said aloud."""
    record_property("damage_cases", 1)
    _judge(*renewed, root, case, caplog)


def test_some_damage_heals(renewed, tmp_path, caplog):
    """So that the cases before this one say something of healing."""
    cases = (case for case in HEALING if case.spot.startswith("record"))
    assert any(_judge(*renewed, tmp_path / str(c), c, caplog) for c in cases)


def _judge(healthy, twin, root, case, caplog):
    """Break a copy of a root, see what everybody makes of it; steps that healed."""
    caplog.clear()
    caplog.set_level(logging.ERROR, "orbax_delta")
    states = states_of(healthy)
    shutil.copytree(healthy, root)
    changed = {str(p.relative_to(root)) for p in damaged.strike(root, twin, case)}
    before = strategies.listing(root)
    found = outcomes(root, states)
    whole = {name for name, error in found.items() if error is None}
    healed = {name for name in whole if _was_healed(name, caplog)}
    report = check.verify(str(root))
    assert strategies.listing(root) == before
    for name, error in found.items():
        if error is not None:
            _assert_error_names(error, name, case)
    assert {*report.whole_steps, *report.whole_bases} == whole
    said = {name for p in report.problems if p.healed_by for name in p.steps}
    assert said & whole == healed
    if (case.file, case.kind) not in SILENT:
        assert not report.ok
        for name in set(states) - whole | healed:
            assert any(name in problem.steps for problem in report.problems)
        if case.kind not in ("swap", "replace"):
            assert changed & {problem.file for problem in report.problems}
    _assert_prune_spares(root, changed)
    return healed


def _was_healed(name, caplog):
    said = f"/{name})" if "/" in name else f"/{name}/default)"
    return any(
        said in text and "their content was found" in text for text in caplog.messages
    )


def _assert_error_names(error, name, case):
    text = str(error)
    number = r"\d" if "/" in name else name
    step = re.search(rf"step {number}, item 'default'", text)
    assert step or f"/{name}/" in text or repr(name) in text
    if case.spot.startswith("record"):
        assert step
        assert "leaf " in text
        assert "chunk [" in text


def _assert_prune_spares(root, changed):
    """A prune refuses, or deletes nothing that a whole MANIFEST on disk names."""
    paths = root.rglob("MANIFEST")
    intact = [path for path in paths if str(path.relative_to(root)) not in changed]
    named = {pack for path in intact for pack in read_manifest(path).packs}
    there = packs_on_disk(root)
    try:
        store = DeltaStore.open(Folder(str(root)))
        if store is not None:
            prune.execute(store, prune.plan(store))
    except DeltaError:
        assert packs_on_disk(root) == there
    assert there & named <= packs_on_disk(root)


def _joined_records(root):
    """A pack of many records, the records, and who needs each: (step, leaf, box)."""
    needs = {}
    for step in roots.STEPS:
        opened = strategies.read_step(root, step)
        for row in opened.rows:
            leaf = opened.manifest.leaves[row.leaf].name
            for ref in row.refs:
                chunk = str(step), leaf, row.box
                needs.setdefault(ref.pack, {}).setdefault(ref, set()).add(chunk)
    pack = max(needs, key=lambda name: len(needs[name]))
    found = sorted(needs[pack].items(), key=lambda item: item[0].offset)
    assert len(found) > 4
    return root / STORE / "packs" / pack, found


def _named_chunks(report):
    return {
        (step, problem.leaf, problem.chunk)
        for problem in report.problems
        if problem.leaf
        for step in problem.steps
        if "/" not in step
    }


def _texts(chunks):
    return {
        (step, leaf, "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]")
        for step, leaf, box in chunks
    }


def test_a_pack_that_is_cut_off_spoils_what_lies_past_the_cut(healthy, root):
    """Records before it are there, though they are read along with those after it."""
    shutil.copytree(healthy, root)
    path, needed = _joined_records(root)
    cut = len(needed) // 2
    path.write_bytes(path.read_bytes()[: needed[cut][0].offset])
    lost = set().union(*(chunks for _, chunks in needed[cut:]))
    report = check.verify(str(root))
    assert _named_chunks(report) == _texts(lost)


def test_a_bad_sector_spoils_the_record_in_it(healthy, root, monkeypatch):
    """What the disk does not give keeps nobody from what lies beside it."""
    shutil.copytree(healthy, root)
    path, needed = _joined_records(root)
    bad, lost = needed[len(needed) // 2]
    start_read, read = Folder.start_read, Folder.read

    class Unreadable:
        def result(self):
            raise StorageError("could not read: [Errno 5] Input/output error")

    def ranges(folder, key, offset, length):
        if key == path.name and offset <= bad.offset + 9 < offset + length:
            return Unreadable()
        return start_read(folder, key, offset, length)

    def whole(folder, key):
        return Unreadable().result() if key == path.name else read(folder, key)

    monkeypatch.setattr(Folder, "start_read", ranges)
    monkeypatch.setattr(Folder, "read", whole)
    report = check.verify(str(root))
    assert _named_chunks(report) == _texts(lost)
    spoilt = {step for step, _, _ in lost}
    assert spoilt == set(map(str, roots.STEPS)) - set(report.whole_steps)
    for name in map(str, roots.STEPS):
        if name in spoilt:
            with pytest.raises(StorageError, match=r"leaf .*Input/output error"):
                restored(root, name)
        else:
            strategies.assert_same_tree(restored(root, name), STATES[int(name)])


@pytest.mark.parametrize("case", LATER, ids=str)
def test_a_job_that_goes_on(healthy, twin, root, case, record_property):
    """After any damage a save raises, or its step and the next are exact and whole."""
    record_property("damage_cases", 1)
    shutil.copytree(healthy, root)
    damaged.strike(root, twin, case)
    with contextlib.suppress(DeltaError), strategies.open_run(root) as run:
        with contextlib.suppress(DeltaError):
            strategies.assert_same_tree(run.restore(5), STATES[5])
        for step in (6, 7):
            run.save(step, STATES[step])
    saved = [str(step) for step in (6, 7) if (root / str(step)).exists()]
    # A save to the store of another root goes there, and is none of this one's steps.
    refused = case.file == "store file" and case.kind != "replace"
    assert len(saved) == (0 if refused else 2)
    for name in saved:
        strategies.assert_same_tree(restored(root, name), STATES[int(name)])
        assert name in check.verify(str(root), saved).whole_steps
