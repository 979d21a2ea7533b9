"""Compiles a model in each kernel mode, simulates it, and measures it for `schedule.search`.

Simulations time nothing: steps cost what the data sheet or a profile says (`step_costs`). To learn what steps there are, the graph is
lowered, which runs it once on the device (`tracing.trace`). Measurements build schedules cheaply from programs that are compiled
already, and run them side by side.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from msplit.core.graph import Ints
from msplit.engines.base import Executable, Job, side_by_side
from msplit.engines.cuda.compile import compile_job
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.options import KernelMode, StoredPlan
from msplit.engines.cuda.profiling.step_costs import StepCosts, estimated, measured
from msplit.engines.cuda.runtime import plan_binding
from msplit.engines.cuda.runtime.executables import Compiled, executable_for, prove
from msplit.engines.cuda.runtime.stream_program import arrange
from msplit.errors import EngineError
from msplit.progress import Progress, phase
from msplit.schedule.algorithms import ONE
from msplit.schedule.choose import TIE, Proposal, best, choose, leanest
from msplit.schedule.judge import StepBounds, bounds, step_bounds
from msplit.schedule.machine import Machine
from msplit.schedule.plan import Plan
from msplit.schedule.problem import Problem
from msplit.schedule.search import PlanCandidate, candidate_of, single
from msplit.schedule.simulate import Breakdown, breakdown, evaluate

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
        """Bounds of every plan of these kernels, in µs.

        Raises:
            ValueError: The job has no costs.
        """
        if self.job.costs is None:
            raise ValueError("bounds need costs")
        static = bounds(self.job.flat, self.job.costs)
        program, costs = self.compiled.program, self.costs
        return step_bounds(program.dag, costs.time_us, costs.share, static, measured=costs.measured)

    def breakdown(self, ids: Ints) -> Breakdown:
        """Breakdown of the simulated time when the nodes of the flat graph run on these streams."""
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


@dataclass(frozen=True, eq=False)
class SimulatedVariant:
    """A model compiled in one kernel mode, with its schedules in the simulator.

    Attributes:
        candidates: Ways to put them on streams, as `choose` gives them; empty where nothing launches.
    """

    compiled: CompiledVariant
    candidates: tuple[Proposal, ...]

    @property
    def name(self) -> str:
        """Its `KernelMode`."""
        return self.compiled.name

    @property
    def fastest(self) -> Proposal:
        """The fastest in the simulator; one stream unless that is clearly slower."""
        return best(self.candidates)

    @cached_property
    def best(self) -> Proposal:
        """The fastest, unless that takes much memory and another one does not and is hardly slower; see `leanest`."""
        return leanest(self.candidates, self.peak_bytes)

    def peak_bytes(self, candidate: Proposal) -> int:
        """Memory for values at its highest, of a candidate that was tried."""
        return self.compiled.peak_bytes(self._runnable(candidate))

    @property
    def one(self) -> Proposal:
        """One stream."""
        return next(candidate for candidate in self.candidates if candidate.name == ONE)

    def candidate(self) -> PlanCandidate:
        """The best as something that runs."""
        return self._runnable(self.best)

    def _runnable(self, found: Proposal) -> PlanCandidate:
        return candidate_of(self.compiled.problem, self.name, found.name, found.stream, found.order)


@dataclass(frozen=True, eq=False)
class SimulatedVariants:
    """All of them.

    Attributes:
        variants: By name, plain kernels first. One that gives the same kernels as an earlier one, or can not be made, is not there.
        asked: The names that were to be tried.
    """

    variants: Mapping[str, SimulatedVariant]
    asked: tuple[str, ...]

    @property
    def favourite(self) -> SimulatedVariant:
        """The fastest in the simulator. Larger kernels are taken only where they gain more than `TIE` over simpler ones."""
        taken, *rest = self.variants.values()
        for variant in rest:
            if variant.fastest.score_us < taken.fastest.score_us * (1 - TIE):
                taken = variant
        return taken

    @property
    def plain(self) -> SimulatedVariant:
        """The simplest, plain kernels as a rule."""
        return next(iter(self.variants.values()))

    @property
    def one_us(self) -> float:
        """Simulated time of plain kernels on one stream."""
        return self.plain.one.makespan_us

    @property
    def dynamic(self) -> bool:
        """True if shapes depend on values, so that no step can be captured and what is simulated is not what runs."""
        return self.plain.compiled.compiled.dynamic is not None

    def gain(self, variant: SimulatedVariant) -> float:
        """Speedup of a variant on its best streams over plain kernels on one stream."""
        return self.one_us / variant.best.makespan_us

    @property
    def same(self) -> tuple[str, ...]:
        """Kernel modes that were asked for and change nothing."""
        return tuple(name for name in self.asked if name not in self.variants)

    @property
    def compiled(self) -> CompiledVariants:
        """Compiled variants behind them."""
        return CompiledVariants({name: variant.compiled for name, variant in self.variants.items()})


class CompiledVariants(dict[str, CompiledVariant]):
    """Compiled variants of a model by the name of their kernel mode, the simplest first.

    Attributes:
        asked: The names that were to be tried.
    """

    asked: tuple[str, ...] = ()

    def runner(self) -> GpuRunner | SimulatedRunner:
        """Measures candidates where the variants run: on a GPU by its clock, on the CPU in the simulator."""
        on_gpu = all(variant.job.options.on_gpu for variant in self.values())
        return GpuRunner(self) if on_gpu else SimulatedRunner(self)

    def simulate(
        self,
        streams: int,
        *,
        candidates: Sequence[str] | None = None,
        wait_us: float | None = None,
        tell: Progress | None = None,
    ) -> SimulatedVariants | None:
        """Simulates each variant on every way to put it on streams. None where nothing launches a kernel.

        Args:
            streams: Most streams that a candidate may use.
            candidates: Algorithms to try; None: all.
            wait_us: Cost of a wait for another stream, in place of the GPU's own.
            tell: Told what is being done and the share of it that is done.
        """
        if not all(len(variant.problem) for variant in self.values()):
            return None
        found = {}
        for number, (name, variant) in enumerate(self.items()):
            if tell:
                tell(f"simulating {name} kernels", number / len(self))
            if wait_us is not None:
                slower = replace(variant.problem, machine=replace(variant.problem.machine, wait_us=wait_us))
                variant = replace(variant, problem=slower)
            with phase("simulating"):
                found[name] = SimulatedVariant(variant, tuple(choose(variant.problem, streams, candidates)))
        return SimulatedVariants(found, self.asked)


def compile_variants(
    job: Job,
    groups: Ints,
    names: Sequence[str] = tuple(KernelMode),
    *,
    seconds: float = 0.0,
    tell: Progress | None = None,
) -> CompiledVariants:
    """Compiles a job's graph in each kernel mode. A mode that gives the same kernels as an earlier one is left out.

    Args:
        job: What to run; its ids do not matter.
        groups: Per flat node a group that must share a stream, or -1.
        seconds: How long kernels may be timed alone, half of it for the first, so that simulations go by measured times. Costs that
            come from a profile are measured already.
    """
    profiled = job.costs is not None and job.costs.constants is not None
    found = CompiledVariants()
    found.asked = tuple(names)
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
            device, feeds = job.options.device, compiled.optimized.feeds
            with phase("timing kernels"), Device.of(torch.device(device)).entered():
                costs = measured(program, feeds, job.costs, device, ieee=job.precision.ieee, seconds=own_seconds)
                if costs.measured:
                    costs = replace(costs, one_us=compiled.one_stream_seconds(own) * 1e6)
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
        """Memory of a candidate over one stream's."""
        if candidate.mode not in self._one:
            self._one[candidate.mode] = self.peak_bytes(single(self.variants[candidate.mode].problem, candidate.mode))
        peak, one = self.peak_bytes(candidate), self._one[candidate.mode]
        return peak / one if peak > MEMORY_FLOOR and one else 1.0


