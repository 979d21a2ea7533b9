"""Trials on made-up executables: what is built when, how bursts and rounds go; and kernels that are the same count once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from msplit.cost import estimate
from msplit.engines.base import Executable
from msplit.engines.cuda import search
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import make_inputs
from msplit.schedule.search import candidate_of, single
from msplit.shapes.infer import infer
from tests.engines.cuda.cases import SAMPLES, job


class FakeExecutable(Executable):
    """Takes a time per step; the first step of a burst is slow."""

    def __init__(self, seconds: float, log: list[tuple[str, float]]) -> None:
        self.seconds, self.log = seconds, log

    def device_times(self, count):
        self.log.append(("run", self.seconds))
        return [self.seconds * 10] + [self.seconds] * (count - 1)

    def close(self):
        self.log.append(("close", self.seconds))


@pytest.fixture(scope="module")
def variants():
    flat = flatten(read(SAMPLES / "towers_small.pb"))
    costs = estimate(flat, infer(flat, batch=2))
    made = job(flat, make_inputs(flat, {}, batch=2))
    return search.compile_variants(replace(made, costs=costs), np.full(len(flat), -1, np.int32), ("plain",))


def runners(variants):
    problem = variants["plain"].problem
    lanes = np.arange(len(problem)) % 3
    several = candidate_of(problem, "plain", "three", lanes.astype(np.int32))
    return single(problem, "plain"), several


def test_candidates_run_side_by_side_without_their_cold_first_step(variants):
    log: list[tuple[str, float]] = []
    device = search.GpuRunner(variants)
    device.build = lambda variant, plan: FakeExecutable(1e-4 / plan.streams, log)
    one, several = runners(variants)
    times = device.times([one, several], 5)
    assert times == [[1e-4] * 5, [1e-4 / 3] * 5]
    assert sum(what == "run" for what, _ in log) == 2 * (1 + 5)  # one for the length of the burst
    order = [seconds for what, seconds in log if what == "run"][2:]
    assert len({tuple(order[at : at + 2]) for at in range(0, 10, 2)}) == 2  # both orders come up
    assert not [what for what, _ in log if what == "close"]


def test_what_is_not_asked_for_again_is_closed_and_renewing_builds_anew(variants):
    log: list[tuple[str, float]] = []
    builds: list[int] = []

    def build(variant, plan):
        builds.append(plan.streams)
        return FakeExecutable(1e-4 / plan.streams, log)

    device = search.GpuRunner(variants)
    device.build = build
    one, several = runners(variants)
    device.times([one, several], 1)
    device.times([one], 1)
    assert builds == [1, 3]
    assert [entry for entry in log if entry[0] == "close"] == [("close", 1e-4 / 3)]
    device.renew()
    device.times([one], 1)
    assert builds == [1, 3, 1]


def test_small_memory_does_not_count(variants, monkeypatch):
    one, several = runners(variants)
    device = search.GpuRunner(variants)
    assert device.memory(several) == 1.0
    monkeypatch.setattr(search, "MEMORY_FLOOR", 0)
    assert device.memory(several) == device.peak_bytes(several) / device.peak_bytes(one) > 1


def test_bounds_of_the_steps_bound_the_simulator(variants):
    variant = variants["plain"]
    limits = variant.bounds()
    assert limits.lower_us <= limits.serial_us
    assert limits.serial_us == pytest.approx(variant.problem.work_us.sum())
    assert limits.measured == 0
    assert limits.steps == sum(step.launches for step in variant.compiled.program.steps)
    assert limits.limit == "critical path"


def test_ids_become_streams_of_blocks(variants):
    variant = variants["plain"]
    flat = variant.job.flat
    ids = (np.arange(len(flat)) % 4).astype(np.int32)
    lanes, _ = variant.compiled.program.lanes(ids)
    stream = variant.streams_of(ids)
    for block in range(len(variant.problem)):
        members = np.flatnonzero(variant.problem.block == block)
        if len(members):
            assert stream[block] == lanes[members[0]]
