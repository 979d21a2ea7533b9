"""Fusion of chains of small ops: from groups in the graph to kernels by PyTorch's compiler.

The whole way from a graph with shapes to one with fused groups.

Groups as kernels, by PyTorch's compiler (Inductor; on a GPU it writes Triton).

A group is traced to a graph of PyTorch ops with its very shapes and strides, and handed to Inductor below `torch.compile`: nothing looks at
Python code, nothing is guarded, and a call costs some microseconds on the host. The kernels run on the current stream and take memory
from PyTorch's allocator, so that they can be captured.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from numpy.typing import NDArray

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import dtype_name, to_torch, torch_dtype
from msplit.engines.cuda.ir.graph import Key, OpGraph
from msplit.engines.cuda.ir.interpret import device_inputs
from msplit.engines.cuda.ir.program import KernelCall
from msplit.engines.cuda.ir.windows import TO_TF32
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.kernels.store import Store
from msplit.engines.cuda.kernels.toolchain import fixed_assembler, kept
from msplit.engines.cuda.passes.horizontal_fusion.batch_rules import value_types
from msplit.engines.cuda.passes.pattern import Readers
from msplit.engines.cuda.passes.pointwise_fusion.outline import Body, Outline, contract, outline
from msplit.engines.cuda.passes.pointwise_fusion.partition import find_groups
from msplit.engines.cuda.passes.pointwise_fusion.record import Recorded, keep_refusal, known, record, watch
from msplit.engines.cuda.passes.pointwise_fusion.workers import BUSY, DONE, Workers
from msplit.engines.cuda.passes.precision.round_results import read_by_products, takes_tf32
from msplit.errors import MsplitError
from msplit.opset.traits import VIEWS
from msplit.progress import importing, phase

SECONDS = 30.0
"""Time for compiling the groups of one graph; what is left then stays as it is."""

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]
"""Shape, strides and dtype of a tensor, and whether it begins at a multiple of `_ALIGNED` bytes, which a kernel for the GPU may use."""

_ALIGNED = 16
"""Bytes that a kernel loads at once, where it is compiled for a tensor that begins at a multiple of them."""

_OPTIONS: Mapping[str, Any] = {
    "fx_graph_cache": True,
    "compile_threads": 1,  # no pool of processes that outlives the run: `workers.py` has its own
    "triton.cudagraphs": False,  # the whole step is captured, not each kernel
    "force_pointwise_cat": True,  # a join is one kernel, not one per part
    # Results as PyTorch's own kernels give them: rounding to the narrow type after each op, divisions that round correctly.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "emulate_divison_rounding": True,
}

_ALONE = threading.Lock()
"""Who compiles holds it: what PyTorch's compiler is told, and what it times kernels by, are one for all threads."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled group.

    Attributes:
        body: What it computes.
        layouts: Of the tensors that it was compiled for.
        run: The compiled function.
    """

    body: Body
    layouts: tuple[Layout, ...]
    run: Any = field(repr=False)

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """The group's outputs. Tensors that lie otherwise in memory than those it was compiled for go through its ops one by one."""
        for tensor, (*lies, aligned) in zip(tensors, self.layouts, strict=True):
            if lies != [*layout(tensor)[:3]] or (aligned and _begins_between(tensor)):
                return self.body(*tensors)
        results: Sequence[torch.Tensor] = self.run(*tensors)
        return results


@dataclass
class CompileReport:
    """Result of compiling.

    Attributes:
        seconds: Time it took.
        compiled: Kernels made.
        cached: How many of them came from the disk.
        ahead: How many of these workers had left there meanwhile.
        failed: Why workers did not do what they were given -> how often. It was compiled here then.
        refused: Why groups stay as they are -> how many.
    """

    seconds: float = 0.0
    compiled: int = 0
    cached: int = 0
    ahead: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    refused: dict[str, int] = field(default_factory=dict)

    def facts(self) -> Mapping[str, Any]:
        """For the report of a run. Workers are named where there was something with them."""
        return {
            "compile_seconds": round(self.seconds, 3),
            "compiled": self.compiled,
            "compiled_from_cache": self.cached - self.ahead,
            **({"compiled_by_workers": self.ahead} if self.ahead else {}),
            **({"workers_failed": dict(sorted(self.failed.items()))} if self.failed else {}),
            "not_fused": dict(sorted(self.refused.items())),
        }


