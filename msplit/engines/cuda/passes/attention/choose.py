"""Whether one kernel does an attention faster than its products and its softmax: measured, where there is a GPU.

A kernel for all reads queries, keys and values once, and scores never leave the chip. But the library's in float32 computes each product
three times on tensor cores, to be nearly exact, where one in TF32 does (our own is beside it for that); and work is cut by queries and
heads, so that a few short ones leave most of a GPU idle. It must win against the two products, each by its fastest kernel, and the
softmax alone, with nothing counted for scales and masks, which may become one kernel with the softmax.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from msplit.engines.cuda.autotune import matmul
from msplit.engines.cuda.autotune.batched_matmul import may_round, times_of
from msplit.engines.cuda.autotune.choices import Family
from msplit.engines.cuda.autotune.tuner import CALLS, Tuner, differ
from msplit.engines.cuda.ir.dtypes import to_torch, torch_dtype
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, attrs_key
from msplit.engines.cuda.ir.interpret import as_tuple, call, static_slots
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.kernels.attention import WIDEST, names
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.ops.attention import KERNEL
from msplit.engines.cuda.passes.attention.match import Match
from msplit.engines.cuda.passes.attention.rewrite import Decide
from msplit.formats.files import JsonValue
from msplit.opset.traits import RESHAPES, VIEWS


@dataclass(frozen=True)
class Choice:
    """How attention of one kind runs.

    Attributes:
        kernel: What runs it (`ops.attention.KERNEL`), or None where products and softmax are faster.
        times: µs, alone, of what was measured; `APART` of products and softmax.
    """

    kernel: str | None
    times: Mapping[str, float] = field(default_factory=dict)


def _unpacked(value: JsonValue) -> Choice:
    kernel, times = value.items(2)
    return Choice(kernel.or_none(JsonValue.text), times_of(times))


FAMILY: Family[Choice] = Family("attention", lambda choice: [choice.kernel, choice.times], _unpacked, Choice(None))
"""The choices that are made here."""

APART = "apart"

LIBRARY = ("EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")
"""The library's kernels that keep no scores. The last two are for half precision only."""

_MATH = "MATH"
"""The library's products and softmax apart, for numbers to compare with."""

EXACT = 2e-5
"""Most that results may differ, relative to the largest, where IEEE precision is asked for. TF32 would by some 1e-3."""

_ALIGNED = 16
"""Bytes at a multiple of which the library's kernels want every row of queries, keys and values to begin."""

_Call = Callable[[], tuple[torch.Tensor, ...]]


def decide_on(device: torch.device, *, measure: bool) -> Decide:
    """What `fuse_attention` asks. Where nothing is measured, attention is taken that the library has a kernel for, which it chooses."""

    def decide(graph: OpGraph, match: Match, op: Op) -> str | None:
        if device.type != "cuda" or not measure:
            return "" if device.type != "cuda" or _is_aligned(match) else None
        with torch.no_grad(), torch.cuda.device(device):
            arguments = [_sample(graph, key, match.dtype, device) for key in op.inputs]
            laid = tuple((tuple(one.shape), one.stride(), one.dtype) for one in arguments)
            tf32 = torch.backends.cuda.matmul.allow_tf32
            tuner = Tuner.of(device)
            choice = tuner.choose(
                FAMILY,
                (attrs_key(op.attrs), laid, tf32),
                lambda: _fastest(tuner, match, op, arguments, _apart(graph, match, device)),
            )
            return choice.kernel

    return decide


