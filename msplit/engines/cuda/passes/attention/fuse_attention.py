"""One op in the place of an attention, where one kernel is faster than the products and the softmax: measured, where there is a GPU.

A kernel for all reads queries, keys and values once, and scores never leave the chip. But the library's in float32 computes each product
three times on tensor cores, to be nearly exact, where one in TF32 does (our own is beside it for that); and work is cut by queries and
heads, so that a few short ones leave most of a GPU idle. It must win against the two products, each by its fastest kernel, and the
softmax alone, with nothing counted for scales and masks, which may become one kernel with the softmax.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from string import ascii_uppercase
from typing import Any

import numpy as np
import torch

from msplit.engines.cuda.autotune import matmul
from msplit.engines.cuda.autotune.batched_matmul import may_round, times_of
from msplit.engines.cuda.autotune.tuner import CALLS, Call, Family, Tuner, differ
from msplit.engines.cuda.ir.dtypes import numpy_dtype, to_torch, torch_dtype
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, attrs_key, gpus_of
from msplit.engines.cuda.ir.interpret import as_tuple, call, static_slots
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.kernels.matmul import WIDEST, names
from msplit.engines.cuda.ops.fused import ATTENTION as OP
from msplit.engines.cuda.ops.fused import EQUATION, KERNEL
from msplit.engines.cuda.passes.attention.masks import AttentionMask, Maker, mask_of
from msplit.engines.cuda.passes.attention.match import Match, Operand, find
from msplit.engines.cuda.passes.measured import MeasuredFusion, Trial, lowered
from msplit.engines.cuda.passes.pattern import become_reshape, viewed
from msplit.formats.files import JsonValue
from msplit.opset.traits import RESHAPES, VIEWS


@dataclass(frozen=True, eq=False)
class Candidate:
    """An attention that one op could do.

    Attributes:
        match: It as it is.
        op: The op, which is in the graph already.
        result: The result, of one axis per atom.
        replaced: What was read of attentions that are fused, and what is to be read instead.
    """

    match: Match
    op: Op
    result: Key
    replaced: dict[Key, Key]


def find_attention(graph: OpGraph) -> Iterator[Candidate]:
    """Attentions that one op could do. What is made for one goes where it is not fused; at the end results are read of those that are."""
    maker = Maker(graph, gpus=gpus_of(graph))
    replaced: dict[Key, Key] = {}
    for match in find(graph):
        first = graph.numbers
        found = _attention(graph, maker, match)
        if found is not None:
            yield Candidate(match, *found, replaced)
        if match.ops[-1].out not in replaced:
            maker.forget(first)
    _read(graph, replaced)


def fuse_attention(graph: OpGraph, found: Candidate, kernel: str | None) -> None:
    """Turns an attention into one op, with the name of its kernel, or the library's own choice."""
    if kernel:
        found.op.attrs[KERNEL] = kernel
    made, become = _replace(graph, found.match, found.result)
    found.replaced[made] = become


def _attention(graph: OpGraph, maker: Maker, match: Match) -> tuple[Op, Key] | None:
    """The op that does a match, and the result, of one axis per atom; None where no kernel can do the same."""
    mask = mask_of(maker, match)
    if mask is None or len(match.batch) > len(ascii_uppercase):
        return None
    letters = dict(zip(match.batch, ascii_uppercase, strict=False))
    letters |= {match.column: "k", match.inner: "d", match.depth: "v"} | dict.fromkeys(match.row, "q")
    sizes = match.atoms.sizes
    operands = (match.query, match.key, match.value)
    inputs = [_by_atom(graph, match, operand) for operand in operands]
    terms = ["".join(letters[atom] for axis in operand.axes for atom in axis) for operand in operands]
    result = [atom for axis in match.result for atom in axis]
    attrs = {
        "T": match.dtype,
        EQUATION: ",".join(terms) + "->" + "".join(letters[atom] for atom in result),
        "scale": match.scale,
        "causal": mask.causal,
    }
    if mask.bias is not None:
        inputs.append(mask.bias)
    first, *between, last = match.ops
    op = graph.add(OP, first, attrs, inputs, tuple(sizes[atom] for atom in result), match.dtype)
    # The products first: they decide on the stream, and on most of the costs.
    op.source_nodes = list(dict.fromkeys(node for one in (first, last, *between) for node in one.source_nodes))
    op.batch = first.batch
    return op, _with_lost(maker, match, mask, op, result)


def _by_atom(graph: OpGraph, match: Match, operand: Operand) -> Key:
    """An operand with one axis per atom. Reshapes in front of it are left out: they may have to copy, to join what is cut again here."""
    key, wanted = viewed(graph, operand.key), match.atoms.shape([(atom,) for axis in operand.axes for atom in axis])
    if graph.shapes[key] == wanted:
        return key
    attrs = {"T": match.dtype}
    return graph.add("Reshape", match.ops[0], attrs, [key, graph.sizes(wanted)], wanted, match.dtype).out