def layout(tensor: torch.Tensor) -> Layout:
    """Layout of a tensor in memory.

    One whose bytes are no multiple of `_ALIGNED` counts as not aligned wherever it lies: inputs lie side by side, so that it may begin
    elsewhere in a step than where it was looked at; and a kernel would gain next to nothing.
    """
    aligned = not _begins_between(tensor) and not (tensor.is_cuda and tensor.nbytes % _ALIGNED)
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, aligned


def _begins_between(tensor: torch.Tensor) -> bool:
    """True for a tensor on a GPU that begins between two multiples of `_ALIGNED` bytes. On the CPU any address will do."""
    return tensor.is_cuda and bool(tensor.data_ptr() % _ALIGNED)


class _Made(dict[tuple[Any, ...], Kernel | str]):
    """Kernels that were compiled for one device, or the reason why they could not be."""

    def __init__(self, device: Device) -> None:
        super().__init__()


class Compiler:
    """Compiles for one device until its time is used up."""

    def __init__(self, device: torch.device, seconds: float = SECONDS) -> None:
        self.device, self.budget = device, seconds
        self.report = CompileReport()
        self._made = Device.of(device).owned(_Made)

    def kernels(self, wanted: Sequence[tuple[Body, tuple[Layout, ...]]]) -> list[Kernel | str]:
        """The kernel of each group, or why there is none. Where time is short, the first ones are compiled."""
        workers = Device.of(self.device).owned(Workers)
        if len(workers):
            self._share(wanted, workers)
        return [self.kernel(*one) for one in wanted]

    def _share(self, wanted: Sequence[tuple[Body, tuple[Layout, ...]]], workers: Workers) -> None:
        """Compiles groups together with workers."""
        began, before = time.perf_counter(), self.report.seconds
        tasks: dict[tuple[Any, ...], Any] = {}
        shared: list[tuple[Body, tuple[Layout, ...]]] = []
        for body, layouts in wanted:
            if self._has(body, layouts) or (body.key, layouts) in tasks:
                continue
            with contextlib.suppress(TypeError):  # what has no form as plain data is compiled here
                tasks[body.key, layouts] = [body.packed(), packed_layouts(layouts)]
                shared.append((body, layouts))
        for number, said in workers.each(list(tasks.values()), self.budget - before):
            hits = self.report.cached
            self.kernel(*shared[number])
            if said == DONE:
                self.report.ahead += self.report.cached - hits
            elif said != BUSY:
                self.report.failed[said] += 1
            self.report.seconds = before + time.perf_counter() - began

    def kernel(self, body: Body, layouts: tuple[Layout, ...]) -> Kernel | str:
        """The kernel of a group, or why there is none."""
        key = (body.key, layouts)
        if self.device.type == "cuda" and not can_launch(self.device):
            return "Triton, which compiles for the GPU, or its C compiler is missing"
        if not self._has(body, layouts):
            if self.report.seconds >= self.budget:
                return f"compiling took more than {self.budget:g} s"
            with _ALONE:
                start = time.perf_counter()
                self._made[key] = self._compile(body, layouts)
                self.report.seconds += time.perf_counter() - start
        return self._made[key]

    def _has(self, body: Body, layouts: tuple[Layout, ...]) -> bool:
        """Returns whether a group was compiled before, in another process perhaps: its kernel, or why there is none, is kept then."""
        found = self._made.get((body.key, layouts)) or self._known(body, layouts)
        if found is not None:
            self._made[body.key, layouts] = found
        return found is not None

    def _known(self, body: Body, layouts: tuple[Layout, ...]) -> Kernel | str | None:
        """The record of a group, perhaps from another process."""
        if self.device.type != "cuda":
            return None
        try:
            found = known(_name(body, layouts), Store.of(self.device), self.device)
        except MsplitError:  # damaged
            return None
        if isinstance(found, Recorded):
            self.report.compiled += 1
            self.report.cached += 1
            return Kernel(body, layouts, found)
        return found

    def _compile(self, body: Body, layouts: tuple[Layout, ...]) -> Kernel | str:
        try:
            with torch.no_grad(), kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a compiler has to say of its own parts is nothing to the user
                inputs = examples(layouts, self.device)
                run, count, cached = compile_group(body, inputs)
        except Exception as problem:
            # Whatever goes wrong in a compiler, the group runs as it is.
            said = next(iter(str(problem).strip().splitlines()), "")[:60]
            return f"the compiler failed: {type(problem).__name__}: {said}"
        gpu = self.device.type == "cuda"
        name, store = _name(body, layouts), Store.of(self.device)
        if count != 1 and count >= longest_chain(body):
            why = f"they would be {count} kernels"
            if gpu:
                keep_refusal(name, store, why)
            return why
        self.report.compiled += 1
        self.report.cached += cached
        if gpu:
            with torch.no_grad():
                run = record(name, store, run, inputs) or run
        return Kernel(body, layouts, run)


