"""The cuda engine: from a job to an executable."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msplit.cost.costs import Costs
from msplit.engines.base import Executable, Job
from msplit.engines.cuda.options import KernelMode
from msplit.engines.cuda.profiling.step_costs import estimated
from msplit.errors import INSTALL_PYTORCH, EngineError
from msplit.flatten.flat import FlatGraph
from msplit.schedule.machine import Machine
from msplit.schedule.plan.check import check
from msplit.schedule.plan.plan import Plan, make_plan
from msplit.schedule.plan.record_order import record_order
from msplit.schedule.plan.reorder import keep_lanes
from msplit.schedule.search.evaluate import evaluate, node_order

if TYPE_CHECKING:
    import torch

    from msplit.engines.cuda.compile import Lowered
    from msplit.engines.cuda.ir.program import Program
    from msplit.engines.cuda.profiling.kernel_profile import Measured

LAYOUT_RUNS = 30
"""Replays that decide between two memory layouts."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """A program with what is shared by all its executables.

    Attributes:
        program: What runs.
        layout: Memory layout of convolutions; "none" where there are none.
        lowered: What it was traced from.
        facts: What fusion and grouping did.
    """

    program: Program
    layout: str
    lowered: Lowered
    facts: Mapping[str, Any] = field(default_factory=dict)


class CudaEngine:
    """See `engines.base.Engine`."""

    name = "cuda"

    def unavailable(self) -> str | None:
        """Why the engine can not run here, or None."""
        if importlib.util.find_spec("torch") is None:
            return f"PyTorch, its kernel library, is not installed: {INSTALL_PYTORCH}"
        import torch

        if torch.version.cuda is None:
            return f"PyTorch {torch.__version__} is a build without CUDA"
        if not torch.cuda.is_available():
            return "PyTorch sees no CUDA device (see `msplit doctor`)"
        return None

    def build(self, job: Job) -> Executable:
        """Compiles the graph (once per graph and shapes), plans it for the job's streams, proves the plan and makes it ready to run.

        Raises:
            EngineError: Something in the graph can not run; the message names it.
        """
        if job.options.on_gpu and (why := self.unavailable()):
            raise EngineError(f"the cuda engine can not run here: {why}", fix="use --engine tensorflow")
        compiled = self.compile(job)
        return _executable(job, compiled, plan_of_job(compiled.program, job))

    def compile(self, job: Job) -> Compiled:
        """The job's graph lowered and traced, once per device, graph, shapes and options."""
        import torch

        from msplit.engines.cuda.device import Device

        device = torch.device(job.options.device)
        shapes = tuple(sorted((name, value.shape, str(value.dtype)) for name, value in job.feeds.items()))
        key = (shapes, job.ieee, job.options.for_program())
        cache: dict[tuple[Any, ...], Compiled] = Device.of(device).compiled.setdefault(job.flat, {})
        if key not in cache:
            if job.options.mode.fuses:
                unfused = replace(job.options, mode=KernelMode.of(groups=job.options.mode.groups))
                cache[key] = fused(self.compile(replace(job, options=unfused)), job, device)
            else:
                cache[key] = _unfused(job, device)
        return cache[key]

    def forget(self, flat: FlatGraph) -> None:
        """Lets go of what was compiled of a graph. Executables keep what they run."""
        if "msplit.engines.cuda.device" in sys.modules:  # PyTorch is loaded, and something may have been made
            from msplit.engines.cuda.device.device import forget

            forget(flat)


ENGINE = CudaEngine()


