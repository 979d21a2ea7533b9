"""Between plans that are about as fast, the one that takes less memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msplit.schedule.algorithms import ONE
from msplit.schedule.choose import MEMORY_FLOOR, MORE_MEMORY, SLOWER, TIE, Proposal, best, leanest

NONE = np.zeros(0, np.int32)


def candidates(scores):
    names = [ONE, *(f"plan {number}" for number in range(1, len(scores)))]
    return [Proposal(name, NONE, NONE, us, 0, 1, us) for name, us in zip(names, scores, strict=True)]


def taken(scores, megabytes):
    found = candidates(scores)
    peaks = dict(zip([one.name for one in found], megabytes, strict=True))
    return leanest(found, lambda candidate: round(peaks[candidate.name] * 1e6)).name


def test_a_plan_that_takes_much_memory_gives_way_to_one_that_is_hardly_slower():
    assert taken([100, 50, 50.5, 50.8], [10, 30, 20, 14]) == "plan 3"
    assert taken([100, 50, 50.5, 50.8], [10, 30, 14, 12]) == "plan 2"  # the fastest that keeps to it


def test_it_stays_where_memory_is_no_matter_or_less_costs_time():
    assert taken([100, 50, 50.5], [10, 15, 12]) == "plan 1"
    assert taken([100, 50, 50.5], [0.1, 0.9, 0.1]) == "plan 1"
    assert taken([100, 50, 52], [10, 30, 12]) == "plan 1"


def test_the_least_is_taken_where_none_keeps_to_it():
    assert taken([100, 50, 50.5, 50.8], [10, 30, 20, 25]) == "plan 2"


@given(st.lists(st.tuples(st.floats(1, 100), st.integers(0, 50_000_000)), min_size=1, max_size=8))
def test_it_keeps_to_the_limit_or_no_plan_about_as_fast_does(plans):
    found = candidates([us for us, _ in plans])
    peaks = {one.name: peak for one, (_, peak) in zip(found, plans, strict=True)}
    chosen, fastest = leanest(found, lambda candidate: peaks[candidate.name]), best(found)
    near = [one for one in found if one.score_us <= fastest.score_us * (1 + SLOWER)]
    limit = max(MEMORY_FLOOR, MORE_MEMORY * peaks[ONE])
    assert chosen.score_us <= fastest.score_us * (1 + SLOWER)
    assert chosen.score_us <= min(one.score_us for one in found) * (1 + SLOWER) / (1 - TIE)
    assert peaks[chosen.name] <= max(limit, min(peaks[one.name] for one in near))
