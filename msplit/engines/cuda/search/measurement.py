"""Measures schedules for `schedule.search`: builds them cheaply from programs that are compiled already, and runs them side by side."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from msplit.core.graph import Ints
from msplit.engines.base import Executable, Job
from msplit.engines.cuda.compile import compile_job
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.options import KernelMode, StoredPlan
from msplit.engines.cuda.profiling.step_costs import StepCosts, estimated, measured
from msplit.engines.cuda.runtime import plan_binding
from msplit.engines.cuda.runtime.executables import Compiled, executable_for, one_stream_seconds, prove
from msplit.engines.cuda.runtime.stream_program import arrange
from msplit.errors import EngineError
from msplit.progress import Progress, phase
from msplit.schedule.bounds import StepBounds, bounds, step_bounds
from msplit.schedule.machine import Machine
from msplit.schedule.plan import Plan
from msplit.schedule.problem import Problem
from msplit.schedule.search import PlanCandidate, single
from msplit.schedule.simulate import Breakdown, breakdown, evaluate

BURST_SECONDS = 0.003
"""How long one candidate runs on in a round."""

LEAST_BURST, MOST_BURST = 4, 40

MEMORY_FLOOR = 16 << 20
"""Bytes: below this the memory of a plan's values does not matter, whatever it is over one stream's."""


@dataclass(frozen=True, eq=False)
class CompiledVariant:
    """A model compiled in one kernel mode, ready to be scheduled.

    Attributes:
        name: Its `KernelMode`.
        job: With the options that make these kernels; on one stream.
    """

    name: str
    job: Job
    compiled: Compiled
    problem: Problem
    costs: StepCosts

    def plan(self, candidate: PlanCandidate) -> Plan:
        """The plan of a candidate over the program's steps."""
        return candidate.schedule.plan(self.problem, self.compiled.program.dag)

    def peak_bytes(self, candidate: PlanCandidate) -> int:
        """Memory for values at its highest."""
        return arrange(self.compiled.program, self.plan(candidate)).peak_bytes

    def bind(self, candidate: PlanCandidate) -> tuple[Plan, StoredPlan, Ints]:
        """The plan of a candidate, proved; the same in terms of the flat graph; and the stream per node, -1 for one without a kernel."""
        program = self.compiled.program
        plan = prove(self.plan(candidate), program)
        return plan, plan_binding.store(program, plan), plan_binding.ids_of(program, plan.stream, len(self.job.flat))

    def bounds(self) -> StepBounds:
        """What limits every plan of these kernels, in µs.

        Raises:
            ValueError: The job has no costs.
        """
        if self.job.costs is None:
            raise ValueError("bounds need costs")
        static = bounds(self.job.flat, self.job.costs)
        program, costs = self.compiled.program, self.costs
        return step_bounds(program.dag, costs.time_us, costs.share, static, measured=costs.measured)

    def breakdown(self, ids: Ints) -> Breakdown:
        """Where the simulated time goes when the nodes of the flat graph run on these streams."""
        program = self.compiled.program
        lanes, _ = program.lanes(ids)
        problem = self.costs.problem(program, lanes, machine=self.problem.machine)
        return breakdown(problem, evaluate(problem, np.maximum(problem.pin, 0)).plan)

    def streams_of(self, ids: Ints) -> Ints:
        """Per block the stream that ids of the flat graph's nodes mean."""
        lanes, _ = self.compiled.program.lanes(ids)
        stream = np.zeros(len(self.problem), np.int32)
        inside = self.problem.block >= 0
        # Of the steps of a block the first decides: of several values for one place numpy keeps the last, hence backwards.
        stream[self.problem.block[inside][::-1]] = lanes[inside][::-1]
        return stream


def compile_variants(
    job: Job,
    groups: Ints,
    names: Sequence[str] = tuple(KernelMode),
    *,
    seconds: float = 0.0,
    tell: Progress | None = None,
) -> dict[str, CompiledVariant]:
    """The different ways to make kernels of a job's graph. One that gives the same kernels as an earlier one is left out.

    Args:
        job: What to run; its ids do not matter.
        groups: Per flat node a group that must share a stream, or -1.
        seconds: How long kernels may be timed alone, half of it for the first, so that simulations go by measured times. Costs that
            come from a profile are measured already.
    """
    profiled = job.costs is not None and job.costs.constants is not None
    found: dict[str, CompiledVariant] = {}
    seen = set()
    for number, name in enumerate(names):
        if tell:
            tell(f"lowering, {name} kernels", number / len(names))
        own = replace(job, options=replace(job.options, mode=KernelMode(name)))
        try:
            compiled = compile_job(own)
        except EngineError:
            if found:
                continue  # larger kernels are an offer
            raise
        program = compiled.program
        kernels = tuple((step.op.op, tuple(step.op.source_nodes), step.inputs) for step in program.steps)
        if kernels in seen:
            continue
        seen.add(kernels)
        if profiled or seconds <= 0:
            costs = estimated(program, job.costs)
        else:
            if tell:
                tell(f"timing kernels, {name}", number / len(names))
            own_seconds = seconds if len(names) == 1 else seconds / 2 if not found else seconds / 2 / (len(names) - 1)
            with phase("timing kernels"), Device.of(torch.device(job.options.device)).entered():
                costs = measured(
                    program,
                    compiled.optimized.feeds,
                    job.costs,
                    job.options.device,
                    ieee=job.precision.ieee,
                    seconds=own_seconds,
                )
                if costs.measured:
                    costs = replace(costs, one_us=one_stream_seconds(own, compiled) * 1e6)
        problem = costs.problem(program, tie=plan_binding.ties(program, groups), machine=_machine(job, costs))
        found[name] = CompiledVariant(name, own, compiled, problem, costs)
    return found


