"""Work on threads: small items together, results in order, times by stage."""

import concurrent.futures

import hypothesis
import hypothesis.strategies as st
import pytest

from orbax_delta.background import Stopwatch, batches, each, ordered_map


@hypothesis.given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_batches_keep_all_items_in_order(weights, least):
    """None is lost, none is empty, and only the last may be light."""
    found = list(batches(weights, lambda weight: weight, least=least))
    assert [item for batch in found for item in batch] == weights
    assert all(found)
    assert all(sum(batch) >= least for batch in found[:-1])
    assert all(sum(batch[:-1]) < least for batch in found)


def test_a_batch_is_worked_on_in_order_and_raises_what_an_item_raises():
    """A task of many items gives what as many tasks would give."""
    together = batches(range(100), lambda item: 1, least=7)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = ordered_map(pool, each(lambda item: item * item), together, window=3)
        assert [value for batch in found for value in batch] == [
            item * item for item in range(100)
        ]
        with pytest.raises(ZeroDivisionError, match="division"):
            list(ordered_map(pool, each(lambda item: 1 / item), [[1, 0]], window=2))


def test_time_within_a_stage_can_be_counted_as_another_ones():
    """The sum over all stages stays what it was."""
    watch = Stopwatch()
    with watch.stage("code"):
        pass
    before = watch.seconds["code"]
    watch.move(0.25, of="code", to="write")
    assert watch.seconds == {"code": before - 0.25, "write": 0.25}
