"""Attempt, vote and verdict, driven by threads that stand for processes.

The key-value store is a dictionary behind a lock, with the rules of JAX's; that it has
those rules is checked against the real one in `test_many_processes`. Real processes
fail in `test_process_drills`.
"""

import collections
import concurrent.futures
import contextlib
import threading

import hypothesis
import hypothesis.strategies as st
import pytest

from orbax_delta import hosts
from orbax_delta.errors import (
    ConflictError,
    DeltaError,
    DisagreementError,
    InvalidInputError,
    PeerError,
    StorageError,
)
from orbax_delta.hosts import Job, Round


class _Service:
    """A coordination service in memory; `down` makes every call fail."""

    def __init__(self):
        self.values = {}
        self.down = False
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self._changed:
            self._check()
            if key in self.values:
                raise RuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        with self._changed:
            self._check()
            self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000)
            if key not in self.values:
                raise RuntimeError(f"DEADLINE_EXCEEDED: timed out with key: {key}")
            return self.values[key]

    def key_value_try_get_bytes(self, key):
        with self._changed:
            self._check()
            if key not in self.values:
                raise RuntimeError(f"NOT_FOUND: Config key {key} not found.")
            return self.values[key]

    def key_value_delete(self, key):
        with self._changed:
            self._check()
            for name in [k for k in self.values if k == key or k.startswith(key)]:
                del self.values[name]

    def _check(self):
        if self.down:
            raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")


@pytest.fixture
def service():
    """Rounds are counted in each process; these threads are in one."""
    Round._begun = collections.Counter()
    Round._ended = {}
    return _Service()


def rounds(service, *processes, timeout=20.0, number=1):
    """The same round as each of some processes has it."""
    found = []
    for process in processes:
        Round._begun = collections.defaultdict(lambda: number - 1)
        job = Job(process=process, processes=processes, client=service)
        found.append(Round(job, "7/default", timeout=timeout))
    return found


def together(function, *arguments):
    """`function` on a thread for each argument; results or errors, in order."""
    with concurrent.futures.ThreadPoolExecutor(len(arguments)) as executor:
        futures = [executor.submit(function, argument) for argument in arguments]
    return [future.exception() or future.result() for future in futures]


def save(agreed, *, fail=None, publish=lambda votes: {"sum": sum(votes)}):
    """A save as `save.py` makes it; a vote is the number of the process."""
    with agreed.spread_errors():
        bits, details = agreed.attempt({"place": "here"})
        if fail is not None:
            raise fail
        ballot = {"number": agreed.job.process}
        if not agreed.job.primary:
            return bits, details, agreed.vote(ballot)
        votes = [vote["number"] for vote in agreed.collect(ballot)]
        outcome = publish(votes)
        agreed.settle(outcome)
        return bits, details, outcome


def end(agreed):
    """As when all processes have left the round, and the primary sees to its keys."""
    agreed.leave()
    Round.clear_ended(agreed.job)


def test_all_get_the_attempt_and_the_verdict_of_the_primary(service):
    """128 bits, what it announced, and what it made of all votes."""
    results = together(save, *rounds(service, *range(4)))
    assert results == [results[0]] * 4
    bits, details, outcome = results[0]
    assert len(bits) == 16
    assert (details, outcome) == ({"place": "here"}, {"sum": 6})


def test_a_process_alone_asks_nobody():
    """There is no service without `jax.distributed.initialize`."""
    agreed = Round(Job(), "7/default", timeout=1.0)
    agreed.declare(None)
    bits, details, outcome = save(agreed)
    assert (len(bits), details, outcome) == (16, {"place": "here"}, {"sum": 0})
    agreed.look()
    end(agreed)
    with pytest.raises(InvalidInputError, match="mine"):
        agreed.declare(InvalidInputError("mine"))


@pytest.mark.parametrize("process", range(3))
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StorageError("disk full"), StorageError),
        (ConflictError("its pin was removed"), ConflictError),
        (MemoryError("no room"), DeltaError),
        (KeyboardInterrupt(), DeltaError),
    ],
)
def test_the_error_of_one_is_raised_by_all(service, process, error, expected):
    """Of the class that it has there, naming process and cause; its own as it is."""

    def run(agreed):
        fail = error if agreed.job.process == process else None
        with contextlib.suppress(KeyboardInterrupt):
            return save(agreed, fail=fail)
        return error

    results = together(run, *rounds(service, *range(3)))
    assert results.pop(process) is error
    for raised in results:
        assert type(raised) is expected
        assert str(raised).startswith(f"process {process} on ")
        assert str(error) in str(raised)