def _machine(job: Job, costs: StepCosts) -> Machine:
    if job.costs is None:
        return Machine()
    machine = Machine.of_costs(replace(job.costs, constants=costs.constants or job.costs.constants))
    return machine if costs.one_us is None else machine.in_company(costs.one_us, float(costs.time_us.sum()))


class _Memory:
    """Memory of candidates over one stream's."""

    def __init__(self, variants: Mapping[str, CompiledVariant]) -> None:
        self.variants = variants
        self._one: dict[str, int] = {}

    def peak_bytes(self, candidate: PlanCandidate) -> int:
        """Memory for values at its highest."""
        return self.variants[candidate.mode].peak_bytes(candidate)

    def memory(self, candidate: PlanCandidate) -> float:
        """See `schedule.search.MeasuringDevice`."""
        if candidate.mode not in self._one:
            self._one[candidate.mode] = self.peak_bytes(single(self.variants[candidate.mode].problem, candidate.mode))
        peak, one = self.peak_bytes(candidate), self._one[candidate.mode]
        return peak / one if peak > MEMORY_FLOOR and one else 1.0


class GpuRunner(_Memory):
    """See `schedule.search.MeasuringDevice`. Every plan is proved before it runs; its outputs are verified later, if it is taken.

    Args:
        variants: By the kernel mode that candidates name.
        build: Makes what runs a plan, in place of the engine.
    """

    def __init__(
        self,
        variants: Mapping[str, CompiledVariant],
        build: Callable[[CompiledVariant, Plan], Executable] | None = None,
    ) -> None:
        super().__init__(variants)
        self._build = build or (
            lambda one, plan: executable_for(
                one.compiled, plan, one.job.options, ieee=one.job.precision.ieee, timing_only=True
            )
        )
        self._built: dict[tuple[str, bytes], Executable] = {}
        self._chance = random.Random(0)  # of the order in which candidates run

    def times(self, candidates: Sequence[PlanCandidate], rounds: int) -> list[list[float]]:
        """See `schedule.search.MeasuringDevice`."""
        wanted = {candidate.key() for candidate in candidates}
        for key in [key for key in self._built if key not in wanted]:
            self._built.pop(key).close()
        return side_by_side([self._executable(candidate) for candidate in candidates], rounds, self._chance)

    def _executable(self, candidate: PlanCandidate) -> Executable:
        key = candidate.key()
        if key not in self._built:
            variant = self.variants[candidate.mode]
            plan = prove(variant.plan(candidate), variant.compiled.program)
            self._built[key] = self._build(variant, plan)
        return self._built[key]

    def renew(self) -> None:
        """See `schedule.search.MeasuringDevice`."""
        for executable in self._built.values():
            executable.close()
        self._built.clear()

    def describe(self) -> str:
        """See `schedule.search.MeasuringDevice`."""
        place = torch.device(next(iter(self.variants.values())).job.options.device)
        return str(torch.cuda.get_device_name(place)) if torch.cuda.is_available() else "CPU"


def side_by_side(running: Sequence[Executable], rounds: int, chance: random.Random) -> list[list[float]]:
    """Seconds of a step of each by the device's clock: in every round a burst of each, in an order drawn anew."""
    bursts = [_burst(executable) for executable in running]
    found: list[list[float]] = [[] for _ in running]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for number in chance.sample(range(len(running)), len(running)):
                # The first replay finds the caches full of what ran before.
                found[number].append(median(_device_times(running[number], bursts[number] + 1)[1:]))
    finally:
        if collecting:
            gc.enable()
    return found


def _burst(executable: Executable) -> int:
    typical = median(_device_times(executable, 3))
    return max(LEAST_BURST, min(MOST_BURST, int(BURST_SECONDS / max(typical, 1e-7))))


def _device_times(executable: Executable, count: int) -> list[float]:
    times = executable.device_times(count)
    assert times is not None
    return times


class SimulatedRunner(_Memory):
    """Runs candidates without a GPU: the simulator's times, for tests and for machines without one.

    Args:
        variants: By the kernel mode that candidates name.
        distort: Makes the true time of a candidate, in µs, from the simulated one; by default it is the simulated one.
    """

    def __init__(
        self, variants: Mapping[str, CompiledVariant], distort: Callable[[PlanCandidate, float], float] | None = None
    ) -> None:
        super().__init__(variants)
        self._distort = distort or (lambda candidate, simulated: simulated)

    def times(self, candidates: Sequence[PlanCandidate], rounds: int) -> list[list[float]]:
        """See `schedule.search.MeasuringDevice`."""
        found = []
        for candidate in candidates:
            problem = self.variants[candidate.mode].problem
            played = evaluate(problem, candidate.schedule.stream, candidate.schedule.order).simulation
            found.append([self._distort(candidate, played.makespan_us) / 1e6 for _ in range(rounds)])
        return found

    def renew(self) -> None:
        """Nothing is built."""

    def describe(self) -> str:
        """See `schedule.search.MeasuringDevice`."""
        return "the simulator"


def make_runner(variants: Mapping[str, CompiledVariant]) -> GpuRunner | SimulatedRunner:
    """What measures where the variants run. The CPU does not measure: it simulates."""
    on_gpu = all(variant.job.options.on_gpu for variant in variants.values())
    return GpuRunner(variants) if on_gpu else SimulatedRunner(variants)
