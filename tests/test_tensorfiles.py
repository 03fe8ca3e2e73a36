"""The bytes of safetensors: against the real package, and what is none of them."""

import doctest
import json
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from test_exports import safetensors

from orbax_delta import tensorfiles, tensorfolders, tensorsources, unread
from orbax_delta.errors import FormatError
from orbax_delta.tensorfiles import DTYPES, Tensor, encode_header, laid_out

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)
TENSORS = st.lists(
    st.builds(
        Tensor,
        name=NAMES,
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda tensor: tensor.name,
)
TEXTS = st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"])))


def parsed(file):
    """What `tensorfiles` reads of a whole file."""
    head, rest = file[:8], file[8:]
    length = tensorfiles.header_bytes(head, file_bytes=len(file), where="x")
    return tensorfiles.parse_header(
        rest[:length], data_bytes=len(rest) - length, where="x"
    )


@hypothesis.given(tensors=TENSORS, metadata=TEXTS)
def test_any_header(tensors, metadata):
    """The real package reads the same as this one; tensors are aligned."""
    safetensors()
    import safetensors as real

    placed = laid_out(tensors)
    size = sum(tensor.nbytes for tensor in placed)
    file = encode_header(placed, metadata) + bytes(size)
    assert (len(file) - size) % 8 == 0
    found = {name: (one["dtype"], one["shape"]) for name, one in real.deserialize(file)}
    codes = dict(zip(DTYPES, tensorfiles._CODES.values(), strict=True))
    assert found == {t.name: (codes[t.dtype], list(t.shape)) for t in placed}
    got, kept = parsed(file)
    assert (sorted(got, key=repr), kept) == (sorted(placed, key=repr), metadata)
    for tensor in placed:
        width = tensor.nbytes // max(1, int(np.prod(tensor.shape)))
        assert tensor.start % max(1, min(width, 8)) == 0


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def entry(**changes):
    """A header whose one tensor differs."""
    return {"a": GOOD["a"] | changes}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (entry(dtype="C128"), r"tensor 'a' has the dtype 'C128', which this package"),
        (entry(dtype=3), r"has the dtype 3"),
        (entry(shape=[2.0]), r"has the place \[2.0\]"),
        (entry(shape=[-2]), r"has the place \[-2\]"),
        (entry(shape=[True]), r"has the place \[True\]"),
        (entry(shape="2"), r"has the place 2"),
        (entry(shape=None), r"header of x"),
        (entry(shape=[3]), r"tensor 'a' has 8 bytes; expected 12"),
        (entry(data_offsets=[0]), r"header of x"),
        (entry(data_offsets=[4, 12]), r"tensor 'a' begins at 4; expected 0"),
        (entry(shape=[1], data_offsets=[0, 4]), r"take 4 bytes, and 8 follow it"),
        (GOOD | {"b": GOOD["a"]}, r"tensor '[ab]' begins at 0; expected 8"),
        (GOOD | {"b": 3}, r"header of x"),
        (GOOD | {"__metadata__": {"x": 3}}, r"its metadata are not texts"),
        (GOOD | {"__metadata__": 3}, r"header of x"),
        ([], r"header of x"),
        ({"a": {}}, r"header of x"),
    ],
)
def test_headers_that_are_none(document, words):
    """Each names the file and what is wrong."""
    text = json.dumps(document).encode()
    file = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(FormatError, match=words) as caught:
        parsed(file)
    assert re.search(r"header of x is not one of safetensors", str(caught.value))


@pytest.mark.parametrize(
    "file",
    [b"", b"1234567", bytes(8), b"\xff" * 8 + b"{}", bytes(16), b"\3" + bytes(9)],
)
def test_files_that_are_none(file):
    """Too short, no length, a length beyond the end."""
    with pytest.raises(
        FormatError, match=r"x is no safetensors file: it has \d+ bytes"
    ):
        parsed(file)


@hypothesis.given(data=st.binary(max_size=60))
def test_any_bytes(data):
    """Nothing but a FormatError comes of what anybody may have written."""
    text = len(data).to_bytes(8, "little") + data
    for file in (data, text):
        try:
            parsed(file)
        except FormatError as error:
            assert "x" in str(error)  # noqa: PT017 # any of them


@hypothesis.given(data=st.data())
def test_runs(data):
    """They are where numpy puts the elements of a box."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    box = tuple(
        (low, data.draw(st.integers(low, size)))
        for size in shape
        for low in [data.draw(st.integers(0, size))]
    )
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    wanted = numbers[tuple(slice(*span) for span in box)].reshape(-1).tolist()
    runs = list(unread.runs(box, shape)) if wanted else []
    found = [first + k for first, count in runs for k in range(count)]
    assert found == wanted


def test_examples():
    """What the docstrings show works."""
    for module in (tensorfiles, tensorfolders, tensorsources, unread):
        tried = doctest.testmod(module, extraglobs={"np": np})
        assert tried.failed == 0
        assert tried.attempted
