"""Grids: codes and values, the same with and without numba, coded exactly."""

import struct

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import second_decoder

from orbax_delta import codecs, gridforms, gridkernels, grids, kernels, lanes, rounding
from orbax_delta.codecs import Form
from orbax_delta.errors import CorruptionError
from orbax_delta.grids import Codes, Grid, Kind

AWKWARD = np.array(
    [
        *(0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0),
        *(0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0x4B000000, 0x4AFFFFFF),
    ],
    np.uint32,
)
"""NaNs, infinities, -0.0, subnormals, the largest numbers, and some with 23 bits."""


@st.composite
def grid_of(draw, *kinds):
    """Any grid of these kinds."""
    kind = draw(st.sampled_from(kinds or list(Kind)))
    seed = (
        0
        if kind in (Kind.RELATIVE, Kind.BITS)
        else draw(st.sampled_from([0, 1, 2**32 - 1]))
    )
    start = draw(st.integers(0, grids.DITHER_PLACES - 1)) if seed else 0
    if kind in (Kind.LOG, Kind.BITS):
        return Grid(kind=kind, shift=draw(st.integers(8, 24)), seed=seed, start=start)
    step = float(np.float32(draw(st.sampled_from([2.0**-126, 1e-4, 0.25, 3.0, 1e30]))))
    floor = draw(st.sampled_from([0.0, 0.5])) if kind is Kind.RELATIVE else 0.0
    return Grid(kind=kind, step=step, floor=floor, seed=seed, start=start)


