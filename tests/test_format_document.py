"""FORMAT.md against the code: names, numbers, sizes, magics and limits agree."""

import contextlib
import dataclasses
import json
import re
import struct
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import orbax_delta
from orbax_delta import (
    archived,
    chunks,
    codecs,
    dtypes,
    fields,
    frames,
    grids,
    lanes,
    leaves,
    manifests,
    marks,
    options,
    owners,
    parts,
    places,
    planes,
    prune,
    records,
    reports,
    sealing,
    shardings,
    sparse,
    store,
    storefiles,
    trees,
)
from orbax_delta.columns import INLINE
from orbax_delta.errors import CorruptionError
from orbax_delta.hosts import Job

DOCUMENT = (Path(orbax_delta.__file__).parent / "FORMAT.md").read_text()
_SIZES = {
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "i16": "h",
    "i32": "i",
    "f32": "f",
}


def _tables(text):
    """Section number -> its tables, each a list of rows as {column: cell}."""
    found = {}
    section, table = "0", None
    for line in text.splitlines():
        heading = re.match(r"#{2,3} ([\d.]+?)\.? ", line)
        if heading:
            section = heading[1]
        if not line.startswith("|"):
            table = None
            continue
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if table is None:
            table = (cells, [])
            found.setdefault(section, []).append(table[1])
        elif not set("".join(cells)) <= set("-"):
            assert len(cells) == len(table[0]), line
            table[1].append(dict(zip(table[0], cells, strict=True)))
    return found


TABLES = _tables(DOCUMENT)
FEATURE_FIELDS = dict.fromkeys(manifests._FEATURE_FIELDS.values(), (dict,))


def _struct_format(rows):
    """The struct format of a table of fields with a `type` column."""
    codes = []
    for row in rows:
        array = re.fullmatch(r"bytes\[(\d+)\]", row["type"])
        codes.append(f"{array[1]}s" if array else _SIZES[row["type"]])
        if "size" in row:
            assert struct.calcsize("<" + codes[-1]) == int(row["size"]), row
    return "<" + "".join(codes)


def _names(rows, column="field"):
    return [row[column] for row in rows]


def _numbers(rows, column):
    return {row[column]: int(row["number"]) for row in rows}


def _magic(text):
    return text.encode().decode("unicode_escape").encode()


@pytest.mark.parametrize(
    ("section", "index", "layout"),
    [
        ("4.2", 0, planes._HEAD),
        ("4.7", 0, sparse._HEAD),
        ("4.8", 0, lanes._HEAD),
        ("4.9", 0, grids._HEAD),
        ("5.1", 0, records._RECORD_HEAD),
        ("5.1", 1, records._CHECKSUM),
        ("5.2", 1, sealing._CHECKSUM),
        ("5.2", 2, sealing._PLACE),
        ("6.1", 0, records._PACK_HEAD),
        ("6.2", 0, records._INDEX_ENTRY),
        ("6.3", 0, records._PACK_TAIL),
        ("7.2", 0, parts._HEAD),
    ],
)
def test_binary_fields_have_the_sizes_of_the_code(section, index, layout):
    """Field by field, the documented types are those that struct packs."""
    assert _struct_format(TABLES[section][index]) == layout.format


@pytest.mark.parametrize(
    ("section", "field", "magic"),
    [
        ("5.1", 0, records.RECORD_MAGIC),
        ("5.2", 0, sealing.SEALED_MAGIC),
        ("6.1", 0, records.PACK_MAGIC),
        ("6.3", 3, records.PACK_END_MAGIC),
        ("7.2", 0, parts.PART_MAGIC),
    ],
)
def test_magics_are_those_of_the_code(section, field, magic):
    """Each magic is written in its table and fills its field."""
    row = TABLES[section][0][field]
    assert row["field"] == "magic"
    assert _magic(row["meaning"]) == magic
    assert len(magic) == int(row["size"])