def _unfused(job: Job, device: torch.device) -> Compiled:
    """Lowers a graph and traces it once, in the layout asked for or, for "auto", in the one that measures faster."""
    from msplit.engines.cuda.compile import lower
    from msplit.engines.cuda.ir.verify import Stage
    from msplit.engines.cuda.ops.conv import FILTERS
    from msplit.engines.cuda.passes.horizontal_fusion import merge_facts
    from msplit.engines.cuda.passes.specialize import trace
    from msplit.engines.cuda.runtime.executable import precision

    with precision(job.ieee):
        lowered = lower(
            job.flat,
            job.feeds,
            device,
            op_libraries=job.op_libraries,
            group=job.options.mode.groups,
        )
    has_choice = any(
        op.op in FILTERS and op.attrs.get("data_format", "NHWC") in ("NHWC", "NDHWC")
        for op in lowered.graph.ops.values()
    )
    wanted = {"nhwc": [False], "nchw": [True]}.get(job.options.layout, [False, True])
    if not has_choice or device.type != "cuda":
        wanted = wanted[:1]
    with precision(job.ieee):
        candidates = []
        for nchw in wanted:
            laid_out = lowered.at(Stage.LAID_OUT, nchw=nchw)
            program = trace(laid_out.graph, lowered.feeds, device, nchw=nchw)
            facts = merge_facts(laid_out.graph.merges) if job.options.mode.groups else {}
            candidates.append(Compiled(program, "nchw" if nchw else "nhwc" if has_choice else "none", laid_out, facts))
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda candidate: one_stream_seconds(job, candidate))


def fused(plain: Compiled, job: Job, device: torch.device) -> Compiled:
    """A compiled graph with groups of pointwise ops as one kernel each, in the same memory layout. Weights are shared with it."""
    from msplit.engines.cuda.ir.verify import Stage
    from msplit.engines.cuda.passes.specialize import trace
    from msplit.engines.cuda.runtime.executable import precision

    held = plain.program.constants
    compiles = device.type == "cuda" if job.options.compile is None else job.options.compile
    with precision(job.ieee):
        lowered = plain.lowered.at(Stage.FUSED, fuse=True, compile=compiles, constants=held)
        program = trace(lowered.graph, lowered.feeds, device, nchw=plain.layout == "nchw", held=held)
    return Compiled(program, plain.layout, lowered, {**plain.facts, **lowered.graph.facts})


def one_stream_seconds(job: Job, compiled: Compiled) -> float:
    """A step of a compiled graph on one stream, by the device's clock; captured, unless shapes depend on values."""
    options = replace(job.options, capture=not compiled.program.dynamic)
    plan = plan_for(compiled.program, np.zeros_like(job.ids), job.costs)
    executable = _executable(replace(job, options=options), compiled, plan)
    try:
        times = executable.device_times(LAYOUT_RUNS)
        assert times is not None
        return float(np.median(times))
    finally:
        executable.close()


def profile_kernels(
    job: Job, compiled: Compiled, *, seconds: float, grids: bool, progress: Callable[[str, float], None] | None = None
) -> Measured:
    """Times every kind of step of a compiled graph alone, in the job's precision; see `kernel_profile.measure`."""
    import torch

    from msplit.engines.cuda.profiling.kernel_profile import measure
    from msplit.engines.cuda.runtime.executable import precision

    device = torch.device(job.options.device)
    with precision(job.ieee):
        return measure(
            compiled.program, compiled.lowered.feeds, device, seconds=seconds, grids=grids, progress=progress
        )


def plan_of_job(program: Program, job: Job) -> Plan:
    """The plan that the job brings, where it was made for this program; else one made for its ids."""
    from msplit.engines.cuda.runtime.plan_binding import restore

    stored = job.options.plan
    plan = restore(program, stored) if stored is not None else None
    return plan_for(program, job.ids, job.costs) if plan is None else prove(plan, program)


def runs_as_stored(job: Job) -> bool:
    """Whether a job can be run by the order that its stored plan holds: not where its kernels have become others."""
    from msplit.engines.cuda.runtime.plan_binding import restore

    stored = job.options.plan
    return stored is not None and restore(ENGINE.compile(job).program, stored) is not None


def prove(plan: Plan, program: Program) -> Plan:
    """The plan, after the second checker has found nothing wrong with it.

    Raises:
        EngineError: It has, which is a bug in msplit.
    """
    violations = check(plan, program.dag)
    if violations:
        raise EngineError(f"internal error: the plan does not hold: step {violations[0].consumer} {violations[0].text}")
    return plan


