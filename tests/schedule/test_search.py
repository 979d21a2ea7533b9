"""The search finds what a made-up device rewards, within a made-up clock, and never less than one stream."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import pytest

from msplit.schedule.choose import best, choose
from msplit.schedule.problem import Problem
from msplit.schedule.search import PlanCandidate, SearchLimits, search
from msplit.schedule.simulate import evaluate
from tests.campaign import examples
from tests.schedule import problems

experts, inception, towers = map(cache, (problems.experts, problems.inception, problems.towers))

STEP = 0.01
"""Seconds that a round of one candidate takes on the clock."""


@pytest.fixture(autouse=True, scope="module")
def _each_problem_is_scheduled_once() -> Iterator[None]:
    """What searches of one problem start from is the same, and takes longer than they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msplit.schedule.search.choose", cache(choose))
        yield


class FakeDevice:
    """Runs candidates in the simulator, with a truth of its own, and noise. A build keeps its luck while it lives."""

    def __init__(
        self,
        problems: dict[str, Problem],
        truth: Callable[[PlanCandidate, float], float] = lambda candidate, simulated: simulated,
        *,
        noise: float = 0.0,
        luck: float = 0.0,
        memory: Callable[[PlanCandidate], float] = lambda candidate: 1.0,
    ) -> None:
        self.problems, self.truth, self.noise, self.luck, self._memory = problems, truth, noise, luck, memory
        self.clock = 0.0
        self.built: dict[tuple[str, bytes], float] = {}
        self.simulated: dict[tuple[str, bytes, bytes], float] = {}
        self.chance = random.Random(1)
        self.measured: list[PlanCandidate] = []

    def now(self) -> float:
        return self.clock

    def true_us(self, candidate: PlanCandidate) -> float:
        """What a step takes; each candidate is simulated once, though it is measured many times."""
        stream, order = candidate.schedule.stream, candidate.schedule.order
        key = (candidate.mode, stream.tobytes(), order.tobytes())
        if key not in self.simulated:
            found = evaluate(self.problems[candidate.mode], stream, order)
            self.simulated[key] = found.simulation.makespan_us
        return self.truth(candidate, self.simulated[key])

    def times(self, candidates: Sequence[PlanCandidate], rounds: int) -> list[list[float]]:
        self.clock += STEP * rounds * len(candidates)
        self.measured += candidates
        found = []
        for candidate in candidates:
            luck = self.built.setdefault(candidate.key(), 1 + self.luck * self.chance.uniform(-1, 1))
            us = self.true_us(candidate) * luck
            found.append([us / 1e6 * (1 + self.noise * self.chance.uniform(-1, 1)) for _ in range(rounds)])
        return found

    def renew(self) -> None:
        self.built.clear()

    def memory(self, candidate: PlanCandidate) -> float:
        return self._memory(candidate)

    def describe(self) -> str:
        return "made up"


def run(problem: Problem, device: FakeDevice, **limits):
    return search({"plain": problem}, device, SearchLimits(**{"seconds": 30.0, "streams": 4, **limits}), now=device.now)


def test_where_the_simulator_is_right_the_winner_is_no_worse_than_the_best_candidate():
    problem = inception(3)
    device = FakeDevice({"plain": problem})
    found = run(problem, device, seconds=12.0)
    simulated = best(choose(problem, 4))
    assert device.true_us(found.candidate) <= simulated.makespan_us * 1.001
    assert device.true_us(found.winner) <= device.true_us(found.candidate)
    assert found.measurements[0].gain >= max(
        measurement.gain for measurement in found.measurements if measurement.gain is not None
    )


