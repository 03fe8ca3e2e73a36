"""What somebody without the key does to an encrypted root: exact, or an error.

They can compute every digest and checksum, and have a second root under another key and
one that is not encrypted, both of the same states.
"""

import json
import shutil

import hostile
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import strategies
from strategies import STORE, assert_same_tree, open_run

from orbax_delta import check, keys, records, restore
from orbax_delta.errors import DeltaError
from orbax_delta.manifests import MANIFEST_NAME
from orbax_delta.options import DeltaOptions
from orbax_delta.places import locate

pytestmark = pytest.mark.usefixtures("forget")

OPTIONS = {"chunk_bytes": 1024, "pack_bytes": 4096, "full_every": 2, "threads": 1}
STEPS = range(4)
FLAGS = slice(10, 12)


def state(step):
    """Leaves of one shape and type, so that contents fit into each other's places."""
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 255, (3, 4096), np.uint8)
    noise[:, step * 1000 : step * 1000 + 40] += 1
    return {"a": noise[0], "b": noise[1], "c": noise[2], "step": step}


STATES = [state(step) for step in STEPS]


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """By name: attacked, of another key, and in the clear."""
    folder = tmp_path_factory.mktemp("attacks")
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        strategies.skip_disk_sync(patch)
        patch.setattr(keys, "_known", keys._Known())
        for name in ("mine", "other", "plain"):
            key = None if name == "plain" else keys.new_key_file(folder / f"{name}.key")
            made[name] = folder / name
            with open_run(made[name], **OPTIONS, encryption=key) as run:
                for step in STEPS:
                    run.save(step, STATES[step])
    return made


def item(root, step):
    """The folder of a step's item."""
    return root / str(step) / "default"


def part_of(root, step):
    """The part of a step."""
    (path,) = item(root, step).glob("part-*")
    return path


def put_manifest(folder, change):
    """A MANIFEST with changes, and its digest right."""
    path = folder / MANIFEST_NAME
    document = hostile.manifest_document(path.read_bytes())
    change(document)
    path.write_bytes(hostile.manifest_bytes(document))


def put_part(folder, name, data):
    """A part, and what its MANIFEST says of it."""
    (folder / name).write_bytes(data)

    def named(document):
        (entry,) = document["parts"]
        entry |= {"name": name, "length": len(data)}
        entry["digest"] = hostile.digest(data).hex()

    put_manifest(folder, named)


def sealed_again(data):
    """A changed record with a checksum that is right."""
    return data[:-8] + records.checksum(data[:-8]).to_bytes(8, "little")


def spans(path):
    """Where the records of a pack lie."""
    return records.parse_pack(memoryview(path.read_bytes())).spans


# --- attacks: each changes a copy of the root -----------------------------------------


def change_bytes_of_a_record(root, roots, draw):
    """Bits, with the checksum that belongs to them."""
    path = draw(st.sampled_from(sorted((root / STORE / "packs").iterdir())))
    offset, length = draw(st.sampled_from(spans(path)))
    data = bytearray(path.read_bytes())
    at = draw(st.integers(0, length - 9))
    data[offset + at] ^= draw(st.integers(1, 255))
    data[offset : offset + length] = sealed_again(data[offset : offset + length])
    path.write_bytes(data)


def put_a_record_elsewhere(root, roots, draw):
    """One of this root, of another key, or in the clear; cut or filled to fit."""
    path = draw(st.sampled_from(sorted((root / STORE / "packs").iterdir())))
    name = draw(st.sampled_from(["mine", "other", "plain"]))
    packs = sorted((roots[name] / STORE / "packs").iterdir())
    source = draw(st.sampled_from(packs))
    start, size = draw(st.sampled_from(spans(source)))
    offset, length = draw(st.sampled_from(spans(path)))
    record = source.read_bytes()[start : start + size]
    if size != length and draw(st.booleans()):
        record = sealed_again(record[:length].ljust(length, b"\0"))
    data = bytearray(path.read_bytes())
    data[offset : offset + len(record)] = record
    path.write_bytes(data)


def put_a_pack_elsewhere(root, roots, draw):
    """Under the name of another one."""
    packs = sorted((root / STORE / "packs").iterdir())
    name = draw(st.sampled_from(["mine", "other", "plain"]))
    source = draw(st.sampled_from(sorted((roots[name] / STORE / "packs").iterdir())))
    shutil.copy(source, draw(st.sampled_from(packs)))