def plan_for(program: Program, ids: NDArray[np.int32], costs: Costs | None) -> Plan:
    """The plan of a program for an assignment of the flat graph's nodes. Ids are renumbered without gaps.

    The record order is the better, in the simulator, of the order by rank and the timed order.

    Raises:
        EngineError: The second checker found the plan wrong, which is a bug in msplit.
    """
    lanes, _ = program.lanes(ids)
    machine = None if costs is None else Machine.of_costs(costs)
    problem = estimated(program, costs).problem(program, lanes, machine=machine)
    chosen = evaluate(problem, problem.pin)
    plan = make_plan(program.dag, lanes, node_order(problem, chosen.order, program.dag))
    return prove(keep_lanes(plan), program)


def _executable(job: Job, compiled: Compiled, plan: Plan) -> Executable:
    """The executable, its host part in front of it where there is one."""
    from msplit.engines.cuda.ir.graph import STEPS
    from msplit.engines.cuda.runtime.host import WithHost
    from msplit.engines.cuda.runtime.wrapped import Counting

    executable = executable_for(job, compiled, plan)
    if STEPS in compiled.program.feeds:
        executable = Counting(executable)
    host = compiled.lowered.host
    return executable if host is None else WithHost(host, executable)


def executable_for(job: Job, compiled: Compiled, plan: Plan, *, timing_only: bool = False) -> Executable:
    """What runs a plan of a compiled graph, without the host part in front of it.

    Args:
        job: For its options and precision.
        compiled: The program.
        plan: Proved.
        timing_only: Only `device_times` and `launch` are wanted, and no facts.
    """
    from msplit.engines.cuda.device import Device
    from msplit.engines.cuda.ir.dtypes import to_torch
    from msplit.engines.cuda.runtime.cpu_executable import SimulatedExecutable
    from msplit.engines.cuda.runtime.executable import CudaExecutable
    from msplit.engines.cuda.runtime.stream_program import arrange

    program, capture = compiled.program, job.options.capture
    if capture and program.dynamic:
        names = [f"{program.steps[step].op.op} ({program.steps[step].op.name})" for step in program.dynamic[:5]]
        raise EngineError(
            f"the shape of what these compute depends on values, so they can not be captured: {', '.join(names)}",
            fix="run them launch by launch with --no-capture, or cut them off with --inputs and --outputs",
        )
    stream_program = arrange(program, plan)
    about = {} if timing_only else {**plan_facts(program, plan, stream_program.peak_bytes), **compiled.facts}
    facts = {**about, "layout": compiled.layout, "captured": capture}
    if not job.options.on_gpu:
        return SimulatedExecutable(program, stream_program, {**facts, "device": "CPU, simulated streams"})
    import torch

    feeds = {name: to_torch(np.array(compiled.lowered.feeds[name]), torch.device("cpu")) for name in program.feeds}
    return CudaExecutable(
        program,
        stream_program,
        feeds,
        Device.of(torch.device(job.options.device)),
        capture=capture,
        ieee=job.ieee,
        facts={**facts, "device": torch.cuda.get_device_name(job.options.device)},
        torture=job.options.torture,
        timing_only=timing_only,
    )


def plan_facts(program: Program, plan: Plan, peak_bytes: int) -> Mapping[str, Any]:
    """What the report says about a plan."""
    from msplit.engines.cuda.runtime.stream_program import arrange

    one = make_plan(
        program.dag, np.minimum(plan.stream, 0), record_order(program.dag, (plan.stream >= 0).astype(np.float64))
    )
    return {
        "streams": plan.streams,
        "kernels": sum(step.launches for step in program.steps),
        "waits": plan.waits,
        "waits_before_reduction": plan.edges,
        "peak_bytes": peak_bytes,
        "peak_bytes_one_stream": arrange(program, one).peak_bytes,
        "weight_bytes": sum(tensor.untyped_storage().nbytes() for tensor in program.constants.values()),
    }
