"""Parts of a Concat are written where they belong.

A convolution or a pool whose result a Concat reads writes it into that one's memory (a buffer: see `ir.buffers`), and the Concat becomes a
view. A Concat whose result is a part of another's lies in the same buffer: DenseNet, where each layer joins all before it with one new
result (Huang et al., CVPR 2017), writes every result once, and each layer reads the buffer up to where it is written (Pleiss et al.,
"Memory-Efficient Implementation of DenseNets", 2017, share that memory in training).

Whatever else is joined is copied to its place. So a buffer is worth having where fewer kernels copy than Concats go. What lies in the
middle of a buffer does not lie in one piece: it must be read by nobody who would copy it first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.ir.buffers import BUFFER, INTO, JOINED, PART, Part
from msplit.engines.cuda.ir.dtypes import to_torch
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ir.windows import SIBLINGS, TILES
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.passes.convolution.fuse_prologue import OP as PROLOGUED
from msplit.engines.cuda.passes.convolution.merge_convolutions import EPILOGUES
from msplit.engines.cuda.passes.measured import given_decision, lowered
from msplit.engines.cuda.passes.pattern import Dominators, Readers
from msplit.opset.traits import CONV2D, ops_with, traits

Writes = Callable[[OpGraph, Op], bool]
"""Decides for an op if its kernel can write a part of a buffer."""

_JOINS = ops_with("concatenates")
_MAKES = ops_with("runs alone") | FILTERS.keys()
_TAKES_STRIDES = ops_with("per element") | {PROLOGUED}
_POOLS = ops_with("pool")
_RANK = 4
_MOST_JOINED = 256
"""Concats that share a buffer: a chain of them is looked at once for each that can not have one."""


@dataclass(eq=False)
class _Layout:
    """Layout of one buffer: first place and length along its axis of everything in it.

    Attributes:
        axis: Along which it is joined.
        joined: Concats, the one that is all of the buffer first.
        made: Values that the ops that make them write there.
        copied: Values that have to be copied.
    """

    axis: int
    joined: list[tuple[Op, int, int]] = field(default_factory=list)
    made: dict[Key, tuple[int, int]] = field(default_factory=dict)
    copied: list[tuple[Key, int, int]] = field(default_factory=list)

    def ops(self) -> set[int]:
        """Ops whose results lie in it, where they are made."""
        return {*(op.node for op, _, _ in self.joined), *(number for number, _ in self.made)}


def concat_in_place(graph: OpGraph, writes: Writes) -> bool:
    """Turns Concats into views of buffers that their parts are written into, where that saves kernels."""
    axes = {op.node: axis for op in graph.ops.values() if (axis := _axis(graph, op)) is not None}
    if not axes:
        return False
    finder = _Finder(graph, axes, writes)
    found = []
    for number in reversed(axes):
        if number in finder.taken:
            continue
        layout = finder.lay_out(graph.ops[number])
        anchor = finder.anchor(layout) if len(layout.copied) < len(layout.joined) else None
        if anchor is not None:
            finder.taken |= layout.ops()
            found.append((layout, anchor))
    for layout, anchor in found:
        _write(graph, layout, anchor)
    return bool(found)


def _axis(graph: OpGraph, op: Op) -> int | None:
    """The axis along which an op joins two or more values of known shapes; None for every other op."""
    if op.op not in _JOINS or op.out not in graph.shapes or op.out not in graph.dtypes:
        return None
    axis = graph.constants.get(op.inputs[_axis_slot(op)])
    shapes = [graph.shape(key) for key in _parts(op)]
    if axis is None or len(shapes) < 2 or any(shape is None or 0 in shape for shape in shapes):
        return None
    return int(axis) % len(graph.shapes[op.out])


def _axis_slot(op: Op) -> int:
    return (traits(op.op).axis or 0) % len(op.inputs)


def _parts(op: Op) -> list[Key]:
    return [key for slot, key in enumerate(op.inputs) if slot != _axis_slot(op)]


class _Finder:
    """Finds what can lie in buffers.

    Attributes:
        axes: Axis of each Concat.
        taken: Ops whose results lie in buffers.
    """

    def __init__(self, graph: OpGraph, axes: Mapping[int, int], writes: Writes) -> None:
        self.graph, self.axes, self.writes = graph, axes, writes
        self.readers, self.dominators = Readers(graph), Dominators(graph)
        self.taken: set[int] = set()

    def lay_out(self, last: Op) -> _Layout:
        """Lays out everything that a Concat joins."""
        axis = self.axes[last.node]
        layout = _Layout(axis)
        waiting = [(last, 0, self.graph.shapes[last.out][axis])]
        taken = {*self.taken, last.node}
        while waiting:
            join, start, size = waiting.pop()
            layout.joined.append((join, start, size))
            for key in _parts(join):
                number, length = key[0], (self.graph.shape(key) or ())[axis]
                free = number not in taken and self._takes_strides(key)
                if free and self.axes.get(number) == axis and len(waiting) + len(layout.joined) < _MOST_JOINED:
                    waiting.append((self.graph.ops[number], start, length))
                    taken.add(number)
                elif free and self._is_written(number):
                    layout.made[key] = start, length
                    taken.add(number)
                else:
                    layout.copied.append((key, start, length))
                start += length
        return layout

    def _is_written(self, number: int) -> bool:
        op = self.graph.ops.get(number)
        return op is not None and op.op in _MAKES and self.writes(self.graph, op)

    def _takes_strides(self, key: Key) -> bool:
        """Returns whether everything that wants a value, but for the one that joins it, takes it as it lies in the middle of a buffer."""
        read_by = [self.graph.ops[reader].op for reader in self.readers.of[key]]
        others = [op for op in read_by if op not in _JOINS]
        return len(others) == len(read_by) - 1 and _TAKES_STRIDES.issuperset(others) and key not in self.readers.fetched

    def anchor(self, layout: _Layout) -> Key | None:
        """The value behind which a buffer's memory is taken: whatever writes there needs it anyway, so that no stream waits for another.
        Where there is none, an input; None where there is none either."""
        number = self.dominators.of(*(key[0] for key in layout.made))
        # Other ops may become part of a larger kernel.
        while number is not None and self.graph.ops[number].op not in _MAKES:
            number = self.dominators.of(number)
        return next(iter(self.graph.feeds.values()), None) if number is None else (number, 0)


def _write(graph: OpGraph, layout: _Layout, anchor: Key) -> None:
    """Puts the buffer into the graph, lets everything write into it and makes views of the Concats."""
    last, axis = layout.joined[0][0], layout.axis
    shape, dtype = graph.shapes[last.out], graph.dtypes[last.out]
    buffer = graph.add(BUFFER, last, {"shape": shape, "T": dtype}, [anchor], shape, dtype).out
    places = dict(layout.made)
    for key, (start, size) in layout.made.items():
        maker = graph.ops[key[0]]
        maker.attrs = {**maker.attrs, INTO: (Part(key[1], axis, start, size),)}
        maker.inputs = [*maker.inputs, buffer]
    for key, start, size in layout.copied:
        attrs = {INTO: (Part(0, axis, start, size),)}
        places[graph.add("_Copy", last, attrs, [key, buffer], graph.shape(key), dtype).out] = start, size
    for join, start, size in layout.joined:
        inside = [key for key, (first, _) in places.items() if start <= first < start + size]
        join.op, join.attrs, join.inputs = JOINED, {PART: Part(0, axis, start, size)}, [buffer, *inside]


def writes_on(device: torch.device, *, measure: bool) -> Writes:
    """Decides for `concat_in_place`, for data that lie as NHWC: where a convolution runs in our own kernel, which `autotune.conv`
    measures, it writes anywhere, as our pools do. A library's result would be copied."""

    given = given_decision(concat_in_place)

    def writes(graph: OpGraph, op: Op) -> bool:
        if given is not None:
            return given(graph, op)[0]
        channels = op.attrs.get("data_format", "NHWC")
        if channels != "NHWC" or len(graph.shapes.get((op.node, 0), ())) != _RANK:
            return False
        if op.op in _POOLS:
            return True
        steps = tuple(str(step) for step in op.attrs.get("fused_ops", ()) if str(step) != "Add")
        chosen = op.op == PROLOGUED or SIBLINGS in op.attrs
        if (op.op not in CONV2D and not chosen) or steps not in EPILOGUES:
            return False
        return chosen or device.type != "cuda" or (measure and _runs_in_tiles(graph, op, device))

    return writes


def _runs_in_tiles(graph: OpGraph, op: Op, device: torch.device) -> bool:
    """Returns whether our own kernel runs a convolution with a constant filter, by measurement."""
    filter = graph.constants.get(op.inputs[1])
    if filter is None or not conv.worth_a_kernel(to_torch(filter[:0]).dtype):
        return False
    with torch.no_grad(), torch.cuda.device(device):
        weights = FILTERS[op.op](to_torch(filter, device), True)
        chance = torch.Generator(device).manual_seed(0)

        def like(key: Key) -> torch.Tensor:
            return torch.randn(graph.shape(key) or (), dtype=weights.dtype, device=device, generator=chance)

        data, *rest = map(like, (op.inputs[0], *op.inputs[2:]))
        chosen, _ = conv.choose(op, [data, weights, *rest], lowered)
    return TILES in chosen.attrs
