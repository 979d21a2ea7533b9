"""What each way to make kernels is worth, in the simulator: plain ones, fused ones, grouped ones, and both, each on its best streams.

Nothing is timed here: steps cost what the data sheet or a profile says (`step_costs`). To learn what steps there are, the graph is lowered,
which runs it once on the device (`specialize.trace`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from msplit.core.graph import Ints
from msplit.engines.base import Job
from msplit.engines.cuda.compile import compile_job
from msplit.engines.cuda.ir.program import Program
from msplit.engines.cuda.options import KernelMode
from msplit.engines.cuda.profiling.step_costs import estimated
from msplit.engines.cuda.search.measurement import CompiledVariant, compile_variants
from msplit.progress import Progress, phase
from msplit.schedule.algorithms import ONE
from msplit.schedule.choose import TIE, Proposal, best, choose, leanest
from msplit.schedule.machine import Machine
from msplit.schedule.search import PlanCandidate, candidate_of
from msplit.schedule.simulate import evaluate

PLAIN = "plain"


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
        """Whether shapes depend on values, so that no step can be captured and what is simulated is not what runs."""
        return self.plain.compiled.compiled.dynamic is not None

    def gain(self, variant: SimulatedVariant) -> float:
        """Of a variant on its best streams, over plain kernels on one stream."""
        return self.one_us / variant.best.makespan_us

    @property
    def same(self) -> tuple[str, ...]:
        """Kernel modes that were asked for and change nothing."""
        return tuple(name for name in self.asked if name not in self.variants)


def simulate_variants(
    job: Job,
    groups: Ints,
    *,
    streams: int,
    names: Sequence[str] = tuple(KernelMode),
    candidates: Sequence[str] | None = None,
    wait_us: float | None = None,
    tell: Progress | None = None,
) -> SimulatedVariants | None:
    """Simulates every way to make the kernels of a model, on every way to put them on streams. None where nothing launches a kernel.

    Args:
        job: The model, its inputs, its costs, and the engine's options; its ids do not matter.
        groups: Per flat node a group that must share a stream, or -1.
        names: Kernel modes, the simplest first.
        candidates: Algorithms to try; None: all.
        wait_us: What a wait for another stream costs, in place of what is known of the GPU.
        tell: Told what is being done and the share of it that is done.

    Raises:
        EngineError: The engine can not run the model.
    """
    made = compile_variants(job, groups, names, tell=tell)
    if not all(len(variant.problem) for variant in made.values()):
        return None
    found = {}
    for number, (name, variant) in enumerate(made.items()):
        if tell:
            tell(f"simulating {name} kernels", number / len(made))
        if wait_us is not None:
            slower = replace(variant.problem, machine=replace(variant.problem.machine, wait_us=wait_us))
            variant = replace(variant, problem=slower)
        with phase("simulating"):
            found[name] = SimulatedVariant(variant, tuple(choose(variant.problem, streams, candidates)))
    return SimulatedVariants(found, tuple(names))


def predicted_us(job: Job) -> float:
    """Simulated time of what the engine runs for a job: its kernels, its ids."""
    program = compile_job(job).program
    with phase("simulating"):
        return _simulated(program, job)


def _simulated(program: Program, job: Job) -> float:
    lanes, _ = program.lanes(job.ids)
    machine = None if job.costs is None else Machine.of_costs(job.costs)
    problem = estimated(program, job.costs).problem(program, lanes, machine=machine)
    if not len(problem):
        return 0.0
    return evaluate(problem, np.maximum(problem.pin, 0)).simulation.makespan_us