def test_local_search_finds_what_the_simulator_does_not_know():
    problem = inception(3)
    branches = [node for node in range(len(problem)) if 9 < problem.work_us[node] < 25]

    def truth(candidate, simulated):
        """What the simulator does not see, the record order among branches on different streams, counts: light ones should come first."""
        place = np.argsort(candidate.schedule.order)
        late = [place[a] > place[b] for a in branches for b in branches if problem.work_us[a] < problem.work_us[b]]
        return simulated * (1 + 0.1 * float(np.mean(late)))

    device = FakeDevice({"plain": problem}, truth, noise=0.002)
    found = run(problem, device, seconds=examples(30, 300))
    assert found.gains
    assert device.true_us(found.winner) < device.true_us(found.candidate) * 0.995
    assert all(gain.ratio > 1.002 for gain in found.gains)


@pytest.mark.parametrize("seed", range(2))
def test_noise_and_lucky_builds_do_not_pass_for_gains(seed):
    """With a truth that no neighbour can change nothing must be kept: all gains would be noise."""
    problem = experts(6)
    device = FakeDevice({"plain": problem}, lambda candidate, simulated: 100.0, noise=0.02, luck=0.01)
    device.chance.seed(seed)
    found = run(problem, device, seconds=250.0, seed=seed)
    assert found.tried > 60
    assert len(found.gains) <= 1 + found.tried // 150


def test_one_stream_wins_where_streams_only_cost():
    problem = towers(10)
    device = FakeDevice({"plain": problem}, lambda candidate, simulated: 50.0 + 5 * candidate.streams)
    found = run(problem, device, seconds=12.0)
    assert found.candidate.key() == found.one.key()
    assert found.winner.streams == 1


def test_plans_that_need_too_much_memory_are_not_even_measured():
    problem = towers(8)
    device = FakeDevice({"plain": problem}, memory=lambda candidate: 1 + 0.2 * (candidate.streams - 1))
    found = run(problem, device, seconds=12.0, max_memory=1.5)
    assert {candidate.streams for candidate in device.measured} <= {1, 2, 3}
    assert found.winner.streams == 3
    assert any("times the memory" in measurement.skipped for measurement in found.measurements)
    free = run(problem, FakeDevice({"plain": problem}), seconds=12.0, max_memory=1.5)
    assert free.winner.streams > 3


def test_the_budget_holds():
    problem = inception(4)
    for seconds in (1.0, 5.0, 12.0):
        device = FakeDevice({"plain": problem}, noise=0.5)
        found = run(problem, device, seconds=seconds)
        # What was begun is finished: one batch, and the two comparisons of the best.
        assert found.seconds <= seconds + 5.0
        assert found.seconds == pytest.approx(device.clock)


def test_kernels_that_are_faster_win():
    slow, fast = experts(6), Problem.of(experts(6).dag, experts(6).time_us * 0.7, 0.05)
    device = FakeDevice({"plain": slow, "fused": fast})
    found = search({"plain": slow, "fused": fast}, device, SearchLimits(15.0, 4), now=device.now)
    assert found.one.mode == "plain"
    assert found.winner.mode == "fused"
    assert {measurement.candidate.mode for measurement in found.measurements} == {"plain", "fused"}


def test_given_candidates_compete():
    problem = inception(3)
    wanted = best(choose(problem, 3)).stream
    device = FakeDevice(
        {"plain": problem},
        lambda candidate, simulated: 10.0 if candidate.name.startswith("mine") else 20.0 + candidate.streams,
    )
    found = search(
        {"plain": problem}, device, SearchLimits(12.0, 4), given={"plain": [("mine", wanted)]}, now=device.now
    )
    assert found.candidate.name == "mine"
    assert found.winner.name.startswith("mine")


def test_a_model_of_one_kernel_stays_as_it_is():
    problem = Problem.of(towers(1).dag, 0.0)
    device = FakeDevice({"plain": problem})
    found = run(problem, device)
    assert found.winner.key() == found.one.key()


def test_the_same_seed_gives_the_same_result():
    problem = inception(3)
    keys = set()
    for _ in range(2):
        device = FakeDevice({"plain": problem}, noise=0.003)
        keys.add(run(problem, device, seconds=12.0).winner.key())
    assert len(keys) == 1