def test_numbers_of_forms_methods_and_rules_are_those_of_the_code():
    """Every number on disk has its name in the document, and no other."""
    forms = TABLES["4.1"][0]
    assert _numbers(forms, "form") == {form.name: int(form) for form in codecs.Form}
    full = {row["form"] for row in forms if row["kind"] == "full"}
    assert full == {form.name for form in codecs.Form if form.is_full}
    assert _numbers(TABLES["4.2"][1], "method") == {
        name.lstrip("_"): getattr(planes, name) for name in ("_RAW", "_ZSTD", "_FILL")
    }
    assert _numbers(TABLES["7.1"][1], "rule") == {
        rule.name: int(rule) for rule in dtypes.Rule
    }


def test_word_and_gap_sizes_are_those_of_the_code():
    """A record or gap of any other size is refused."""
    (row,) = [row for row in TABLES["5.1"][0] if row["field"] == "word_bytes"]
    documented = [int(n) for n in re.findall(r"\d+", row["meaning"])]
    accepted = []
    for size in range(256):
        record = records.Record(
            form=codecs.Form.PLANES,
            word_bytes=size,
            content_bytes=0,
            content_digest=bytes(16),
            payload=b"",
        )
        with contextlib.suppress(CorruptionError):
            records.parse_record(memoryview(record.encode()))
            accepted.append(size)
    assert accepted == documented
    (row,) = [row for row in TABLES["4.7"][0] if row["field"] == "gap_bytes"]
    documented = [int(n) for n in re.findall(r"\d+", row["meaning"])]
    accepted = []
    raw = b"\0" + bytes(4)
    base = np.zeros(8, np.uint8)
    for size in range(256):
        with contextlib.suppress(CorruptionError):
            payload = struct.pack("<BI", size, 0) + raw * size + raw
            codecs.decode(codecs.Form.SPARSE, payload, base, 8, 1)
            accepted.append(size)
    assert accepted == documented


def test_packed_types_are_those_of_the_code():
    """Names and bits of every type that does not fill its bytes."""
    packed = {row["type name"]: int(row["bits"]) for row in TABLES["3.2"][0]}
    assert packed == dtypes._PACKED_BITS


def test_digests_of_nothing_are_those_of_the_code():
    """The documented functions, told apart by their value for no bytes."""
    assert records.digest(b"").hex() in DOCUMENT
    assert f"{records.checksum(b''):#018x}" in DOCUMENT
    sizes = {row["name"]: int(row["size"]) for row in TABLES["3.5"][0]}
    assert sizes == {
        "digest": records.DIGEST_BYTES,
        "checksum": records._CHECKSUM.size,
    }


def test_rows_have_the_documented_fields():
    """In the document's order."""
    assert _names(TABLES["7.1"][0]) == [
        field.name for field in dataclasses.fields(parts.Row)
    ]


def test_columns_of_a_part_have_the_documented_sizes_and_order():
    """A part of one row is decoded by the table alone."""
    columns = TABLES["7.3"][0]
    size = {"row": 0, "bound": 0, "record": 0}
    for row in columns:
        size[row["per"]] += struct.calcsize(_struct_format([row]))
    assert f"{size['row']} R + {size['bound']} B + {size['record']} K" in DOCUMENT

    pack = "00" * 16 + "-p0-0"
    first = parts.Ref(form=codecs.Form.PLANES, pack=pack, offset=32, length=68)
    second = parts.Ref(form=codecs.Form.SPARSE, pack=pack, offset=100, length=75)
    written = parts.Row(
        leaf=5,
        box=((1, 2), (3, 4)),
        digest=b"d" * 16,
        rule=dtypes.Rule.NONE,
        refs=(first, second),
        since=-3,
        age=4,
    )
    data = parts.encode_part(bytes(16), [written], [pack])
    counts = {"row": 1, "record": 2, "bound": 4}
    header = struct.unpack_from(parts._HEAD.format, data)
    assert header[3:6] == (1, 2, 4)
    body = frames.decompress(data[parts._HEAD.size :], header[6])
    found, position = {}, 0
    for row in columns:
        one = _struct_format([row])[1:]
        layout = struct.Struct("<" + one * counts[row["per"]])
        found[row["column"]] = layout.unpack_from(body, position)
        position += layout.size
    assert position == len(body)
    assert found == {
        "leaf": (5,),
        "dimensions": (2,),
        "rule": (0,),
        "since": (-3,),
        "age": (4,),
        "records": (2,),
        "digest": (b"d" * 16,),
        "bounds": (1, 2, 3, 4),
        "form": (2, 5),
        "pack": (0, 0),
        "offset": (32, 100),
        "length": (68, 75),
    }
    assert f"{INLINE:#010X}".replace("X", "x") in DOCUMENT


