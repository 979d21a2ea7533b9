"""What is timed side by side, and what is too large for that. The timing itself is tested on a GPU."""

from __future__ import annotations

import pytest
import torch

from msplit.engines.cuda.autotune import timer, tuner
from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.device.device import Device


@pytest.mark.parametrize(("elements", "lanes"), [(1 << 20, tuner.LANES), (1 << 28, 1)])
def test_calls_with_large_results_are_not_made_side_by_side(monkeypatch, elements, lanes):
    timed = []

    def takes(self, calls, *, cold):
        assert not cold
        timed.append(len(calls))
        return 3.0 * len(calls)

    monkeypatch.setattr(Tuner, "milliseconds_of", takes)
    own = Tuner(Device(torch.device("cpu")))
    made = torch.empty(elements, device="meta")
    assert own.milliseconds(lambda: [made], tuner.LANES) == 3.0 * tuner.LANES
    assert own.milliseconds(lambda: made) == 3.0
    assert timed == [lanes, 1]


@pytest.mark.parametrize(
    ("each", "runs"), [(0.1, timer.MOST_REPLAYS), (4.0, timer.MOST_REPLAYS), (10.0, 10), (400.0, 5)]
)
def test_calls_that_take_long_run_less_often(each, runs):
    times = []
    while not timer.enough(times):
        times.append(each)
    assert len(times) == runs


@pytest.mark.parametrize(
    ("elements", "count"),
    [(16, tuner.CALLS * tuner.LANES), (1 << 25, 2), (1 << 27, 1), (0, tuner.CALLS * tuner.LANES)],
)
def test_there_are_as_many_copies_of_weights_as_calls_or_as_memory_allows(elements, count):
    weights = torch.empty(elements, device="meta")
    assert len(tuner.copies(weights)) == count
    assert tuner.copies(weights)[0] is weights


@pytest.mark.parametrize("start", [0, 1, 2])
def test_copies_begin_as_far_behind_a_wide_load_as_the_weights_and_keep_gaps(start):
    """Kernels are compiled for both: others would be timed than will run."""
    weights = torch.arange(45.0).reshape(3, 3, 5)[start:, :, 1:4].permute(1, 0, 2)
    for copy in tuner.copies(weights)[1:4]:
        assert torch.equal(copy, weights)
        assert copy.stride() == weights.stride()
        assert copy.data_ptr() % 16 == weights.data_ptr() % 16


def test_every_call_has_the_next_copy_which_lies_and_is_like_the_others():
    weights = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    made = tuner.copies(weights)[:3]
    turns = tuner.RotatingWeights(
        lambda data, own, bias: (own.data_ptr(), data @ own + bias), torch.ones(3, 2), made, [torch.ones(3)]
    )
    (first, result), *others = (turns() for _ in range(4))
    assert [first, *(place for place, _ in others)] == [*(one.data_ptr() for one in made), made[0].data_ptr()]
    assert all(one.stride() == weights.stride() for one in made)
    assert all(torch.equal(other, result) for _, other in others)


@pytest.mark.parametrize("forgiving", [True, False])
def test_candidates_that_give_other_numbers_or_do_not_run_are_left_out(monkeypatch, forgiving):
    def fails():
        raise RuntimeError("out of resource: shared memory")

    ones = (torch.ones(3), torch.full((2,), 100.0))
    calls = {
        "slow": lambda: ones,
        "wrong": lambda: (ones[0], ones[1] + 1),
        "nan": lambda: (ones[0] * float("nan"), ones[1]),
        "fast": lambda: (ones[0] + 0.004, ones[1] - 0.4),
        **({"fails": fails} if forgiving else {}),
    }
    took = {calls["slow"]: 3.0, calls["fast"]: 2.0}
    monkeypatch.setattr(Tuner, "milliseconds", lambda self, call, cold: took[call])
    own = Tuner(Device(torch.device("cpu")))
    ranked = own.ranked(calls.items(), ones, forgiving=forgiving)
    assert [(one.choice, one.milliseconds) for one in ranked] == [("fast", 2.0), ("slow", 3.0)]
    assert own.ranked([], ones) == []
    with pytest.raises(RuntimeError, match="shared memory"):
        own.ranked([("fails", fails)], ones)


@pytest.mark.parametrize(
    ("loaded", "chosen"),
    [((1.0, 1.0, 1.0), "fast"), ((9.0, 1.0, 1.0), "second"), ((9.0, 9.0, 1.0), None), ((9.0, 8.0, 1.0), None)],
)
def test_what_is_chosen_beats_the_baseline_alone_and_under_load(monkeypatch, loaded, chosen):
    """Alone the last one is slower than the baseline, which takes 4 ms alone and 8 under load."""
    names = ("fast", "second", "slow")
    took = dict(zip(names, loaded, strict=True)) | {"baseline": 8.0}
    calls = {name: (lambda name=name: name) for name in took}
    monkeypatch.setattr(
        Tuner, "milliseconds", lambda self, call, lanes=1, cold=False: 4.0 if lanes == 1 else took[call()]
    )
    ranked = [tuner.Ranked(time, name, calls[name]) for name, time in zip(names, (2.0, 3.0, 5.0), strict=True)]
    own = Tuner(Device(torch.device("cpu")))
    assert own.first_to_beat(ranked, calls["baseline"]) == chosen
    assert own.first_to_beat(ranked[2:], calls["baseline"]) is None
    with tuner.choosing_for(chain=True):
        assert own.first_to_beat(ranked, calls["baseline"]) == "fast", "nothing runs beside it"
        assert own.first_to_beat(ranked[2:], calls["baseline"]) is None


def test_what_is_chosen_for_a_chain_is_not_taken_for_what_has_branches():
    family = tuner.Family("numbers", int, lambda value: value.whole(), 0)
    own = Tuner(Device(torch.device("cpu")))
    assert own.choose(family, ("key",), lambda: 1) == 1
    with tuner.choosing_for(chain=True):
        assert own.known(family, ("key",)) is None
        assert own.choose(family, ("key",), lambda: 2) == 2
        assert own.choose(family, ("key",), lambda: 3) == 2
    assert own.known(family, ("key",)) == (1,)


@pytest.mark.parametrize(
    ("alone", "beside", "wins"),
    [
        (0.65, 0.96, True),  # a product of the sample MMoE, as seven processes timed it; it won in six
        (0.65, 0.98, True),
        (0.65, 1.04, True),
        (0.65, 1.10, False),
        (0.90, 1.33, False),
        (0.95, 0.95, True),
        (0.98, 0.98, False),
        (1.02, 0.80, True),
        (1.10, 0.80, False),
    ],
)
def test_what_alone_and_side_by_side_say_counts_together(monkeypatch, alone, beside, wins):
    """Many kernels take the same time where the GPU is full: to be faster there, too, was chance."""
    own = Tuner(Device(torch.device("cpu")))
    times = {("ours", 1): alone, ("ours", tuner.LANES): beside}
    monkeypatch.setattr(own, "milliseconds", lambda call, lanes=1, *, cold: times.get((call, lanes), 1.0))
    assert own.beats("ours", "library", cold=True) is wins
    with tuner.choosing_for(chain=True):
        assert own.beats("ours", "library", cold=True) is (alone < 0.97)