def test_who_waits_too_long_gives_up_for_all(service):
    """One of three does not come; the others agree on an error that names it."""
    primary, second, _ = rounds(service, *range(3), timeout=0.3)
    for raised in together(save, primary, second):
        assert isinstance(raised, PeerError)
        assert "process 2 did not answer within 0.3 s" in str(raised)
        # Orbax replaces the words of those.
        assert not isinstance(raised, TimeoutError)


def test_who_waits_for_the_verdict_knows_whose_vote_is_missing(service):
    """Not the primary, which waits like everybody."""
    primary, second, _ = rounds(service, *range(3), timeout=0.3)
    primary.attempt({})
    with pytest.raises(PeerError, match="process 2 did not answer"):
        save(second)


def test_a_late_primary_obeys_the_abort_of_the_others(service):
    """It has published, and must know to withdraw that."""
    primary, second = rounds(service, *range(2), timeout=0.3)
    gave_up = threading.Event()

    def publish(votes):
        assert gave_up.wait(20)
        return {}

    def run(agreed):
        try:
            return save(agreed, publish=publish)
        finally:
            if not agreed.job.primary:
                gave_up.set()

    first, other = together(run, primary, second)
    assert isinstance(first, PeerError)
    assert isinstance(other, PeerError)
    assert "process 1 on " in str(first)
    assert "process 0 did not answer" in str(first)


def test_a_commit_wins_against_a_late_abort(service):
    """Whoever gives up after the verdict gets the verdict."""
    primary, second = rounds(service, *range(2))
    together(lambda agreed: agreed.attempt({}), primary, second)
    primary._set("verdict", {"commit": {"sum": 1}})
    second._timeout = 0.0
    assert second.vote({"number": 1}) == {"sum": 1}
    assert second._decide({"abort": {}}) == {"commit": {"sum": 1}}


def test_those_at_work_see_an_abort(service, monkeypatch):
    """Nobody codes for minutes what is lost already."""
    monkeypatch.setattr(hosts, "_LOOK_EVERY_SECONDS", 0.0)
    primary, second = rounds(service, *range(2))
    second.look()
    with pytest.raises(StorageError), primary.spread_errors():
        raise StorageError("disk full")
    with pytest.raises(StorageError, match=r"process 0 on .*: disk full"):
        second.look()


def test_a_problem_of_all_is_raised_by_all(service):
    """Each its own, from `save` itself, and nothing is left to the background."""

    def declare(agreed):
        agreed.declare(InvalidInputError(f"leaf of {agreed.job.process}"))

    results = together(declare, *rounds(service, *range(3)))
    assert [str(error) for error in results] == [f"leaf of {i}" for i in range(3)]
    # Their keys go with those of the next save, when nobody reads them any more.
    assert len(service.values) == 3
    later = rounds(service, *range(3), number=2)
    together(save, *later)
    assert all(key.startswith(later[0]._prefix) for key in service.values)
    end(later[0])
    assert service.values == {}


def test_a_problem_of_one_goes_to_the_vote(service):
    """Raised from `save` by one process, it would leave the others in a barrier."""
    primary, second = rounds(service, *range(2))
    problem = InvalidInputError("no such leaf")
    assert together(
        lambda pair: pair[0].declare(pair[1]), (primary, None), (second, problem)
    ) == [None, None]

    def run(agreed):
        return save(agreed, fail=None if agreed.job.primary else problem)

    first, other = together(run, primary, second)
    assert other is problem
    assert isinstance(first, InvalidInputError)


def test_attempts_of_a_step_do_not_meet(service):
    """A straggler of the first one votes where nobody counts any more."""
    first = rounds(service, *range(2), timeout=0.3)
    with pytest.raises(PeerError, match="process 1 did not answer"):
        save(first[0])
    again = rounds(service, *range(2), number=2)
    results = together(save, *again)
    assert results[0] == results[1]
    with pytest.raises(PeerError, match=r"process 0 on .*process 1 did not answer"):
        save(first[1])


def test_groups_that_save_the_same_step_do_not_meet(service):
    """Each to a root of its own, at the same time or one after the other."""
    first, second = rounds(service, 0, 1), rounds(service, 2, 3)
    results = together(save, *first, *second)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert [result[2]["sum"] for result in results] == [1, 1, 5, 5]
    assert results[0] != results[2]
    # Not all have been in as many rounds before.
    assert together(save, *rounds(service, *range(4)))[3][2] == {"sum": 6}