def _with_lost(maker: Maker, match: Match, mask: AttentionMask, op: Op, result: list[int]) -> Key:
    """The result, with what rows become in which nothing counts."""
    key = op.out
    if mask.kept is None:
        return key
    graph, sizes = maker.graph, match.atoms.sizes
    shape = (*(graph.shape(mask.kept) or ())[:-1], 1)
    some = maker.op(op, "Any", {"keep_dims": True}, [mask.kept, np.asarray([-1], np.int32)], shape, "bool")
    axes = tuple((atom,) if size > 1 else () for atom, size in zip(match.order, shape, strict=True))
    kept = maker.laid(op, some, axes, tuple(result), sizes, "bool")
    lost = np.full((1,) * len(result), mask.lost, numpy_dtype(match.dtype))
    return maker.op(op, "SelectV2", {"T": match.dtype}, [kept, key, lost], graph.shapes[key], match.dtype)


def _replace(graph: OpGraph, match: Match, result: Key) -> tuple[Key, Key]:
    """Lets the ops of a match go, but for a reshape of the result where it needs one. What was read, and what is to be read."""
    *others, last = match.ops
    graph.drop(others)
    if graph.shapes[last.out] == graph.shapes[result]:
        graph.drop([last])
    else:
        become_reshape(graph, last, result)
    return last.out, result


def _read(graph: OpGraph, made: dict[Key, Key]) -> None:
    """Lets what read the results of matches read those of the ops in their place; a reshape of a reshape reads what that does."""
    for op in graph.ops.values():
        if op.op in RESHAPES and op.inputs[0] in made:
            become_reshape(graph, op, made[op.inputs[0]])  # an axis that it names is one of what it read
    graph.rename({key: result for key, result in made.items() if key[0] not in graph.ops})


@dataclass(frozen=True)
class Choice:
    """A way to run attention of one kind.

    Attributes:
        kernel: What runs it (`ops.fused.KERNEL`), or None where products and softmax are faster.
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


def _key(graph: OpGraph, found: Candidate, device: torch.device) -> tuple[Any, ...]:
    laid = tuple((tuple(one.shape), one.stride(), one.dtype) for one in _arguments(graph, found, device))
    return attrs_key(found.op.attrs), laid, torch.backends.cuda.matmul.allow_tf32


def _arguments(graph: OpGraph, found: Candidate, device: torch.device) -> list[torch.Tensor]:
    return [_sample(graph, key, found.match.dtype, device) for key in found.op.inputs]


def _trial(graph: OpGraph, found: Candidate, device: torch.device) -> Trial[str]:
    op, arguments = found.op, _arguments(graph, found, device)
    exact = lowered(_by(op, _MATH))(*(argument.float() for argument in arguments))
    query = arguments[0]
    library = LIBRARY[:1] if query.dtype == torch.float32 else LIBRARY
    names = (*library, *_own(found.match, query))
    calls = [(name, functools.partial(lowered(_by(op, name)), *arguments)) for name in names]
    most = EXACT if query.dtype == torch.float32 and not may_round(torch.float32) else None
    return Trial([_apart(graph, found.match, device)], calls, exact, most)


def _fastest(tuner: Tuner, trial: Trial[str]) -> Choice:
    (apart,) = trial.baseline
    calls = [one for one in trial.candidates if one[0] in LIBRARY or not tuner.is_spent]
    with tuner.spending(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kernel of the library that can not do it says why
        ranked = tuner.ranked(calls, trial.expected, forgiving=True)
        if trial.most is not None:
            ranked = [one for one in ranked if not differ(one.call(), trial.expected, trial.most)]
        apart()  # loads the kernels
        times = {one.choice: one.milliseconds for one in ranked} | {APART: tuner.milliseconds(apart)}
        faster = ranked and tuner.beats(ranked[0].call, apart)
        us = {name: milliseconds * 1e3 / CALLS for name, milliseconds in times.items()}
        return Choice(ranked[0].choice if faster else None, us)


def _is_aligned(match: Match) -> bool:
    step = _ALIGNED // torch_dtype(match.dtype).itemsize
    return all(match.atoms.sizes[atom] % step == 0 for atom in (match.inner, match.depth))


def _own(match: Match, query: torch.Tensor) -> list[str]:
    """Ways to run our own kernel, where it may multiply with less than all bits."""
    wide = max(match.atoms.sizes[atom] for atom in (match.inner, match.depth)) > WIDEST
    runs = not wide and may_round(query.dtype) and can_launch(query.device)
    return names(match.atoms.size(match.row)) if runs else []


def _by(op: Op, kernel: str) -> Op:
    return replace(op, attrs={**op.attrs, KERNEL: kernel})


def _apart(graph: OpGraph, match: Match, device: torch.device) -> Call:
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

    def operands(made: torch.Tensor) -> list[torch.Tensor]:
        return [made, value] if slot == 0 else [value, made]

    end = _product(last, operands(weights()))

    def run() -> tuple[torch.Tensor, ...]:
        made = weights()
        return *end(*operands(made)), made

    return run


def _product(op: Op, arguments: list[torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A product by its fastest kernel."""
    if op.op not in matmul.ANY_WEIGHTS:
        return lowered(op)
    return lowered(matmul.choose(op, list(arguments), lowered, movable=False)[0])


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


ATTENTION = MeasuredFusion(
    FAMILY,
    find_attention,
    fuse_attention,
    _key,
    _trial,
    _fastest,
    kernel=lambda choice: choice.kernel,
    # Where nothing is measured, attention is taken that the library has a kernel for, which it chooses.
    untimed=lambda _, found: _is_aligned(found.match),
    on_cpu=lambda *_: True,
    either_layout=True,
    across_gpus=True,
    listed=False,
)