def change_bytes_of_a_part(root, roots, draw):
    """Header or columns; cut or longer."""
    path = part_of(root, draw(st.sampled_from(STEPS)))
    data = bytearray(path.read_bytes())
    at = draw(st.integers(0, len(data) - 1))
    match draw(st.sampled_from(["change", "cut", "more"])):
        case "change":
            data[at] ^= draw(st.integers(1, 255))
        case "cut":
            del data[at:]
        case "more":
            data[at:at] = data[:at]
    put_part(path.parent, path.name, bytes(data))


def put_a_part_elsewhere(root, roots, draw):
    """That of another step, key, or in the clear; with its flag and attempt, or not."""
    step = draw(st.sampled_from(STEPS))
    name = draw(st.sampled_from(["mine", "other", "plain"]))
    source = part_of(roots[name], draw(st.sampled_from(STEPS)))
    path = part_of(root, step)
    data = bytearray(source.read_bytes())
    if draw(st.booleans()):
        data[FLAGS] = path.read_bytes()[FLAGS]
    if draw(st.booleans()):
        attempt = slice(hostile.PART_HEAD.size - 16, hostile.PART_HEAD.size)
        data[attempt] = path.read_bytes()[attempt]
    put_part(path.parent, path.name, bytes(data))


def rename_a_part(root, roots, draw):
    """As if another process had written it."""
    path = part_of(root, draw(st.sampled_from(STEPS)))
    name = path.name.replace("-p0", draw(st.sampled_from(["-p1", "-p00", "-p10"])))
    path.rename(path.with_name(name))
    put_part(path.parent, name, path.with_name(name).read_bytes())


def change_what_a_manifest_says(root, roots, draw):
    """Of the key, and of what is needed to read it."""
    folder = item(root, draw(st.sampled_from(STEPS)))
    other = hostile.manifest_document(
        (item(roots["other"], 0) / MANIFEST_NAME).read_bytes()
    )
    ours = hostile.manifest_document(
        (item(roots["mine"], 0) / MANIFEST_NAME).read_bytes()
    )
    said = [one["encryption"][f] for one in (other, ours) for f in ("key_id", "check")]

    def change(document):
        match draw(st.sampled_from(["key", "check", "none", "feature", "attempt"])):
            case "key":
                document["encryption"]["key_id"] = draw(st.sampled_from(said))
            case "check":
                document["encryption"]["check"] = draw(st.sampled_from(said))
            case "none":
                del document["encryption"]
                document["required_features"] = []
            case "feature":
                document["required_features"] = draw(
                    st.sampled_from([[], ["encrypted"] * 2, ["lossy"], ["encrypted2"]])
                )
            case "attempt":
                before = document["attempt"]
                text = json.dumps(document).replace(before, ours["attempt"])
                document |= json.loads(text)

    put_manifest(folder, change)


ATTACKS = [
    change_bytes_of_a_record,
    put_a_record_elsewhere,
    put_a_pack_elsewhere,
    change_bytes_of_a_part,
    put_a_part_elsewhere,
    rename_a_part,
    change_what_a_manifest_says,
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_gives_wrong_values(roots, tmp_path, attack, record_property):
    """Every step is exact or refused; what refuses it says so in `verify`, too."""
    keys.use_key(roots["mine"].with_name("mine.key"))
    keys.use_key(roots["other"].with_name("other.key"))
    tried = refused = 0

    @hypothesis.given(data=st.data())
    @hypothesis.settings(max_examples=30)
    def attacked(data):
        nonlocal tried, refused
        root = tmp_path / str(tried)
        tried += 1
        shutil.copytree(roots["mine"], root)
        attack(root, roots, data.draw)
        broken = set()
        for step in STEPS:
            place = locate(str(item(root, step)))
            try:
                tree = restore.run(place, None, DeltaOptions(threads=1)).tree
            except DeltaError:
                broken.add(str(step))
                continue
            assert_same_tree(tree, STATES[step])
        refused += bool(broken)
        try:
            report = check.verify(str(root))
        except DeltaError:
            assert broken
        else:
            assert not broken & set(report.whole_steps)
        shutil.rmtree(root)

    attacked()
    assert refused
    record_property("damage_cases", tried)
