"""Concatenations without a copy: what makes the parts writes them side by side into the memory of the whole.

Each block of Inception ends in a concatenation of its branches along the channels, a kernel that waits for all of them, and that the
next block waits for. Our own kernels can write rows that are longer than theirs, so the whole may be there when the last branch is done;
what a library makes is copied to its place right behind it, on its own stream.

The memory of the whole is made by a step without inputs. It launches nothing, so that it comes before everything else of a run, and what
lies there is never let go before the end. So no stream can write to memory that another still reads, without a further wait.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from msplit.engines.cuda.program import Key, Op, Program, Source, Step, dependencies
from msplit.engines.cuda.tensors import torch_dtype
from msplit.engines.cuda.triton_here import can_compile
from msplit.engines.cuda.windows import TILES

LARGEST = 8 << 20
"""Bytes of one whole: it is held during the entire run."""

LARGEST_IN_ALL = 64 << 20

COPIES = 1
"""Parts that may have to be copied: the concatenation itself is one kernel."""

BUFFER = "_Buffer"
"""Op that makes memory."""

_FLOATS = frozenset({"float32", "float16", "bfloat16"})


class _Cut(NamedTuple):
    """Where one output of a step goes: the memory of the whole, the first of its columns there, and how many."""

    whole: Key
    start: int
    width: int


class _Join(NamedTuple):
    """A concatenation that is to cost nothing."""

    step: int
    whole: Key
    shape: tuple[int, ...]
    dtype: str
    cuts: dict[Key, _Cut]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * int(torch_dtype(self.dtype).itemsize)


def write_in_place(program: Program, source: Source, device: torch.device) -> Program:
    """A program whose concatenations launch nothing where nearly all parts are made by kernels that can write to a place in the whole.

    Args:
        program: Traced on a GPU, where convolutions and pools lie as NHWC; on a CPU no kernel can, and it stays as it is.
        source: What it was traced from, for shapes and types.
        device: Where it was traced.
    """
    joins = _joins(program, source, device)
    return _rewritten(program, joins, device) if joins else program


def _can_write(step: Step, device: torch.device) -> bool:
    """Whether our own kernel does the step: it writes wherever it is told to. A wrong guess costs a copy, and nothing else."""
    pools = (
        step.op.op in ("MaxPool", "MaxPoolV2", "AvgPool") and str(step.op.attrs.get("data_format", "NHWC")) == "NHWC"
    )
    return device.type == "cuda" and (TILES in step.op.attrs or (pools and can_compile()))


def _joins(program: Program, source: Source, device: torch.device) -> list[_Join]:
    made_by = program.producers()
    readers = Counter(program.fetches.values())
    for step in program.steps:
        readers.update(step.inputs)
    number = max((source.numbers, *(step.op.node + 1 for step in program.steps)))  # that nothing has
    found: list[_Join] = []
    taken: set[int] = set()  # steps that write to a place
    held = 0
    for place, step in enumerate(program.steps):
        shapes = _shapes(source, step)
        makers = [made_by.get(key, -1) for key in step.inputs]
        if shapes is None or any(
            readers[key] != 1 or not _is_own(program, maker, key)
            for key, maker in zip(step.inputs, makers, strict=True)
        ):
            continue
        direct = {maker for maker in makers if maker not in taken and _can_write(program.steps[maker], device)}
        widths = [shape[3] for shape in shapes]
        starts = accumulate(widths, initial=0)
        whole = number, 0
        cuts = {key: _Cut(whole, *cut) for key, *cut in zip(step.inputs, starts, widths, strict=False)}
        join = _Join(place, whole, (*shapes[0][:3], sum(widths)), source.dtypes[step.inputs[0]], cuts)
        if len(makers) - len(direct) <= COPIES and join.bytes <= LARGEST and held + join.bytes <= LARGEST_IN_ALL:
            held += join.bytes
            taken |= set(makers)
            found.append(join)
            number += 1
    return found


def _shapes(source: Source, step: Step) -> list[tuple[int, ...]] | None:
    """Shapes of what a step lays side by side along the last of four axes; None for any other step."""
    last = len(step.op.inputs) - 1
    if step.op.op != "ConcatV2" or not step.launches or step.varying or len(step.inputs) != last:
        return None
    shapes = [source.shapes[key] for key in step.inputs if key in source.shapes]
    fits = len(shapes) == last and all(len(shape) == 4 and 0 not in shape for shape in shapes)
    return (
        shapes if fits and int(step.bound[last]) in (3, -1) and source.dtypes.get(step.inputs[0]) in _FLOATS else None
    )


def _is_own(program: Program, maker: int, key: Key) -> bool:
    """Whether a step launches a kernel that makes the value in memory of the step's own, always of the same shape."""
    if maker < 0:
        return False
    step = program.steps[maker]
    return step.launches and not step.varying and step.bases[key[1]] == maker and step.op.op != "ConcatV2"


def _rewritten(program: Program, joins: Sequence[_Join], device: torch.device) -> Program:
    joined = {join.step: join for join in joins}
    cuts = {key: cut for join in joins for key, cut in join.cuts.items()}
    first = len(joins)
    buffers = [_buffer(program.steps[join.step].op, join, device) for join in joins]
    steps = []
    for number, step in enumerate(program.steps):
        if number in joined:
            whole = joined[number].whole
            steps.append(
                replace(step, call=_last, inputs=(*step.inputs, whole), launches=False, bytes=0, bases=(-1,), traffic=0)
            )
            continue
        places = {port: cuts[step.op.node, port] for port in range(step.outputs) if (step.op.node, port) in cuts}
        bases = tuple(
            -1 if base < 0 or base in joined or port in places else base + first for port, base in enumerate(step.bases)
        )
        if places:
            call = functools.partial(_write, step.call, tuple((port, *cut[1:]) for port, cut in places.items()))
            inputs = (*step.inputs, *(cut.whole for cut in places.values()))
            own = step.bytes if number + first in bases else 0
            steps.append(replace(step, call=call, inputs=inputs, bases=bases, bytes=own))
        else:
            steps.append(replace(step, bases=bases))
    steps = buffers + steps
    dynamic = tuple(number + first for number in program.dynamic)
    return replace(program, steps=tuple(steps), dag=dependencies(steps), dynamic=dynamic)


def _buffer(concat: Op, join: _Join, device: torch.device) -> Step:
    def make() -> tuple[torch.Tensor, ...]:
        return (torch.empty(join.shape, dtype=torch_dtype(join.dtype), device=device),)

    op = Op(join.whole[0], concat.name, BUFFER, {}, [], concat.covers[:1])
    return Step(op, make, (), 1, launches=False, bytes=join.bytes, bases=(-1,))


def _last(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The whole, once all parts are there."""
    return (tensors[-1],)


def _write(
    call: Callable[..., tuple[Any, ...]], cuts: tuple[tuple[int, int, int], ...], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Calls a step that has the memory of the wholes as its last inputs, and puts the outputs that belong there in their places.

    Args:
        call: Of the step.
        cuts: Output port, first column and number of columns, one for each of the wholes.
        tensors: Inputs of the step, then the wholes.
    """
    own = len(tensors) - len(cuts)
    into = {
        port: whole.narrow(-1, start, width) for (port, start, width), whole in zip(cuts, tensors[own:], strict=True)
    }
    results = list(call(*tensors[:own], into=into))
    for port, place in into.items():
        if results[port].data_ptr() != place.data_ptr():
            place.copy_(results[port])
        results[port] = place
    return tuple(results)
