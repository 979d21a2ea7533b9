"""Executables of compiled graphs: captured, simulated, or with the effect of TF32 computed.

From a compiled graph and a plan to what runs.

Computes the effect of TF32 on a model exactly: only what products and convolutions read is rounded to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from msplit.core.graph import Ints
from msplit.cost.costs import Costs
from msplit.engines.base import STEPS, Arrays, Executable, Feeds, Following, Job, Timeline, is_array, refuse_fed
from msplit.engines.cuda.device.device import Device, precision, telling_out_of_memory
from msplit.engines.cuda.device.ranks import ProcessGroup, Ranks
from msplit.engines.cuda.ir.dtypes import dtype_name, own_copy, to_numpy, to_torch
from msplit.engines.cuda.ir.graph import PEER_COPY, Key, OpGraph
from msplit.engines.cuda.ir.interpret import LoweringCall, walk_given
from msplit.engines.cuda.ir.program import REPORT, KernelCall, Program, StateMemory
from msplit.engines.cuda.ir.windows import to_tf32
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.engines.cuda.options import BY_VALUES, LAUNCHED, EngineOptions
from msplit.engines.cuda.profiling.kernel_profile import Measured, measure
from msplit.engines.cuda.profiling.step_costs import estimated
from msplit.engines.cuda.runtime.executable import CudaExecutable, Shared
from msplit.engines.cuda.runtime.host import ByUser, Counting, HostPart, StepCounter, WithHost
from msplit.engines.cuda.runtime.input_staging import taken
from msplit.engines.cuda.runtime.plan_binding import SeparateMemory, gpu_of_streams, restore
from msplit.engines.cuda.runtime.stream_program import HostTap, StreamProgram, Tap, arrange, simulate, timeline
from msplit.engines.user_rows import UserRows
from msplit.errors import EngineError
from msplit.progress import Progress, phase
from msplit.schedule.machine import Machine
from msplit.schedule.plan import Plan, make_plan, record_order
from msplit.schedule.plan_check import check
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import evaluate, keep_lanes, node_order

LAYOUT_RUNS = 30
"""Replays that decide between two memory layouts."""


@dataclass(frozen=True, eq=False)
class Optimized:
    """A graph after the passes, for inputs of certain shapes.

    Attributes:
        graph: What runs on the device.
        feeds: Example inputs of it.
        host: What runs before and behind; None for most models.
        once: Inputs of which one row is read for each user.
    """

    graph: OpGraph
    feeds: Arrays
    host: HostPart | None = None
    once: UserRows = field(default_factory=UserRows)


@dataclass(frozen=True, eq=False)
class LoneStep:
    """A step that can be run on other values than the model's.

    Attributes:
        op: Its op.
        nodes: Flat nodes that it does the work of.
        bound: Input slot -> value, of inputs that it has bound already.
        inputs: Type and rank of each other input that is no constant of one element.
        more: What else decides what it does.
        run: Gives its result on values of `inputs`.
    """

    op: str
    nodes: tuple[int, ...]
    bound: Mapping[int, NDArray[Any]]
    inputs: tuple[tuple[str, int], ...]
    more: tuple[Any, ...]
    run: Callable[[Sequence[NDArray[Any]]], NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Compiled:
    """A program with what is shared by all its executables.

    Attributes:
        layout: Memory layout of convolutions; "none" where there are none.
        optimized: What it was traced from.
        facts: What fusion and grouping did.
    """

    program: Program
    layout: str
    optimized: Optimized
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dynamic(self) -> tuple[str, str] | None:
        """Op and name of the first step whose shapes depend on values, so that no step can be captured; None where all can."""
        if not self.program.dynamic:
            return None
        op = self.program.steps[self.program.dynamic[0]].op
        return op.op, op.name

    def kernels(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Op of each step and the flat nodes that it does the work of: the same for jobs that run the same."""
        return tuple((step.op.op, tuple(step.op.source_nodes)) for step in self.program.steps)

    def streams(self, ids: Ints) -> int:
        """Number of streams that do something when the nodes of the flat graph have these ids."""
        return self.program.lanes(ids)[1]

    def plan(self, job: Job) -> Plan:
        """The plan that the job brings, where it was made for this program; else one made for its ids."""
        stored = job.options.plan
        if self.program.gpus is not None:
            return plan_on_gpus(self.program, job.ids, job.streams // len(job.options.split))
        plan = restore(self.program, stored) if stored is not None else None
        return plan_for(self.program, job.ids, job.costs) if plan is None else prove(plan, self.program)

    def runs_as_stored(self, job: Job) -> bool:
        """True if the job's stored plan fits these kernels, so that they run in its order."""
        return job.options.plan is not None and restore(self.program, job.options.plan) is not None

    def predicted_us(self, job: Job) -> float:
        """Simulated time of a step in µs, with these kernels on the job's streams."""
        with phase("simulating"):
            problem = _problem(self.program, job.ids, job.costs)
            return evaluate(problem, np.maximum(problem.pin, 0)).simulation.makespan_us if len(problem) else 0.0

    def one_stream_seconds(self, job: Job) -> float:
        """Seconds of a step on one stream, by the device's clock; captured, unless shapes depend on values."""
        options = replace(job.options, capture=not self.program.dynamic)
        plan = plan_for(self.program, np.zeros_like(job.ids), job.costs)
        executable = executable_of(self, plan, options, ieee=job.precision.ieee)
        try:
            times = executable.device_times(LAYOUT_RUNS)
            assert times is not None
            return float(np.median(times))
        finally:
            executable.close()

    def alone(
        self, job: Job, feeds: Arrays, given: Mapping[Key, NDArray[Any]]
    ) -> Iterator[tuple[str, tuple[int, ...], Key, NDArray[Any]]]:
        """Runs steps one by one, from the job's own variables, on given values of the flat graph. Gives out each value that is given, too,
        with what a step makes in its place: the step's op, the nodes that it does the work of, the value's key, and the result."""
        host, device = self.optimized.host, Device.of(torch.device(job.options.first))
        fed = feeds if host is None else host.run(feeds)[0]
        fed = {STEPS: np.zeros((), np.int64), **self.optimized.once.of(fed)}
        with device.entered(), precision(job.precision.ieee):
            for step, key, made in walk_given(self.program, fed, job.state, given, device.place):
                yield step.op.op, tuple(step.op.source_nodes), key, made

    def lone_steps(self, job: Job) -> Iterator[LoneStep]:
        """Steps of one result that change nothing and whose inputs have known shapes: each can be run on other values than the model's."""
        device, known = Device.of(torch.device(job.options.first)), self.optimized.graph

        def run(step: KernelCall, rest: Mapping[int, torch.Tensor], given: Sequence[NDArray[Any]]) -> NDArray[Any]:
            values = iter(given)
            with device.entered(), precision(job.precision.ieee), torch.no_grad():
                places = range(len(step.inputs))
                arguments = [rest[at] if at in rest else to_torch(next(values), device.place) for at in places]
                return to_numpy(step.call(*arguments)[0])

        for step in self.program.steps:
            found = [self.program.constants.get(key) for key in step.inputs]
            rest = {at: one for at, one in enumerate(found) if one is not None and one.numel() == 1}
            keys = [(key, found[at]) for at, key in enumerate(step.inputs) if at not in rest]
            call, told = (
                step.call,
                all(one is not None or (key in known.shapes and key in known.dtypes) for key, one in keys),
            )
            if isinstance(call, LoweringCall) and not call.unknown and step.outputs == 1 and not step.writes and told:
                inputs = tuple(
                    (known.dtypes[key], len(known.shapes[key])) if one is None else (dtype_name(one.dtype), one.dim())
                    for key, one in keys
                )
                more = call.lowering.function, str(step.op.attrs), str(rest), job.options.first
                one = partial(run, step, rest)
                yield LoneStep(step.op.op, tuple(step.op.source_nodes), step.bound, inputs, more, one)

    def profile(self, job: Job, *, seconds: float, grids: bool, progress: Progress | None = None) -> Measured:
        """Times every kind of step alone, in the job's precision; see `kernel_profile.measure`."""
        device, feeds = torch.device(job.options.device), self.optimized.feeds
        with Device.of(device).entered(), precision(job.precision.ieee):
            return measure(self.program, feeds, device, seconds=seconds, grids=grids, progress=progress)


def executable_of(
    compiled: Compiled,
    plan: Plan,
    options: EngineOptions,
    *,
    ieee: bool,
    shared: Shared | None = None,
    steps: StepCounter | None = None,
) -> Executable:
    """The executable, its host part in front of it where there is one. `shared` is as `executable_for` has it; others that draw random
    numbers with it count the same `steps`."""
    with phase("capturing" if options.on_gpu and options.capture else "arranging steps"):
        executable = executable_for(compiled, plan, options, ieee=ieee, shared=shared)
    if STEPS in compiled.program.feeds:
        executable = Counting(executable, steps)
    host, once = compiled.optimized.host, compiled.optimized.once
    executable = ByUser(once, executable) if once.entries else executable
    return executable if host is None else WithHost(host, executable)


def executable_for(
    compiled: Compiled,
    plan: Plan,
    options: EngineOptions,
    *,
    ieee: bool,
    timing_only: bool = False,
    shared: Shared | None = None,
) -> Executable:
    """Makes the executable of a plan of a compiled graph, without the host part in front of it.

    Args:
        plan: Proved.
        timing_only: Only `device_times` and `launch` are wanted, and no facts.
        shared: With others none of which runs at the same time as this one; nothing where none is given.
    """
    program, capture = compiled.program, options.capture
    if capture and program.dynamic:
        names = [f"{program.steps[step].op.op} ({program.steps[step].op.name})" for step in program.dynamic[:5]]
        raise EngineError(f"{BY_VALUES}: {', '.join(names)}", fix=LAUNCHED)
    # What others are held against keeps its memory: what is let go too early would be wrong in both.
    stream_program = arrange(program, plan, keep=not (options.simplify or options.on_gpu))
    about = {} if timing_only else {**plan_facts(program, plan, stream_program.peak_bytes), **compiled.facts}
    facts = {**about, "layout": compiled.layout, "captured": capture}
    if program.gpus is not None:
        facts |= split_facts(program)
    if not options.on_gpu:
        return SimulatedExecutable(program, stream_program, {**facts, "device": "CPU, simulated streams"})
    feeds = {name: to_torch(np.array(compiled.optimized.feeds[name]), torch.device("cpu")) for name in program.feeds}
    device = Device.of(torch.device(options.first))
    with device.entered(), telling_out_of_memory():
        return CudaExecutable(
            program,
            stream_program,
            feeds,
            device,
            options,
            ieee=ieee,
            facts={**facts, "device": torch.cuda.get_device_name(device.place)},
            timing_only=timing_only,
            shared=shared,
        )


def plan_for(program: Program, ids: NDArray[np.int32], costs: Costs | None) -> Plan:
    """The plan of a program for an assignment of the flat graph's nodes. Ids are renumbered without gaps.

    The record order is the better, in the simulator, of the order by rank and the timed order.

    Raises:
        EngineError: The second checker found the plan wrong, which is a bug in msplit.
    """
    with phase("planning"):
        problem = _problem(program, ids, costs)
        chosen = evaluate(problem, problem.pin)
        plan = make_plan(program.dag, program.lanes(ids)[0], node_order(problem, chosen.order, program.dag))
        return prove(keep_lanes(plan), program)


def _problem(program: Program, ids: Ints, costs: Costs | None) -> Problem:
    """The scheduling problem of a program whose steps are fixed to the streams of these ids."""
    machine = None if costs is None else Machine.of_costs(costs)
    return estimated(program, costs).problem(program, program.lanes(ids)[0], machine=machine)


def plan_on_gpus(program: Program, ids: Ints, streams: int) -> Plan:
    """The plan of a program for several GPUs, each with so many of the ids. It is one plan over all of them, copies included, and proved as
    any other.

    Raises:
        EngineError: The second checker found it wrong, which is a bug in msplit.
    """
    with phase("planning"):
        lanes = program.lanes_on_gpus(ids, streams)
        times = np.asarray([float(step.launches) for step in program.steps])
        return prove(keep_lanes(make_plan(program.dag, lanes, record_order(program.dag, times))), program)


def untimed_plan(program: Program, lanes: Ints) -> Plan:
    """The plan of a program whose steps are on these streams, recorded in the order in which they would come if all took the same time.

    Args:
        lanes: Per step its stream, -1 for a step that launches nothing.
    """
    return make_plan(program.dag, lanes, record_order(program.dag, (lanes >= 0).astype(np.float64)))


def prove(plan: Plan, program: Program) -> Plan:
    """The plan, after the second checker has found nothing wrong with it.

    Raises:
        EngineError: It has, which is a bug in msplit.
    """
    if program.gpus is not None:
        gpu_of_streams(program, plan)
    violations = check(plan, program.dag) or check(plan, program.conflicts())
    if violations:
        what = f"internal error: the plan does not hold: step {violations[0].consumer} {violations[0].text}"
        raise EngineError(what, where=program.steps[violations[0].consumer].op.name, fix=REPORT)
    return plan


def plan_facts(program: Program, plan: Plan, peak_bytes: int) -> Mapping[str, Any]:
    """Facts about a plan for the report."""
    one = untimed_plan(program, np.minimum(plan.stream, 0))
    own = [one for one in program.constants.values() if Device.of(one.device).owned(HostTables).find(one) is None]
    storages = [tensor.untyped_storage() for tensor in own]
    memory = {storage.data_ptr(): storage.nbytes() for storage in storages}  # several may lie in one
    return {
        "streams": plan.streams,
        "kernels": sum(step.launches for step in program.steps),
        "waits": plan.waits,
        "waits_before_reduction": plan.edges,
        "peak_bytes": peak_bytes,
        "peak_bytes_one_stream": arrange(program, one).peak_bytes,
        "weight_bytes": sum(memory.values()),
        **({"state_bytes": program.state.bytes} if program.state.keys else {}),
        **({"host_state_bytes": program.state.host_bytes} if program.state.hosted else {}),
    }


def split_facts(program: Program) -> Mapping[str, Any]:
    """Facts about a program for several GPUs for the report."""
    assert program.gpus is not None
    copies = [step for step in program.steps if step.op.op == PEER_COPY]
    weights = [0] * len(program.gpus.places)
    for key, tensor in program.constants.items():
        weights[program.gpus.constants.get(key, 0)] += tensor.untyped_storage().nbytes()
    return {
        "gpus": len(program.gpus.places),
        "copies": len(copies),
        "copied_bytes": sum(step.bytes for step in copies),
        "weight_bytes_of_gpus": weights,
    }


class SimulatedExecutable(Executable):
    """Executable on CPU tensors, in place of a GPU. Streams are interleaved at random, as their events allow, another way at every step."""

    keeps_state = True
    joins_others = True

    def __init__(
        self, program: Program, stream_program: StreamProgram, facts: Mapping[str, Any], *, seed: int = 0
    ) -> None:
        self.program, self.stream_program = program, stream_program
        self._facts, self._seed = dict(facts), seed
        self._feeds: Feeds = {}
        self._prefetched: tuple[Feeds | None, Feeds] = (None, {})  # what was sent, and its values then
        self.state = StateMemory(program.state, torch.device("cpu"))
        self._ranks = Device.of(torch.device("cpu")).owned(Ranks)
        self._group: ProcessGroup | None = None

    def step(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """One step."""
        results = self._run(feeds, None)
        return {**{name: to_numpy(value).copy() for name, value in results.items()}, **self.program.known_outputs()}

    def begin(self, feeds: Feeds) -> bool:
        """Runs the whole step, for nothing runs beside the host."""
        self._begun = self.step(feeds)
        return True

    def end(self) -> dict[str, NDArray[Any]]:
        """Outputs of the step that was begun."""
        return self._begun

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        """One step whose outputs are tensors: see `engines.base.Executable`."""
        own = {name: own_copy(value) for name, value in self._run(feeds, None).items()}
        return own | self.program.known_tensors(torch.device("cpu"))

    def step_prefetching(self, feeds: Feeds, then: Following, *, on_device: bool = False) -> dict[str, Any]:
        """Runs a step; the next one has the values that its arrays have now."""
        outputs = self.step_on_device(feeds) if on_device else self.step(feeds)
        following = then()
        with contextlib.suppress(EngineError):
            if following is not None:
                self._refuse(following)
                if all(is_array(following[name]) for name in self.program.fed):
                    self._prefetched = (following, {name: np.array(following[name]) for name in self.program.fed})
        return outputs

    def facts(self) -> Mapping[str, Any]:
        """Facts about the plan, and what the cache of rows has found by now."""
        tables = Device.of(torch.device("cpu")).owned(HostTables)
        return {**super().facts(), **tables.facts(self.program.constants.values())}

    def _refuse(self, feeds: Feeds) -> None:
        refuse_fed(feeds, {name: (dtype, shape) for name, (shape, dtype) in self.program.fed.items()})

    def _run(self, feeds: Feeds, tap: Tap | None) -> dict[str, torch.Tensor]:
        (own, sent), self._prefetched = self._prefetched, (None, {})
        feeds = sent if own is feeds else feeds
        self._refuse(feeds)
        self._feeds = feeds
        self._seed += 1
        values = {key: _own(name, feeds[name]) for name, key in self.program.feeds.items()}
        values |= self.state.values()
        with torch.no_grad(), self._ranks.talking(self._group):
            if self.program.gpus is None:
                simulate(self.program, self.stream_program, values, self._seed, tap)
            else:
                memory = SeparateMemory(self.program)
                memory.fed(values)
                simulate(self.program, self.stream_program, values, self._seed, tap, memory.run)
        return self.program.results(values)

    def launch(self) -> None:
        """One step on the last inputs."""
        self.step(self._feeds)

    def timeline(self) -> Timeline:
        """One step by the host's clock: one kernel at a time, streams taking turns at random."""
        tap = HostTap()
        with self.state.kept():
            self._run(self._feeds, tap)
        clock = "the host's, of streams simulated on the CPU, one kernel at a time: these times say nothing about a GPU"
        return timeline(self.program, self.stream_program, tap.times_us(), clock)

    def join(self) -> None:
        """Makes steps those of all processes."""
        self._group = self._ranks.group or ProcessGroup()
        self.state.spread(self._group.spread)

    def save_state(self) -> dict[str, NDArray[Any]]:
        """The values of variables."""
        return self.state.save()

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Gives variables other values."""
        self.state.load(state)

    def close(self) -> None:
        """Frees what the host's memory has of variables."""
        self.state.close()


def _own(name: str, value: Any) -> torch.Tensor:
    """An input as a tensor that steps may keep."""
    return to_torch(np.array(value)) if is_array(value) else own_copy(taken(name, value).cpu())


_OPERANDS: Mapping[str, Sequence[int]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "_addmm_activation": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
    "_scaled_dot_product_efficient_attention": (0, 1, 2),
    "_scaled_dot_product_flash_attention": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "_scaled_dot_product_cudnn_attention": (0, 1, 2),
}
"""PyTorch's ops that multiply on tensor cores, and which of their arguments these get."""


class RoundedProducts(TorchDispatchMode):  # type: ignore[misc]
    """A block in which the libraries' products of float32 read it rounded. Of a depthwise convolution, which has no tensor cores, too: that
    is little beside the others.

    Args:
        seed: Of moves by up to a rounding that come before it, so that numbers are rounded another way; None: to the nearest.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._generator = None if seed is None else np.random.default_rng(seed)

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        if self._generator is None:
            return to_tf32(value)
        moves = torch.from_numpy(np.asarray(self._generator.uniform(-1, 1, tuple(value.shape)), np.float32))
        return to_tf32(value * (1 + 2.0**-11 * moves.to(value.device)))

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Rounds the operands of products, and calls the op."""
        places = _OPERANDS.get(func.overloadpacket.__name__, ())
        given = [
            self._rounded(one) if place in places and one.dtype == torch.float32 else one
            for place, one in enumerate(args)
        ]
        return func(*given, **(kwargs or {}))


_ROUGH = ("tanh", "sigmoid", "erf", "erfc", "exp", "expm1", "log1p", "elu", "softplus")
"""PyTorch's functions of one number of which another library may give the neighbours of what they give."""

_ROUGHLY = 4.0
"""Most distance of such results, relative to each, as a multiple of the type's epsilon: TensorFlow's float32 `tanh` on the CPU is up to
2^-21.7 from the exact one, and 1 from 7.905 on (Eigen's; XLA's, and so TensorFlow's on a GPU, has the same constants)."""

_AROUND_ZERO = {"elu": 1.0}
"""Most distance of some by itself, as such a multiple: TensorFlow's Elu and Selu are exp(x) - 1, so 0 for small negative numbers. There
Selu's gradient is that of positive ones, 0.6 times as large."""


_TRANSFORMS = ("_fft_r2c", "_fft_c2c", "_fft_c2r")
"""PyTorch's Fourier transforms. Each adds all of its input in an order of its own, so the zeros of a constant are an epsilon of its
largest element."""


_SOFTMAX = ("_softmax", "_log_softmax")
"""PyTorch's softmaxes. In a kernel of attention, scores are multiplied first by what turns powers of e into those of 2, and rounded: of
scores around -1e4, as a mask without a position makes them, that leaves three decimals."""


class RoughFunctions(TorchDispatchMode):  # type: ignore[misc]
    """A block in which functions are as rough as another library's may be: results are moved by up to some epsilons, not beyond 1, those
    of a Fourier transform by up to one of the largest of them, a softmax is one of scores that were multiplied and rounded, and whatever
    an op makes below the least normal number is zero, as TensorFlow's threads on a CPU have it.

    Args:
        seed: Of the moves.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = np.random.default_rng(seed)

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the op, and moves what it gives."""
        name = func.overloadpacket.__name__
        if name in _SOFTMAX and args[0].dtype == torch.float32:
            by = float(np.float32(self._generator.uniform(1, 2)))
            made = func((args[0] * by).double() / by, *args[1:]).float()
        else:
            made = func(*args, **(kwargs or {}))
        if name in _TRANSFORMS:
            largest = made.abs().amax(args[1], keepdim=True)
            moves = self._generator.uniform(-1, 1, (2, *made.shape)) * torch.finfo(made.dtype).eps
            turned = moves[0] + 1j * moves[1] if made.is_complex() else moves[0]
            return made + (largest * torch.from_numpy(np.asarray(turned)).to(made.device)).to(made.dtype)
        narrow = isinstance(made, torch.Tensor) and made.dtype in (torch.float32, torch.float64)
        if not narrow or any(one.alias_info for one in func._schema.returns):  # a view, or what is changed in place
            return made
        if name in _ROUGH:
            moves = torch.from_numpy(np.asarray(self._generator.uniform(-1, 1, tuple(made.shape)))).to(made.device)
            moves = moves * torch.finfo(made.dtype).eps
            moved = (made * (1 + _ROUGHLY * moves) + _AROUND_ZERO.get(name, 0.0) * moves * (made != 0)).to(made.dtype)
            made = torch.where(made.abs() <= 1, moved.clamp(-1, 1), moved)
        return torch.where(made.abs() < torch.finfo(made.dtype).tiny, 0, made)