def _fastest(tuner: Tuner, match: Match, op: Op, arguments: list[torch.Tensor], apart: _Call) -> Choice:
    exact = _lowered(_by(op, _MATH))(*(argument.float() for argument in arguments))
    listed = _library(arguments[0]) if tuner.is_spent else [*_library(arguments[0]), *_own(match, arguments[0])]
    calls = [(name, functools.partial(_lowered(_by(op, name)), *arguments)) for name in listed]
    with tuner.spending(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kernel of the library that can not do it says why
        ranked = tuner.ranked(calls, exact, forgiving=True)
        if arguments[0].dtype == torch.float32 and not may_round(torch.float32):
            ranked = [one for one in ranked if not differ(one.call(), exact, EXACT)]
        apart()  # loads the kernels
        times = {one.choice: one.milliseconds for one in ranked} | {APART: tuner.milliseconds(apart)}
        faster = ranked and tuner.beats(ranked[0].call, apart)
        us = {name: milliseconds * 1e3 / CALLS for name, milliseconds in times.items()}
        return Choice(ranked[0].choice if faster else None, us)


def _is_aligned(match: Match) -> bool:
    step = _ALIGNED // torch_dtype(match.dtype).itemsize
    return all(match.atoms.sizes[atom] % step == 0 for atom in (match.inner, match.depth))


def _library(query: torch.Tensor) -> tuple[str, ...]:
    return LIBRARY[:1] if query.dtype == torch.float32 else LIBRARY


def _own(match: Match, query: torch.Tensor) -> list[str]:
    """Ways to run our own kernel, where it may multiply with less than all bits."""
    size = match.atoms.sizes
    wide = max(size[match.inner], size[match.depth]) > WIDEST
    return (
        [] if wide or not may_round(query.dtype) or not can_launch(query.device) else names(match.atoms.size(match.row))
    )


def _by(op: Op, kernel: str) -> Op:
    return Op(op.node, op.name, op.op, {**op.attrs, KERNEL: kernel}, op.inputs, op.source_nodes)


def _lowered(op: Op) -> Callable[..., tuple[torch.Tensor, ...]]:
    return lambda *tensors: as_tuple(call(table()[op.op], op, list(tensors)))


def _apart(graph: OpGraph, match: Match, device: torch.device) -> _Call:
    """The products and the softmax of a match, on numbers at random that lie in memory as the model's do."""
    first, *between, last = match.ops
    slot = 0 if last.inputs[1] == match.value.key else 1
    start = [_sample(graph, key, match.dtype, device) for key in first.inputs]
    value = _sample(graph, match.value.key, match.dtype, device)
    steps = [_with_constants(graph, op) for op in between if op.op in VIEWS or op.op == "Cast" or op.op == "Softmax"]
    begin = _product(first, start)

    def weights() -> torch.Tensor:
        (found,) = begin(*start)
        for step in steps:
            (found,) = step(found)
        return found

    operands = [weights(), value] if slot == 0 else [value, weights()]
    end = _product(last, operands)

    def run() -> tuple[torch.Tensor, ...]:
        made = weights()
        return *(end(made, value) if slot == 0 else end(value, made)), made

    return run


def _product(op: Op, arguments: list[torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A product by its fastest kernel."""
    if op.op not in matmul.ANY_WEIGHTS:
        return _lowered(op)
    return _lowered(matmul.choose(op, list(arguments), _lowered, movable=False)[0])


def _with_constants(graph: OpGraph, op: Op) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A call of an op of one input, the others known."""
    known = [graph.constants[key] for slot, key in enumerate(op.inputs) if slot in static_slots(op)]
    return lambda tensor: as_tuple(call(table()[op.op], op, [tensor, *known]))


def _sample(graph: OpGraph, key: Key, dtype: str, device: torch.device) -> torch.Tensor:
    """Numbers at random that lie in memory as a value of the graph will: one that is a view does as what it is a view of."""
    if key in graph.constants:
        return to_torch(graph.constants[key], device)
    op = graph.ops.get(key[0])
    if op is not None and (op.op in RESHAPES or op.op == "Transpose") and op.inputs[0] in graph.shapes:
        return _with_constants(graph, op)(_sample(graph, op.inputs[0], dtype, device))[0]
    chance = torch.Generator(device).manual_seed(key[0])
    return torch.randn(graph.shapes[key], device=device, generator=chance).to(torch_dtype(dtype))
