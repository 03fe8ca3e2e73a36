"""Both coders of planes write frames of section 4.3, whatever is installed."""

import concurrent.futures

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import zstandard

from orbax_delta import entropy, frames, planes

CODERS = (entropy.by_matches, entropy.by_literals)


def _few_values(count, seed=0):
    """Exponents of noise: few values, in no order."""
    rng = np.random.default_rng(seed)
    return np.minimum(rng.geometric(0.5, count), 255).astype(np.uint8)


@pytest.mark.parametrize("code", CODERS)
@hypothesis.given(data=st.binary(min_size=1, max_size=3000), times=st.integers(1, 50))
def test_a_frame_announces_its_size_and_decodes(code, data, times):
    """One frame, no dictionary, the size in front: what a reader insists on."""
    plane = data * times
    frame = code(memoryview(plane))
    assert frames.decompress(frame, len(plane)) == plane
    assert zstandard.get_frame_parameters(frame).dict_id == 0


def test_literals_alone_are_smaller_where_values_are_few_and_in_no_order():
    """Chance repeats cost more than the literals that they replace."""
    plane = _few_values(1 << 18).data
    assert len(entropy.by_literals(plane)) < 0.97 * len(entropy.by_matches(plane))


def test_a_plane_takes_the_coder_that_suits_it():
    """Runs are found by matches, few values by literals, noise by neither."""
    runs = (np.arange(1 << 18) // 700).astype(np.uint8)
    noise = np.random.default_rng(1).integers(0, 256, 1 << 18, dtype=np.uint8)

    def suitable(plane):
        probe = planes._probe(plane)
        return planes._suitable(probe, len(entropy.by_matches(probe)))

    assert suitable(runs) is entropy.by_matches
    assert suitable(_few_values(1 << 18)) is entropy.by_literals
    assert suitable(noise) is None


@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(["runs", "few", "noise", "one"]),
            st.sampled_from([0, 1, 700, 1 << 14, (1 << 14) + 8, 1 << 16]),
        ),
        max_size=9,
    )
)
def test_planes_together_are_coded_as_each_of_them(kinds):
    """Whatever lies beside a plane, its bytes are the same."""
    several = []
    for number, (kind, size) in enumerate(kinds):
        rng = np.random.default_rng(number)
        plane = {
            "runs": (np.arange(size) // 700).astype(np.uint8),
            "few": _few_values(size, number),
            "noise": rng.integers(0, 256, size, dtype=np.uint8),
            "one": np.full(size, number, np.uint8),
        }[kind]
        same = [bool((plane == plane[:1]).all())]
        several.append((plane.reshape(1, -1), same))
    heads = [bytes([number]) for number in range(len(several))]
    together = planes.encode_all(several, heads)
    alone = (planes.encode_all([one], [b""])[0] for one in several)
    assert together == [head + one for head, one in zip(heads, alone, strict=True)]
    for coded, (plane, _) in zip(together, several, strict=True):
        decoded = planes.decode_exactly(memoryview(coded)[1:], plane.size, 1)
        assert (decoded == plane[0]).all()


def test_many_planes_can_be_coded_at_once():
    """Or the test before this one compares a way with itself."""
    assert "multi_compress_to_buffer" in entropy._FEATURES


def test_without_the_other_library_every_plane_is_coded_by_matches(monkeypatch):
    """A platform without it writes larger frames, and the same content."""
    monkeypatch.setattr(entropy, "_zstd", None)
    monkeypatch.setattr(entropy, "_coders", entropy._Coders())
    plane = _few_values(50_000)
    frame = entropy.by_literals(plane.data)
    assert frame == entropy.by_matches(plane.data)
    assert frames.decompress(frame, plane.size) == plane.tobytes()


def test_a_zstd_that_refuses_the_parameter_is_done_without(monkeypatch):
    """It is an experimental one: no save may fail for it."""
    monkeypatch.setattr(entropy, "_LITERALS_MODE", 999_999)
    assert entropy._literal_coder() is None


def test_threads_do_not_share_coders():
    """Many at once give what one alone gives."""
    contents = [_few_values(40_000, seed) for seed in range(24)]
    alone = [entropy.by_literals(content.data) for content in contents]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = pool.map(lambda content: entropy.by_literals(content.data), contents)
        assert list(together) == alone
