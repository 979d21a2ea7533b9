"""Fusions that are measured before they are taken: one scaffold for all of them.

A fusion finds candidates in the graph. For each it sets up a trial on the device, with data at random: calls of its own kernels, and of
what they would replace. Where a kernel wins, the fusion puts it into the graph. Choices are kept by the tuner, also for other processes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from msplit.engines.cuda.autotune.tuner import Call, Family, RotatingWeights, Tuner, copies
from msplit.engines.cuda.ir.dtypes import to_torch, torch_dtype
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ir.interpret import as_tuple, call
from msplit.engines.cuda.ir.lowering import table
from msplit.progress import during

C = TypeVar("C")
K = TypeVar("K")
T = TypeVar("T")

Decision = tuple[bool, Any]
"""True where a candidate is fused, and the kernel that does it; None where libraries do, step by step."""

Decide = Callable[[OpGraph, Any], Decision]


@dataclass(frozen=True, eq=False)
class Way:
    """A call of a function with data, weights (a tensor or several) and other tensors. It is timed with copies of the weights in turns."""

    run: Callable[..., Any]
    data: Tensor
    weights: Any
    rest: Sequence[Tensor] = ()

    def __call__(self) -> Any:
        """Runs it once."""
        return self.run(self.data, self.weights, *self.rest)


@dataclass(frozen=True, eq=False)
class Trial(Generic[K]):
    """A candidate on the device.

    Attributes:
        baseline: Calls that, one after the other, do what would be replaced, each by its fastest kernel.
        candidates: Kernels of ours, and a call of each.
        expected: Results that a kernel must give.
        most: Most that they may differ, relative to the largest, where that is less than usual.
    """

    baseline: Sequence[Call]
    candidates: Iterable[tuple[K, Call]]
    expected: Sequence[Tensor]
    most: float | None = None

    def rotating(self) -> Trial[K]:
        """The trial with other weights for each call. Copies are shared by all calls that have the same weights."""
        of = functools.cache(copies)

        def turned(call: Call) -> Call:
            if not isinstance(call, Way):
                return call
            several = isinstance(call.weights, tuple)
            laid = list(zip(*map(of, call.weights), strict=False)) if several else of(call.weights)
            return RotatingWeights(call.run, call.data, laid, call.rest)

        candidates = [(kernel, turned(call)) for kernel, call in self.candidates]
        return Trial([turned(call) for call in self.baseline], candidates, self.expected)


def fastest(tuner: Tuner, trial: Trial[K]) -> K | None:
    """The first kernel that beats the baseline, a single call, alone and side by side; None where none does."""
    trial = trial.rotating()
    (baseline,) = trial.baseline
    return tuner.first_to_beat(tuner.ranked(trial.candidates, trial.expected, cold=True), baseline)


@dataclass(frozen=True, eq=False)
class MeasuredFusion(Generic[C, T]):
    """A fusion that is taken where it is faster.

    Attributes:
        family: Its choices as they are kept.
        find: Candidates in a graph. It may go on where one was fused or left.
        fused: Puts a candidate into the graph, by a kernel or by none of ours.
        key: All that the choice of a candidate depends on beside the GPU and the code.
        trial: Sets up a candidate on a device.
        choose: Measures a trial.
        kernel: The kernel that a choice stands for; None where the baseline is better.
        worth: Decides for a candidate on a GPU if it is measured at all.
        untimed: Decides where nothing is measured on a GPU.
        on_cpu: Decides on a CPU, which stands in for a GPU.
        ahead: Candidates that there will be once the passes in front are done, for what is compiled ahead; None: `find`.
        either_layout: Set where it holds for data that lie as NCHW, too.
        across_gpus: Set where it holds in a graph for several GPUs.
        listed: Set where its kernels are compiled ahead with all others.
    """

    family: Family[T]
    find: Callable[[OpGraph], Iterable[C]]
    fused: Callable[[OpGraph, C, Any], None]
    key: Callable[[OpGraph, C, torch.device], tuple[Any, ...]]
    trial: Callable[[OpGraph, C, torch.device], Trial[Any]]
    choose: Callable[[Tuner, Trial[Any]], T] = fastest  # type: ignore[assignment]
    kernel: Callable[[T], Any] = lambda choice: choice
    worth: Callable[[OpGraph, C], bool] = lambda *_: True
    untimed: Callable[[OpGraph, C], bool] = lambda *_: False
    on_cpu: Callable[[OpGraph, C], bool] = lambda *_: False
    ahead: Callable[[OpGraph], Iterable[C]] | None = None
    either_layout: bool = False
    across_gpus: bool = False
    listed: bool = True

    def run(self, graph: OpGraph, device: torch.device, *, measure: bool = True) -> bool:
        """Fuses every candidate for which that is decided; returns whether there was one."""
        changed = False
        for candidate in self.find(graph):
            takes, kernel = self.decide(graph, candidate, device, measure=measure)
            if takes:
                self.fused(graph, candidate, kernel)
                changed = True
        return changed

    def decide(self, graph: OpGraph, candidate: C, device: torch.device, *, measure: bool = True) -> Decision:
        """Decides for one candidate: as `deciding` says, or on a GPU by measurement."""
        given = given_decision(self)
        if given is not None:
            return given(graph, candidate)
        if device.type != "cuda":
            return self.on_cpu(graph, candidate), None
        if not measure or not self.worth(graph, candidate):
            return self.untimed(graph, candidate), None
        kernel = self.kernel(self.choice(graph, candidate, device))
        return kernel is not None, kernel

    def choice(self, graph: OpGraph, candidate: C, device: torch.device) -> T:
        """The choice for a candidate, measured where it was not made before."""
        tuner = Tuner.of(device)
        made = functools.cache(lambda: self.trial(graph, candidate, device))

        def calls() -> Iterable[Call]:
            return (call for _, call in made().candidates) if self.listed else ()

        with torch.no_grad(), tuner.device.entered():
            return tuner.choose(
                self.family, self.key(graph, candidate, device), lambda: self.choose(tuner, made()), calls
            )

    def list_choices(self, graph: OpGraph, device: torch.device) -> None:
        """Has the tuner, in `Tuner.listing`, hear of every choice that will be made."""
        for candidate in list((self.ahead or self.find)(graph)):
            self.decide(graph, candidate, device)


_given: ContextVar[Mapping[Any, Decide] | None] = ContextVar("msplit_decisions", default=None)


def deciding(decisions: Mapping[Any, Decide]) -> contextlib.AbstractContextManager[object]:
    """For tests and benchmarks: inside, these fusions are decided by functions of graph and candidate, and nothing is measured for them."""
    return during(_given, {**(_given.get() or {}), **decisions})


def given_decision(fusion: Any) -> Decide | None:
    """The function of `deciding` for a fusion; None where there is none."""
    return (_given.get() or {}).get(fusion)


def sample(graph: OpGraph, key: Key, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant of the graph on the device; of any other value numbers at random, of its own type or else of `dtype`."""
    if key in graph.constants:
        return to_torch(graph.constants[key], device)
    dtype = torch_dtype(graph.dtypes[key]) if key in graph.dtypes else dtype
    chance = torch.Generator(device).manual_seed(0)
    return torch.randn(graph.shape(key) or (), device=device, dtype=dtype, generator=chance)


def lowered(op: Op) -> Callable[..., tuple[Tensor, ...]]:
    """The function that runs an op on its tensors."""
    return lambda *tensors: as_tuple(call(table()[op.op], op, list(tensors)))
