"""For tests of programs that save with this package: faults, states, a contract.

Break the store under your own training loop and see that it comes through:

    from orbax_delta import testing

    with testing.faults() as log:                     # count first
        train(steps=3)
    for number in range(1, len(log.operations) + 1):
        with testing.new_life():
            with testing.faults(testing.crash_at(number)):
                with pytest.raises(testing.SimulatedCrash):
                    train(steps=3)
        with testing.new_life():
            resume_and_compare()

`check_store(url)` finds out whether a file system or bucket keeps what the format asks
of storage. `orbax_delta.testing.strategies` has Hypothesis strategies for training
states and their changes; it alone needs the extra `orbax-delta[testing]`.
"""

from orbax_delta.testing.contract import CONTRACT, check_store
from orbax_delta.testing.injection import (
    Call,
    Done,
    Failed,
    Log,
    Match,
    Operation,
    Rule,
    SimulatedCrash,
    faults,
)
from orbax_delta.testing.lives import new_life
from orbax_delta.testing.rules import (
    crash_at,
    delay,
    fail,
    flip_bit,
    lose_acknowledgement,
    lose_write,
    out_of_order,
    stale_listing,
    truncate,
)

__all__ = [
    "CONTRACT",
    "Call",
    "Done",
    "Failed",
    "Log",
    "Match",
    "Operation",
    "Rule",
    "SimulatedCrash",
    "check_store",
    "crash_at",
    "delay",
    "fail",
    "faults",
    "flip_bit",
    "lose_acknowledgement",
    "lose_write",
    "new_life",
    "out_of_order",
    "stale_listing",
    "truncate",
]
