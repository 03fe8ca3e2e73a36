"""The strict reader of JSON: what FORMAT.md allows, as Python reads it, and no more."""

import json
import sys

import hypothesis
import hypothesis.strategies as st
import pytest
import zstandard

from orbax_delta import jsontext, manifests, records
from orbax_delta.errors import FormatError

_NUMBERS = st.integers(-(2**70), 2**70) | st.floats(
    allow_nan=False, allow_infinity=False
)
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4)
    ),
    max_leaves=10,
)


@hypothesis.given(VALUES, st.booleans())
def test_what_the_format_allows_is_read(value, ascii_only):
    """Any value, written by Python, comes back."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert jsontext.parse(text.encode()) == value


@hypothesis.given(st.binary(max_size=60) | st.text('{}[]:,"0e-.aNI ').map(str.encode))
def test_any_bytes_are_read_as_python_reads_them_or_refused(data):
    """There is no second opinion on what a text says."""
    try:
        value = jsontext.parse(data)
    except ValueError:
        return
    assert value == json.loads(data.decode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b"{}x", "Extra data"),
        (b"\xff", "can't decode"),
        (b'"\xed\xa0\x80"', "can't decode"),
        ("{}".encode("utf-16"), "can't decode"),
        ("{}".encode("utf-32-le"), "Expecting property name|Extra data"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"NaN", "holds NaN"),
        (b"[1, Infinity]", "holds Infinity"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b"[1e999]", "holds 1e999"),
        (b"[-1e999]", "holds -1e999"),
        (b'{"a": 1, "a": 1}', "names 'a' twice"),
        (b'[{"b": {"a": 1, "\\u0061": 2}}]', "names 'a' twice"),
        (b"9" * 5000, "integer string conversion"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"01", "Extra data"),
        (b"'a'", "Expecting value"),
    ],
)
def test_what_it_forbids_is_refused(data, message):
    """With the reason."""
    with pytest.raises(ValueError, match=message):
        jsontext.parse(data)


def test_depth_is_no_crash():
    """Where reading or the digest goes too deep the error is of the same kind."""
    for depth in range(10, sys.getrecursionlimit() + 200, 37):
        text = b'{"a":' * depth + b"1" + b"}" * depth
        try:
            document = jsontext.parse(text)
            assert len(jsontext.document_digest(document)) == 32
        except ValueError as error:
            assert "nested too deeply" in str(error)  # noqa: PT017


@hypothesis.given(st.dictionaries(_TEXTS, VALUES, max_size=4))
def test_a_sealed_document_is_read_back(document):
    """Its digest fits, whatever its own field `digest` held before."""
    found = jsontext.parse(jsontext.sealed(document))
    jsontext.check_seal(found)
    rest = {name: value for name, value in document.items() if name != "digest"}
    assert found == {**rest, "digest": jsontext.document_digest(rest)}


@pytest.mark.parametrize("change", [{"a": 2}, {"b": 1}, {"digest": None}])
def test_a_changed_document_has_another_digest(change):
    """Another value, another field, no digest."""
    document = jsontext.parse(jsontext.sealed({"a": 1})) | change
    with pytest.raises(ValueError, match=r"its digest is .*, but it says"):
        jsontext.check_seal(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"step": 1, "step": 2, "required_features": []}', "names 'step' twice"),
        (b'{"wall_time": NaN, "required_features": []}', "holds NaN"),
    ],
)
def test_a_manifest_is_read_so_too(text, message):
    """Its digest fits, but its document is none."""
    body = zstandard.compress(text)
    digest = records.digest(body).hex()
    header = f"ORBAX-DELTA-MANIFEST {records.FORMAT_VERSION} {digest} {len(text)}\n"
    with pytest.raises(FormatError, match=message):
        manifests.parse_manifest(header.encode() + body, where="7/default/MANIFEST")