_JSON_NAMES = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("8.2", {**manifests._MANIFEST_FIELDS, **FEATURE_FIELDS}),
        ("8.3", manifests._LEAF_FIELDS),
        ("8.5", manifests._PART_FIELDS),
    ],
)
def test_json_fields_and_types_are_those_of_the_code(section, fields):
    """Every field of a MANIFEST, a leaf and a part, with the JSON types it may have."""
    documented = {
        row["field"]: set(re.split(r", | or ", row["JSON"]))
        for row in TABLES[section][0]
    }
    expected = {
        name: {_JSON_NAMES[kind] for kind in kinds} for name, kinds in fields.items()
    }
    expected = {
        name: {"any"} if len(kinds) == 6 else kinds for name, kinds in expected.items()
    }
    assert documented == expected


def test_what_is_made_of_a_key_is_that_of_the_code():
    """The texts that tell the uses of a key apart, and how much is made for each."""
    made = {row["info"].encode(): int(row["bytes"]) for row in TABLES["8.10"][0]}
    assert made == {
        sealing._FOR_SEALING: sealing.KEY_BYTES,
        sealing._FOR_CHECK: sealing._CHECK_BYTES,
        sealing._FOR_PRINT: sealing._PRINT_BYTES,
    }
    assert f"number {sealing._PART_NUMBER:#X}".replace("X", "x") in DOCUMENT
    assert _names(TABLES["8.10"][1]) == ["key_id", "check"]


def test_manifests_write_the_documented_fields():
    """The fields of the values in the code are those on disk."""
    names = {field.name for field in dataclasses.fields(manifests.Manifest)}
    assert set(_names(TABLES["8.2"][0])) == names | {"shardings"}
    leaf = {field.name for field in dataclasses.fields(manifests.LeafEntry)}
    assert set(_names(TABLES["8.3"][0])) == leaf
    part = {field.name for field in dataclasses.fields(manifests.PartEntry)}
    assert set(_names(TABLES["8.5"][0])) == part


def test_the_header_line_is_that_of_the_code():
    """Magic, and patterns that make the code's when put together."""
    patterns = [row["pattern"] for row in TABLES["8.1"][0]]
    assert patterns[0] == manifests._MAGIC
    joined = " ".join([patterns[0], *(f"({pattern})" for pattern in patterns[1:])])
    assert joined.encode() + rb"\n" == manifests._HEADER.pattern


def test_names_are_those_of_the_code():
    """Patterns of attempts, packs and parts, and the fixed names of files."""
    patterns = {row["name"]: row["pattern"] for row in TABLES["2.1"][0]}
    assert patterns["attempt"] == manifests._ATTEMPT.pattern
    assert patterns["pack"] == manifests.PACK_NAME.pattern
    assert patterns["part"] == manifests.PART_NAME.pattern
    assert patterns["pin"] == marks.PIN_NAME.pattern
    assert patterns["condemned mark"] == marks.CONDEMNED_NAME.pattern
    files = set(_names(TABLES["2"][0], "file"))
    assert {store.STORE_FILE, store.COMMIT_MARKER, manifests.MANIFEST_NAME} <= files
    assert f"  {store.STORE_NAME}/\n" in DOCUMENT
    assert f"`{places.SELF_CONTAINED_PACKS}` beside the MANIFEST" in DOCUMENT


def test_kinds_of_leaves_are_those_of_the_code():
    """Where each kind's content is, and that every value kind can be written."""
    kinds = {row["kind"]: row["content in"] for row in TABLES["8.4"][0]}
    assert {k for k, v in kinds.items() if v == "chunks"} == manifests.ARRAY_KINDS
    assert {k for k, v in kinds.items() if v == "value"} == manifests.VALUE_KINDS
    assert set(leaves._VALUE_WRITERS) == manifests.VALUE_KINDS


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (True, True),
        (-31, "-0x1f"),
        (0.1, "3fb999999999999a"),
        (complex(1.0, -0.0), ["3ff0000000000000", "8000000000000000"]),
    ],
)
def test_python_values_are_written_as_documented(value, written):
    """Section 8.4, by example, there and back."""
    (leaf,) = leaves.snapshot(value, Job()).leaves
    assert (leaf.entry.kind, leaf.entry.value) == (type(value).__name__, written)
    assert repr(leaves.plain_value(leaf.entry)) == repr(value)