def floats(seed, count, *, awkward=0.1, scale=1.0):
    """Trained-looking floats, some of them awkward, as bytes."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(count) * scale).astype(np.float32)
    some = rng.random(count) < awkward
    values.view(np.uint32)[some] = rng.choice(AWKWARD, np.count_nonzero(some))
    return values.view(np.uint8)


@pytest.fixture(params=[True, False], ids=["numba", "numpy"])
def compiled(request, monkeypatch):
    """With and without compiled passes, for contents of any size."""
    monkeypatch.setattr(kernels, "AVAILABLE", request.param)
    monkeypatch.setattr(kernels, "_LEAST_BYTES", 0)
    return request.param


def placed(content, grid, source=None):
    """Codes of a content, and the values that it becomes."""
    codes, values = grids.codes(content, grid, source).copy(), np.empty_like(content)
    grids.values(codes, grid, source, values)
    again = np.empty_like(content)
    grids.rounded(content, grid, source, again)
    assert (again == values).all()
    return codes, values


def encoded(content, grid, *, source=None, before=None):
    """The values that a content becomes, and their payload."""
    codes, values = placed(content, grid, source)
    return values, gridforms.encode(Codes(grid=grid, numbers=codes), before)


def with_and_without(function):
    """What a function gives with numba, and without."""
    found = []
    for available in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "AVAILABLE", available)
            patch.setattr(kernels, "_LEAST_BYTES", 0)
            found.append(function())
    return found


# --- codes and values ---------------------------------------------------------------


@hypothesis.given(grid_of(), st.integers(0, 99), st.integers(1, 700), st.booleans())
def test_numba_gives_what_numpy_gives(grid, seed, count, calm):
    """Codes, values, errors and payloads, NaNs and infinities among them."""
    content = floats(seed, count, awkward=0 if calm else 0.2)
    source = floats(seed + 1, count, awkward=0 if calm else 0.2)
    used = source if grid.kind is Kind.RELATIVE else None

    def all_of_it():
        codes, values = placed(content, grid, used)
        errors = rounding._errors(
            content, values, grid.kind, floor=grid.floor, source=used
        )
        before = None if grid.kind is Kind.RELATIVE else source
        payload = gridforms.encode(Codes(grid=grid, numbers=codes), before)
        return codes, values, errors, payload

    (codes, values, errors, payload), plain = with_and_without(all_of_it)
    assert (codes == plain[0]).all()
    assert (values == plain[1]).all()
    np.testing.assert_equal(errors[0], plain[2][0])
    if np.isfinite(errors[0]):
        np.testing.assert_allclose(errors[1], plain[2][1])
    assert payload == plain[3]


@hypothesis.given(grid_of(), st.integers(0, 99), st.integers(1, 300))
def test_codes_say_all_of_what_they_stand_for(grid, seed, count):
    """Whatever was rounded, and whatever was there before."""
    content, source = floats(seed, count), floats(seed + 1, count)
    relative = grid.kind is Kind.RELATIVE
    for before in (None,) if relative else (None, source):
        values, payload = encoded(
            content, grid, source=source if relative else None, before=before
        )
        form = Form.GRID if before is None else Form.GRID_CHANGE
        form = Form.RELATIVE if relative else form
        for found in with_and_without(
            lambda form=form, payload=payload: codecs.decode(
                form, payload, source, content.size, 4
            )
        ):
            assert (found == values).all()


def test_linear_values_by_hand():
    """Ties to even; without a dither these are multiples."""
    content = np.array([0.1, 0.3, 0.25, 0.75, -0.3, 2.0**22], np.float32)
    grid = Grid(kind=Kind.LINEAR, step=0.5)
    codes, values = placed(content.view(np.uint8), grid)
    assert codes.tolist() == [0, 1, 0, 2, -1, 0]  # the last one takes too many steps
    assert values.view(np.float32).tolist() == [0, 0.5, 0, 1, -0.5, 0]


def test_logarithmic_values_by_hand():
    """An octave has one value, in its middle; zero is zero."""
    content = np.array([0.0, 1.0, 1.99, 2.0, 3.0, 2.0**-130], np.float32)
    grid = Grid(kind=Kind.LOG, shift=23)
    codes, values = placed(content.view(np.uint8), grid)
    assert codes.tolist() == [0, 128, 128, 129, 129, 1]
    assert values.view(np.float32).tolist() == [0, 1.5, 1.5, 3, 3, 2.0**-127]


def test_relative_values_by_hand():
    """Steps of half a root of the source and the floor."""
    content = np.array([1.0, 3.0, -5.0, 0.0], np.float32)
    source = np.array([4.0, 4.0, 16.0, 0.0], np.float32)
    grid = Grid(kind=Kind.RELATIVE, step=0.5)
    values = placed(content.view(np.uint8), grid, source.view(np.uint8))[1]
    found = values.view(np.float32)
    assert found[:3].tolist() == [1, 3, -4]
    # Nothing is to be said of what has no scale but that it is a value.
    assert found[3] == 0


def test_the_dither_is_these_bytes():
    """Whoever reads must make the same; 256 values, each about as often."""
    dither = grids._dither(1)
    assert dither[:8].tolist() == [17, 166, 126, 116, 154, 246, 241, 54]
    counts = np.bincount(dither, minlength=256)
    assert counts.min() > 0.8 * counts.mean()


@hypothesis.given(st.integers(0, 99), st.sampled_from([1e-3, 0.1, 1.0]))
def test_a_dither_takes_the_error_away_on_average(seed, share):
    """What moves by far less than a step still gets on: the mean follows it."""
    rng = np.random.default_rng(seed)
    step = 0.01
    start = rng.standard_normal(20_000).astype(np.float32)
    moved = (start + np.float32(share * step / 2)).astype(np.float32)
    grid = Grid(kind=Kind.LINEAR, step=step, seed=seed + 1)
    rounded = placed(moved.view(np.uint8), grid)[1].view(np.float32)
    assert abs(float(np.mean(rounded - moved, dtype=np.float64))) < 0.02 * step


# --- payloads -----------------------------------------------------------------------


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("count", [1, 2, 7, 1000, 20_001])
@pytest.mark.parametrize("form", sorted(codecs.GRID_FORMS))
def test_what_is_coded_comes_back(form, count):
    """By this reader and by the second one, at every size."""
    kinds = (Kind.LINEAR, Kind.LOG, Kind.BITS)
    if form is Form.RELATIVE:
        kinds = (Kind.RELATIVE,)
    for number, kind in enumerate(kinds):
        source = np.abs(floats(1, count, awkward=0).view(np.float32)).view(np.uint8)
        content = floats(number + 2, count, awkward=0, scale=0.1)
        if kind is Kind.LOG:
            content = np.abs(content.view(np.float32)).view(np.uint8)
        grid = Grid(
            kind=kind,
            shift=21 if kind in (Kind.LOG, Kind.BITS) else 0,
            step=0.0 if kind in (Kind.LOG, Kind.BITS) else 2.0**-10,
            floor=0.25 if kind is Kind.RELATIVE else 0.0,
            seed=5 if kind in (Kind.LINEAR, Kind.LOG) else 0,
            start=grids.DITHER_PLACES - 3 if kind in (Kind.LINEAR, Kind.LOG) else 0,
        )
        values, payload = encoded(
            content,
            grid,
            source=source if form is Form.RELATIVE else None,
            before=source if form is Form.GRID_CHANGE else None,
        )
        for out in (None, np.empty_like(values)):
            got = codecs.decode(form, payload, source, values.size, 4, out)
            assert (got == values).all()
        upon = source.copy()
        assert (
            codecs.decode(form, payload, upon, values.size, 4, upon) == values
        ).all()
        second = second_decoder._DECODERS[int(form)](
            second_decoder._Payload(payload, count, 4), source.view("<u4")
        )
        assert (second.view(np.uint8) == values).all()


def test_a_payload_is_these_bytes():
    """A grid of halves, and codes 3, 3, 4: two-bit lanes of 0, 0, 2 about 3."""
    content = np.array([1.5, 1.5, 2.0], np.float32).view(np.uint8)
    payload = encoded(content, Grid(kind=Kind.LINEAR, step=0.5))[1]
    assert payload == (
        b"\x01\x00\x00\x00"  # kind, shift, reserved
        b"\x00\x00\x00\x00"  # seed
        b"\x00\x00\x00\x00"  # start
        b"\x00\x00\x00\x3f"  # step
        b"\x00\x00\x00\x00"  # floor
        b"\x03\x00\x00\x00"  # centre
        b"\x02\x01\x00\x00\x00\x00"  # two-bit lanes, none apart
        b"\x02\x01\x00\x00\x00\x20"  # one plane, of one byte
        b"\x00\x00\x00\x00\x00"  # no words apart
    )


@pytest.mark.usefixtures("compiled")
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    st.integers(0, 99),
    st.integers(0, 2000),
    st.sampled_from([0, 1, 3, 60, 400, 2**30]),
    st.integers(-(2**31), 2**31 - 1),
)
def test_numbers_come_back_from_their_lanes(seed, count, widest, centre):
    """Of any width, and about any centre: sums wrap."""
    rng = np.random.default_rng(seed)
    near = rng.integers(-widest, widest, count, np.int64, endpoint=True)
    codes = (near + centre).astype(np.int32)
    payload = lanes.encode(codes, centre)
    found = lanes.decode(memoryview(payload), count, centre)
    assert (found == codes).all()


def test_rare_changes_take_far_less_than_a_bit():
    """An entropy coder of bytes takes a bit for each byte at least."""
    rng = np.random.default_rng(0)
    codes = (rng.random(1 << 18) < 0.01).astype(np.int32)
    assert len(lanes.encode(codes, 0)) < 0.2 * codes.size / 8


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[:19], "19 bytes has no grid"),
        (lambda p: b"\x05" + p[1:], "grid has kind 5"),
        (lambda p: b"\x03" + p[1:], "kind RELATIVE, which its form does not have"),
        (lambda p: p[:1] + b"\x01" + p[2:], "shift 1"),
        (lambda p: p[:2] + b"\x01" + p[3:], "no such grid"),
        (lambda p: p[:8] + struct.pack("<I", 1 << 18) + p[12:], "start 262144"),
        (lambda p: p[:12] + struct.pack("<f", np.nan) + p[16:], "step nan"),
        (lambda p: p[:12] + struct.pack("<f", -1) + p[16:], "step -1"),
        (lambda p: p[:16] + struct.pack("<f", 1) + p[20:], "floor 1"),
        (lambda p: p[:22], "before the centre"),
        (lambda p: p[:29], "5 bytes have no header"),
        (lambda p: p[:24] + b"\x03" + p[25:], "lanes of 3 bits"),
        (lambda p: p[:25] + b"\x03" + p[26:], "apart in 3 bytes"),
        (lambda p: p[:26] + b"\xff" + p[27:], "255 of 3 apart"),
        (lambda p: p[:35] + b"\x60" + p[36:], "bits are set past the last|stand apart"),
        (lambda p: p[:35] + b"\x03" + p[36:], "1 of 3 packed numbers stand apart"),
        (lambda p: p + b"x", "1 bytes follow the last plane"),
    ],
)
def test_a_damaged_payload_is_a_typed_error(change, message):
    """Whatever is wrong with it."""
    content = np.array([1.5, 1.5, 2.0], np.float32).view(np.uint8)
    payload = encoded(content, Grid(kind=Kind.LINEAR, step=0.5))[1]
    with pytest.raises(CorruptionError, match=message):
        codecs.decode(Form.GRID, change(payload), None, 12, 4)


def test_grids_are_of_words_of_four_bytes():
    """A record of other words is none that a writer makes."""
    payload = encoded(np.zeros(8, np.uint8), Grid(kind=Kind.LINEAR, step=0.5))[1]
    with pytest.raises(CorruptionError, match="words of 8 bytes; expected 4"):
        codecs.decode(Form.GRID, payload, None, 8, 8)


def test_the_passes_are_compiled():
    """Or these tests compare numpy with itself."""
    assert kernels.AVAILABLE
    assert gridkernels.pack(2).py_func is not None