def _name(body: Body, layouts: tuple[Layout, ...]) -> str:
    """Name that a group's kernel is kept by."""
    name = f"fused {hashlib.sha256(repr(body.key).encode()).hexdigest()} {tuple(lies[:3] for lies in layouts)}"
    between = [number for number, lies in enumerate(layouts) if not lies[3]]
    return f"{name} anywhere {between}" if between else name


def examples(layouts: Sequence[Layout], device: torch.device) -> list[torch.Tensor]:
    """Tensors that lie so, of any values. What is not aligned begins one element behind where it would be, which the compiler sees."""
    made = []
    for shape, stride, dtype, aligned in layouts:
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        memory = torch.empty(span + (not aligned), dtype=dtype, device=device)
        made.append(memory.as_strided(shape, stride, int(not aligned)))
    return made


def packed_layouts(layouts: Sequence[Layout]) -> Any:
    """Layouts as plain data for JSON."""
    return [[shape, stride, dtype_name(dtype), aligned] for shape, stride, dtype, aligned in layouts]


def unpacked_layouts(data: Any) -> tuple[Layout, ...]:
    """Restores layouts from the data of `packed_layouts`. Where older builds say nothing of it, tensors have to be aligned."""
    return tuple((tuple(one[0]), tuple(one[1]), torch_dtype(one[2]), all(one[3:])) for one in data)


@contextlib.contextmanager
def _options() -> Iterator[None]:
    with importing("torch._dynamo.utils", "PyTorch's compiler"):
        from torch._inductor import config

    with config.patch({name: value for name, value in _OPTIONS.items() if _has(config, name)}):
        yield


@contextlib.contextmanager
def _untimed() -> Iterator[None]:
    """Keeps Inductor from timing kernels while it compiles, as `standalone_compile` wants it to: `record` has them timed, by the device."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen as Wrapper

    own = Wrapper.generate_and_run_autotune_block
    Wrapper.generate_and_run_autotune_block = lambda self: None
    try:
        yield
    finally:
        Wrapper.generate_and_run_autotune_block = own


def load() -> None:
    """Imports PyTorch's compiler, which takes seconds."""
    # Not before the options are set: with others, what this loads starts processes of its own.
    with _options(), importing("torch._inductor.compile_fx", "PyTorch's compiler"):
        import_module("torch._inductor.compile_fx")
    watch()


def compile_group(body: Body, inputs: list[torch.Tensor]) -> tuple[Any, int, bool]:
    """The compiled function, how many kernels it launches, and whether it was on the disk. Of the inputs only the layouts matter."""
    load()
    from torch._dynamo.utils import counters
    from torch._inductor import metrics, standalone_compile
    from torch._functorch import config
    from torch.fx.experimental.proxy_tensor import make_fx

    if inputs and inputs[0].device.type == "cuda":
        fixed_assembler()
    # This cache takes a tensor that begins between two multiples for one that does not, and gives code that copies it first.
    cached = config.enable_autograd_cache and not any(map(_begins_between, inputs))
    hits = counters["inductor"]["fxgraph_cache_hit"]
    before = metrics.generated_kernel_count
    with _options(), _untimed(), config.patch(enable_autograd_cache=cached):
        graph = make_fx(body, tracing_mode="fake")(*inputs)
        run = standalone_compile(graph, inputs, dynamic_shapes="from_example_inputs")
    return run, metrics.generated_kernel_count - before, counters["inductor"]["fxgraph_cache_hit"] > hits


def longest_chain(body: Body) -> int:
    """Kernels on the longest path through a group as it is: fewer in a row are a gain, however many streams there are."""
    depth: list[int] = []
    for call in body.calls:
        before = [depth[value[0]] for value in call.arguments if isinstance(value, tuple) and value[0] >= 0]
        depth.append(max(before, default=0) + (call.op not in VIEWS and call.op != TO_TF32))
    return max(depth, default=0)