def test_keys_of_a_group_wait_for_that_group(service):
    """Those who are in another one may not have seen the end."""
    for one in rounds(service, *range(3)):
        one._set(f"state/{one.job.process}", {"fit": False})
        one.leave()
    left = set(service.values)
    together(save, *rounds(service, 0, 1))
    assert left <= set(service.values)
    together(save, *rounds(service, *range(3), number=2))
    assert not left & set(service.values)


def test_keys_are_removed_by_the_primary(service):
    """When all have seen the end; those of another round stay."""
    first, second = rounds(service, *range(2))
    together(save, first, second)
    later = rounds(service, *range(2), number=11)
    together(save, *later)
    end(second)
    assert any(key.startswith(first._prefix) for key in service.values)
    end(first)
    assert {key.split("/")[5] for key in service.values} == {"11"}


def test_saves_of_some_processes_do_not_count_for_the_others(service):
    """Otherwise they would wait for each other in rounds of different numbers."""
    some = Job(process=0, processes=(0, 1), client=service)
    Round(some, "7/default", timeout=0.3)
    of_all = [
        Round(
            Job(process=process, processes=range(3), client=service),
            "7/default",
            timeout=0.3,
        )._prefix
        for process in (0, 2)
    ]
    Round._begun.clear()
    alone = Job(process=2, processes=range(3), client=service)
    assert of_all[0] == Round(alone, "7/default", timeout=0.3)._prefix


def test_all_restore_or_none(service):
    """What each has got, if all have it."""
    results = together(
        lambda agreed: agreed.unanimous("3", lambda: agreed.job.process),
        *rounds(service, 0, 1, 2),
    )
    assert results == [0, 1, 2]


@pytest.mark.parametrize("failing", [{0}, {2}, {0, 1}, {1, 2}, {0, 1, 2}])
def test_of_several_errors_all_raise_the_same(service, failing):
    """They decide by its class, and by the step that it names, how to go on."""

    def run(agreed):
        def work():
            if agreed.job.process not in failing:
                return
            kind = StorageError if agreed.job.process == 2 else ConflictError
            error = kind(f"trouble of {agreed.job.process}")
            error.restorable = agreed.job.process
            raise error

        return agreed.unanimous("3", work)

    results = together(run, *rounds(service, 0, 1, 2))
    assert len({type(error) for error in results}) == 1
    (whose,) = {error.restorable for error in results}
    assert whose in failing
    assert type(results[0]) is (StorageError if whose == 2 else ConflictError)
    for error in results:
        assert f"trouble of {whose}" in str(error)
    # Their keys go with the next round.
    again = rounds(service, 0, 1, 2, number=2)
    together(lambda agreed: agreed.unanimous("3", lambda: None), *again)
    assert all(key.startswith(again[0]._prefix) for key in service.values)


def test_who_restores_something_else_is_told(service):
    """And so are the others, at once."""
    agreed = rounds(service, 0, 1, 2)
    results = together(
        lambda one: one.unanimous(str(one.job.process // 2), lambda: None), *agreed
    )
    for error in results:
        assert isinstance(error, DisagreementError)
        assert "this process wants to save 1 while the primary wants 0" in str(error)


def test_a_service_that_is_gone_is_a_storage_error(service):
    """The process that ran it has died; jax will end this one."""
    primary, second = rounds(service, *range(2))
    service.down = True
    with pytest.raises(StorageError, match="coordination service: UNAVAILABLE"):
        save(second)
    with pytest.raises(StorageError, match="coordination service: UNAVAILABLE"):
        save(primary)
    end(primary)


@hypothesis.given(
    count=st.integers(2, 4),
    failing=st.sets(st.integers(0, 3)),
    late=st.sets(st.integers(0, 3)),
)
@hypothesis.settings(max_examples=25, deadline=None)
def test_all_commit_or_none(count, failing, late):
    """Whoever fails or gives up before its time: no two processes disagree."""
    Round._begun = collections.Counter()
    agreed = rounds(_Service(), *range(count))
    for process in late & set(range(count)):
        agreed[process]._timeout = 0.01

    def run(one):
        fail = StorageError("x") if one.job.process in failing else None
        return save(one, fail=fail)

    results = together(run, *agreed)
    committed = [not isinstance(result, Exception) for result in results]
    assert len(set(committed)) == 1
    if not late & set(range(count)):
        assert committed[0] == (not failing & set(range(count)))