class GpuRunner(_Memory):
    """Measures candidates on the GPU. Every plan is proved before it runs; its outputs are verified later, if it is taken."""

    def __init__(self, variants: Mapping[str, CompiledVariant]) -> None:
        super().__init__(variants)
        self._built: dict[tuple[str, bytes], Executable] = {}
        self._chance = random.Random(0)  # of the order in which candidates run

    def times(self, candidates: Sequence[PlanCandidate], rounds: int) -> list[list[float]]:
        """Seconds of a step of each candidate, by round."""
        wanted = {candidate.key() for candidate in candidates}
        for key in [key for key in self._built if key not in wanted]:
            self._built.pop(key).close()
        return side_by_side([self._executable(candidate) for candidate in candidates], rounds, self._chance)

    def _executable(self, candidate: PlanCandidate) -> Executable:
        key = candidate.key()
        if key not in self._built:
            variant = self.variants[candidate.mode]
            plan = prove(variant.plan(candidate), variant.compiled.program)
            self._built[key] = self.build(variant, plan)
        return self._built[key]

    def build(self, variant: CompiledVariant, plan: Plan) -> Executable:
        """Makes what runs a plan."""
        job = variant.job
        return executable_for(variant.compiled, plan, job.options, ieee=job.precision.ieee, timing_only=True)

    def renew(self) -> None:
        """Closes what was built for candidates."""
        for executable in self._built.values():
            executable.close()
        self._built.clear()

    def describe(self) -> str:
        """Name of the device that measures."""
        place = torch.device(next(iter(self.variants.values())).job.options.device)
        return str(torch.cuda.get_device_name(place)) if torch.cuda.is_available() else "CPU"


class SimulatedRunner(_Memory):
    """Runs candidates without a GPU: the simulator's times, for tests and for machines without one."""

    def times(self, candidates: Sequence[PlanCandidate], rounds: int) -> list[list[float]]:
        """Seconds of a step of each candidate, by round."""
        found = []
        for candidate in candidates:
            problem = self.variants[candidate.mode].problem
            played = evaluate(problem, candidate.schedule.stream, candidate.schedule.order).simulation
            found.append([self.true_us(candidate, played.makespan_us) / 1e6 for _ in range(rounds)])
        return found

    def true_us(self, candidate: PlanCandidate, simulated: float) -> float:
        """Time of a candidate, in µs: the simulated one."""
        return simulated

    def renew(self) -> None:
        """Nothing is built."""

    def describe(self) -> str:
        """Name of the device that measures."""
        return "the simulator"