def _has(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


Trace = Callable[..., object]
"""`tracing.trace`, which runs a graph once and tells of each step."""


@dataclass
class Fused:
    """Result of fusion.

    Attributes:
        groups: Groups that are one kernel each now.
        members: Ops in them that launched something before.
        kernels: Different kernels among them.
        report: What compiling took; None where groups run op by op.
    """

    groups: int = 0
    members: int = 0
    kernels: int = 0
    report: CompileReport | None = None

    def facts(self) -> Mapping[str, Any]:
        """For the report of a run."""
        counts = {"fused_groups": self.groups, "fused_ops": self.members, "fused_kernels": self.kernels}
        return {**counts, **({} if self.report is None else self.report.facts())}


def likely_groups(graph: OpGraph) -> int:
    """About how many groups there are in a graph with shapes, which does not run for it."""
    return len(find_groups(graph, value_types(graph)))


def fuse(
    graph: OpGraph,
    layouts: dict[Key, Layout],
    device: torch.device,
    *,
    measure: bool = True,
    compile: bool = True,
    seconds: float = SECONDS,
) -> Fused:
    """Makes groups of pointwise ops one op each, which runs its members one by one where kernels are not to be compiled.

    The graph has known shapes; how its values lie in memory is as `observe` finds it, and those of groups are added. After so many seconds
    of compiling no further kernel is begun. `measure` is as for `trace`.
    """
    compiler = Compiler(device, seconds) if compile else None
    done = Fused(report=compiler.report if compiler else None)
    among: set[int] | None = None
    # Groups as large as may be first; then, of the ops of groups for which there is no kernel, smaller ones of equally many elements.
    for strict in (False, True):
        dtypes = {key: dtype_name(found[2]) for key, found in layouts.items()}
        groups = find_groups(graph, dtypes, among=among, strict=strict)
        readers = Readers(graph)
        for_products = read_by_products(graph) if measure and takes_tf32(device) else set()
        outlines = [outline(graph, group, readers, for_products) for group in groups]
        # A group whose kernel is a reason, in words, stays as it is.
        pairs = list(zip(outlines, _kernels(compiler, outlines, layouts), strict=True))
        chosen = [(made, kernel) for made, kernel in pairs if not isinstance(kernel, str)]
        names = contract(graph, chosen)
        layouts |= {names[key]: layouts[key] for key in names if key in layouts}
        done.groups += len(chosen)
        done.members += sum(made.group.launching for made, _ in chosen)
        done.kernels += len({id(kernel) for _, kernel in chosen if kernel is not None})
        refused = [(made, kernel) for made, kernel in pairs if isinstance(kernel, str)]
        if done.report is not None and not strict:
            done.report.refused.update(Counter(reason for _, reason in refused))
        among = {number for made, _ in refused for number in made.group.members}
        if not among:
            break
    return done


def observe(
    graph: OpGraph,
    feeds: Mapping[str, NDArray[Any]],
    device: torch.device,
    trace: Trace,
    *,
    nchw: bool,
    held: Mapping[Key, torch.Tensor] | None = None,
    measure: bool = True,
) -> dict[Key, Layout]:
    """Layout in memory of every value that an op reads on the device: the graph runs once.

    A view of a constant, as grouping leaves them, does not run: it is known before. But a group may have a copy of the view, and
    then it is the constant that it reads. Constants that are `held` are on the device already.
    """
    layouts: dict[Key, Layout] = {}

    def note(step: KernelCall, arguments: list[torch.Tensor]) -> None:
        layouts.update(zip(step.inputs, map(layout, arguments), strict=True))

    trace(graph, feeds, device, nchw=nchw, measure=measure, observe=note, held=held)
    for op in graph.ops.values():
        for key in device_inputs(op) if op.op in VIEWS else ():
            if key in graph.constants and key not in layouts:
                layouts[key] = layout(to_torch(graph.constants[key]))
    return layouts


def _kernels(
    compiler: Compiler | None, outlines: Sequence[Outline], layouts: Mapping[Key, Layout]
) -> list[Kernel | str | None]:
    """Per group its kernel, why it has none, or None where nothing is compiled. What saves most is compiled first."""
    if compiler is None:
        return [None] * len(outlines)
    wanted = [(made.body, tuple(layouts[key] for key in made.inputs)) for made in outlines]
    saved: Counter[Any] = Counter()
    for made, (body, lies) in zip(outlines, wanted, strict=True):
        saved[body.key, lies] += made.group.launching - 1
    order = sorted(range(len(wanted)), key=lambda number: -saved[wanted[number][0].key, wanted[number][1]])
    with phase("compiling fused kernels"):
        found = dict(zip(order, compiler.kernels([wanted[number] for number in order]), strict=True))
    return [found[number] for number in range(len(wanted))]