def test_nodes_and_keys_of_a_tree_are_those_of_the_code():
    """A tree with every kind of node and key uses each documented name, no other."""

    class Pair(tuple):
        __slots__ = ()

    jax.tree_util.register_pytree_node(
        Pair, lambda pair: (tuple(pair), None), lambda _, children: Pair(children)
    )
    keys = {"tuple": ("a", 1), "bytes": b"x", "float": 0.5, "int": 3, "bool": True}
    tree = [{"s": (None, Pair((1,)))}, *({key: 1} for key in keys.values())]
    tree.append({frozenset(): 1})
    members, kinds = set(), set()

    def visit(node):
        members.update(set(node) - {"type"})
        for name, value in node.items():
            if name in ("list", "tuple"):
                list(map(visit, value))
            if name in ("dict", "node"):
                for key, child in value:
                    if not isinstance(key, str):
                        kinds.add(key[0])
                    visit(child)

    visit(trees.flatten(tree).structure)
    assert members == set(_names(TABLES["8.6"][0], "member"))
    assert kinds == set(_names(TABLES["8.6"][1], "key kind"))
    assert kinds == set(trees._KEY_READERS)


def test_sharding_documents_have_the_documented_fields():
    """Both kinds, by example."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    documents = {
        "named": shardings.to_document(NamedSharding(mesh, PartitionSpec("data"))),
        "single": shardings.to_document(SingleDeviceSharding(jax.devices()[0])),
    }
    for kind, document in documents.items():
        expected = {
            row["field"] for row in TABLES["8.7"][0] if row["of kind"] in ("both", kind)
        }
        assert set(document) == expected
        assert document["kind"] == kind
    (row,) = [row for row in TABLES["8.7"][0] if row["field"] == "mesh"]
    parts_of_mesh = set(re.findall(r"`?(\w+)`?(?=,| and|`| )", row["meaning"]))
    assert set(documents["named"]["mesh"]) <= parts_of_mesh


def test_reports_and_options_have_the_documented_fields():
    """What stands in a MANIFEST for people."""
    report = [field.name for field in dataclasses.fields(reports.SaveReport)]
    assert _names(TABLES["8.8"][0]) == report
    section = DOCUMENT.partition("### 8.9 Options")[2].partition("\n### ")[0]
    named = re.findall(r"`(\w+)`", section)
    values = list(options.DeltaOptions().recorded())
    assert [name for name in named if name != "DeltaOptions"] == values


def test_files_of_a_store_have_the_documented_fields():
    """STORE.json, pins, condemned marks and their owners."""
    document = json.loads(storefiles.store_document("ab" * 16))
    table = TABLES["9.1"][0]
    assert sorted(document) == _names(table)
    meaning = {row["field"]: row["meaning"] for row in table}
    assert str(document["format_version"]) == meaning["format_version"]
    assert document["magic"] == meaning["magic"]
    mark = marks.Mark(owner=owners.this_process(), packs=[])
    document = json.loads(mark.encode())
    assert sorted(document) == _names(TABLES["9.2"][0])
    assert sorted(document["owner"]) == sorted(_names(TABLES["9.2"][1], "owner field"))


def test_the_version_is_that_of_the_code():
    """In the title, in every table that has one, and in force."""
    assert DOCUMENT.startswith(
        f"# Format of orbax_delta, version {records.FORMAT_VERSION}\n"
    )
    rows = [
        row
        for tables in TABLES.values()
        for table in tables
        for row in table
        if row.get("field") == "version"
    ]
    assert len(rows) == 3
    for row in rows:
        assert row["meaning"] == f"format version, {records.FORMAT_VERSION}"
    features = {row["feature"] for row in TABLES["14"][0]}
    assert features == manifests.KNOWN_FEATURES


def test_limits_are_those_of_the_code():
    """Every limit that a reader refuses to exceed."""
    limits = [int(row["value"]) for row in TABLES["13.2"][0]]
    assert limits == [
        options.MAX_CHAIN_LIMIT,
        parts._MAX_ROWS,
        chunks.MAX_DIMENSIONS,
        codecs.BLOCK_BYTES,
        frames._MAX_EXPANSION,
        frames.FREE_TEXT_BYTES,
        frames.MAX_TEXT_RATIO,
        trees.MAX_DEPTH,
        fields.MAX_METADATA_DEPTH,
        places.MAX_MANIFEST_DEPTH,
        archived.MOST_MOVES,
        options.MAX_CHUNK_BYTES,
        fields.MAX_COUNT,
    ]


def test_sections_that_the_code_refers_to_exist():
    """Docstrings name sections of this document by number."""
    titles = dict(re.findall(r"^#{2,3} ([\d.]+?)\.? (.+)$", DOCUMENT, re.MULTILINE))
    assert titles["4"] == "Forms"
    assert titles["5"] == "Records"
    assert titles["6"] == "Packs"
    assert titles["7"] == "Rows and parts"
    assert titles["8"] == "MANIFEST"
    for module in Path(orbax_delta.__file__).parent.rglob("*.py"):
        for numbers in re.findall(
            r"FORMAT\.md,? sections? ([\d., and]+)", module.read_text()
        ):
            for number in re.findall(r"\d+(?:\.\d+)?", numbers):
                assert number in titles, (module.name, number)
    for number in re.findall(r"sections? (\d+(?:\.\d+)?)", DOCUMENT):
        assert number in titles, number


def test_the_crash_table_has_every_write_of_a_save_and_a_prune():
    """Sections 10 and 11 number what is done; section 12 has what writes or deletes."""
    for section, numbers in (("10", 10), ("11", 8)):
        text = re.split(rf"^## {section}\. ", DOCUMENT, flags=re.MULTILINE)[1]
        text = text.partition("\n## ")[0]
        found = [int(n) for n in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
        assert found == list(range(1, numbers + 1))
    died_after = " ".join(_names(TABLES["12"][0], "died after"))
    assert set(re.findall(r"\b1[01]\.\d+\b", died_after)) == {
        *("10.1", "10.2", "10.4", "10.5", "10.6", "10.7", "10.8", "10.9"),
        "10.10",
        *("11.4", "11.5", "11.7", "11.8"),
    }


def test_a_saved_root_has_the_documented_files(root):
    """Every file of two steps is in section 2, under a name of section 2.1."""
    registry = orbax_delta.handler_registry(pack_bytes=1024, chunk_bytes=256)
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        for step in range(2):
            state = {"w": np.arange(1000.0) + step}
            manager.save(step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
        below = root / store.STORE_NAME
        found = [str(p.relative_to(below)) for p in below.rglob("*") if p.is_file()]
    found += [path.name for path in (root / "1" / "default").iterdir()]
    patterns = {row["name"]: row["pattern"] for row in TABLES["2.1"][0]}
    documented = {
        "STORE.json": "STORE.json",
        "ROOT.json": "ROOT.json",
        "commit_success.txt": "commit_success.txt",
        "packs/*": f"packs/{patterns['pack']}",
        "pins/*": f"pins/{patterns['pin']}",
        "condemned/*": f"condemned/{patterns['condemned mark']}",
        "roots/*": f"roots/{patterns['root']}",
        "history/*": f"history/{patterns['attempt']}",
        "bases/*": f"bases/{patterns['attempt']}/({patterns['part']}|MANIFEST)",
        "part-*": patterns["part"],
        "MANIFEST": "MANIFEST",
        "ARCHIVED": "ARCHIVED",
    }
    assert _names(TABLES["2"][0], "file") == list(documented)
    of_orbax = {"_CHECKPOINT_METADATA", "_METADATA", "_sharding"}
    used = set()
    for name in set(found) - of_orbax:
        matches = [key for key, p in documented.items() if re.fullmatch(p, name)]
        assert matches, name
        used.update(matches)
    absent = {"condemned/*", "ROOT.json", "roots/*", "ARCHIVED"}
    assert used == set(documented) - absent


def test_a_root_of_a_shared_store_has_the_documented_files(root, tmp_path):
    """Section 9.4: their places, names and fields."""
    where = tmp_path / "store"
    registry = orbax_delta.handler_registry(store=str(where))
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.arange(1000.0)}))
        manager.wait_until_finished()
    below = root / store.STORE_NAME
    files = ["ROOT.json", "commit_success.txt", "history"]
    assert sorted(path.name for path in below.iterdir()) == files
    files[-1] += "/<attempt>"
    assert all(f"    {name}\n" in DOCUMENT for name in files)
    (entry,) = (where / "roots").iterdir()
    (pattern,) = [row["pattern"] for row in TABLES["2.1"][0] if row["name"] == "root"]
    assert re.fullmatch(pattern, entry.name)
    for table, path in zip(TABLES["9.4"], (below / "ROOT.json", entry), strict=True):
        document = json.loads(path.read_text())
        assert sorted(document) == _names(table)
        meaning = {row["field"]: row["meaning"] for row in table}
        assert str(document["format_version"]) == meaning["format_version"]
        assert f"`{document['magic']}`" == f"`{meaning['magic']}`"


def test_a_step_that_was_moved_leaves_the_documented_file(root, tmp_path):
    """Section 9.6: its name, place and fields; and the name of a pin of section 9.7."""
    with ocp.CheckpointManager(
        root, handler_registry=orbax_delta.handler_registry()
    ) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.arange(1000.0)}))
    assert orbax_delta.archive(root, tmp_path / "cold", steps=[0], move=True).ok
    (path,) = (path for path in root.rglob("*") if path.name == "ARCHIVED")
    assert path.parent == root / "0" / "default"
    document = json.loads(path.read_text())
    (table,) = TABLES["9.6"]
    assert sorted(document) == _names(table)
    meaning = {row["field"]: row["meaning"] for row in table}
    assert str(document["format_version"]) == meaning["format_version"]
    assert f"`{document['magic']}`" == f"`{meaning['magic']}`"
    attempt = "0" * 32
    text = re.search(r"the digest of the text `(archive <attempt>)`", DOCUMENT)[1]
    digest = records.digest(text.replace("<attempt>", attempt).encode())
    assert marks.copying_pin(attempt) == f"{digest.hex()}-p0"


def test_the_history_has_the_documented_fields(root):
    """Section 9.5: of saves, and of restores by processes that save afterwards."""
    for step in range(2):
        registry = orbax_delta.handler_registry()
        with ocp.CheckpointManager(root, handler_registry=registry) as manager:
            if step:
                manager.restore(0, args=ocp.args.StandardRestore())
            manager.save(step, args=ocp.args.StandardSave({"w": np.arange(9.0)}))
    found = {}
    for path in (root / store.STORE_NAME / "history").iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert path.name == next(x["attempt"] for x in lines if "attempt" in x)
        found |= {line["kind"]: line for line in lines}
    for table, kind in zip(TABLES["9.5"], ("save", "restore"), strict=True):
        assert sorted(found[kind]) == _names(table)
        meaning = {row["field"]: row["meaning"] for row in table}
        assert meaning["kind"] == kind
        assert meaning["format_version"] == str(found[kind]["format_version"])


def test_a_condemned_mark_has_the_documented_name(tmp_path):
    """It lies there, under that name, while a prune looks again."""
    pattern = {row["name"]: row["pattern"] for row in TABLES["2.1"][0]}[
        "condemned mark"
    ]
    dead = f"{'0f' * 16}-p0-0"
    opened = store.DeltaStore.open_or_create(store.Folder(str(tmp_path)))
    opened.packs.write(dead, b"")
    seen = []
    names = type(opened.packs).names

    def look(folder):
        seen.extend(names(opened.condemned))
        return names(folder)

    planned = prune.plan(opened)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(opened.packs), "names", look)
        assert prune.execute(opened, planned) == [dead]
    assert seen
    assert all(re.fullmatch(pattern, name) for name in seen)
    assert re.fullmatch(r"[0-9a-f]{32}", opened.uuid)
