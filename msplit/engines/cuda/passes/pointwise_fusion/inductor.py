"""Groups as kernels, by PyTorch's compiler (Inductor; on a GPU it writes Triton).

A group is traced to a graph of PyTorch ops with its very shapes and strides, and handed to Inductor below `torch.compile`: nothing looks at
Python code, nothing is guarded, and a call costs some microseconds on the host. The kernels run on the current stream and take memory
from PyTorch's allocator, so that they can be captured.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from msplit.engines.cuda.device import Device
from msplit.engines.cuda.kernels.toolchain import can_compile, kept
from msplit.engines.cuda.passes.pointwise_fusion.body import Body
from msplit.opset.traits import VIEWS
from msplit.progress import importing

SECONDS = 30.0
"""Time for compiling the groups of one graph; what is left then stays as it is."""

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""

_OPTIONS: Mapping[str, Any] = {
    "fx_graph_cache": True,
    "compile_threads": 1,  # no pool of processes that outlives the run
    "triton.cudagraphs": False,  # the whole step is captured, not each kernel
    "force_pointwise_cat": True,  # a join is one kernel, not one per part
    # Results as PyTorch's own kernels give them: rounding to the narrow type after each op, divisions that round correctly.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "emulate_divison_rounding": True,
}


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
        if tuple(map(layout, tensors)) != self.layouts:
            return self.body(*tensors)
        results: Sequence[torch.Tensor] = self.run(*tensors)
        return results


@dataclass
class Report:
    """What compiling did.

    Attributes:
        seconds: Time it took.
        compiled: Kernels made.
        cached: How many of them came from the disk.
        refused: Why groups stay as they are -> how many.
    """

    seconds: float = 0.0
    compiled: int = 0
    cached: int = 0
    refused: dict[str, int] = field(default_factory=dict)


def layout(tensor: torch.Tensor) -> Layout:
    """How a tensor lies in memory."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


class _Made(dict[tuple[Any, ...], Kernel | str]):
    """What was compiled for one device, or why it could not be."""

    def __init__(self, device: Device) -> None:
        del device
        super().__init__()


class Compiler:
    """Compiles for one device until its time is used up."""

    def __init__(self, device: torch.device, seconds: float = SECONDS) -> None:
        self.device, self.budget = device, seconds
        self.report = Report()
        self._made = Device.of(device).owned(_Made)

    def kernel(self, body: Body, layouts: tuple[Layout, ...]) -> Kernel | str:
        """The kernel of a group, or why there is none."""
        key = (body.key, layouts)
        if self.device.type == "cuda" and not can_compile():
            return "Triton, which compiles for the GPU, or its C compiler is missing"
        if key not in self._made:
            if self.report.seconds >= self.budget:
                return f"compiling took more than {self.budget:g} s"
            start = time.perf_counter()
            self._made[key] = self._compile(body, layouts)
            self.report.seconds += time.perf_counter() - start
        return self._made[key]

    def _compile(self, body: Body, layouts: tuple[Layout, ...]) -> Kernel | str:
        examples = [
            torch.empty_strided(shape, stride, dtype=dtype, device=self.device) for shape, stride, dtype in layouts
        ]
        try:
            with torch.no_grad(), kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a compiler has to say of its own parts is nothing to the user
                run, count, cached = _inductor(body, examples)
        except Exception as problem:
            # Whatever goes wrong in a compiler, the group runs as it is.
            said = next(iter(str(problem).strip().splitlines()), "")[:60]
            return f"the compiler failed: {type(problem).__name__}: {said}"
        if count != 1 and count >= longest_chain(body):
            return f"they would be {count} kernels"
        self.report.compiled += 1
        self.report.cached += cached
        return Kernel(body, layouts, run)


def _inductor(body: Body, examples: list[torch.Tensor]) -> tuple[Any, int, bool]:
    """The compiled function, how many kernels it launches, and whether it was on the disk."""
    with importing("torch._dynamo.utils", "PyTorch's compiler"):
        from torch._dynamo.utils import counters
        from torch._inductor import config, metrics, standalone_compile
        from torch.fx.experimental.proxy_tensor import make_fx

    hits = counters["inductor"]["fxgraph_cache_hit"]
    before = metrics.generated_kernel_count
    with config.patch({name: value for name, value in _OPTIONS.items() if _has(config, name)}):
        with importing("torch._inductor.compile_fx", "PyTorch's compiler"):
            # Not before the options are set: with others, what this loads starts processes of its own.
            import_module("torch._inductor.compile_fx")
        graph = make_fx(body, tracing_mode="fake")(*examples)
        run = standalone_compile(graph, examples, dynamic_shapes="from_example_inputs")
    return run, metrics.generated_kernel_count - before, counters["inductor"]["fxgraph_cache_hit"] > hits


def longest_chain(body: Body) -> int:
    """Kernels on the longest path through a group as it is: fewer in a row are a gain, however many streams there are."""
    depth: list[int] = []
    for call in body.calls:
        before = [depth[value[0]] for value in call.arguments if isinstance(value, tuple) and value[0] >= 0]
        depth.append(max(before, default=0) + (call.op not in VIEWS))
    return max(depth, default=0)


def _has(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True
