"""Fusions of convolutions that share their result or their data: written into a Concat's memory, or siblings as one step.

Parts of a Concat are written where they belong.

A convolution or a pool whose result a Concat reads writes it into that one's memory (a buffer: see `ir.program`), and the Concat becomes a
view. A Concat whose result is a part of another's lies in the same buffer: DenseNet, where each layer joins all before it with one new
result (Huang et al., CVPR 2017), writes every result once, and each layer reads the buffer up to where it is written (Pleiss et al.,
"Memory-Efficient Implementation of DenseNets", 2017, share that memory in training).

Whatever else is joined is copied to its place. So a buffer is worth having where fewer kernels copy than Concats go. What lies in the
middle of a buffer does not lie in one piece: it must be read by nobody who would copy it first.

Convolutions of the same data (siblings) as one step: horizontal fusion.

A block of Inception starts with three or four 1×1 convolutions of one tensor, each of which fills a tenth of a large GPU. Their filters
side by side are one filter with more output channels (Jia et al., TASO, SOSP 2019, merge them so and cut the result afterwards); here each
one's result is a tensor of its own, so that nothing is cut or copied. Siblings depend on nothing but the tensor that they share and on
constants, so that none of them can depend on another.

Whether one kernel for all beats each with its own is measured. Merged siblings start as one kernel, end as one, and need no streams to
overlap. But each of them alone may have a better kernel in a library, and what waits for the smallest waits for all. So one kernel must
win against the members one after the other, must not lose against the members each on a stream of its own (which must also fork and
join), and many such kernels side by side must not take longer than as many times the members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import numpy as np
import torch

from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.autotune.tuner import CALLS, LANES, MARGIN, Family, Tuner
from msplit.engines.cuda.ir.dtypes import to_torch
from msplit.engines.cuda.ir.graph import Key, Merge, Op, OpGraph, attrs_key, known, proved, require
from msplit.engines.cuda.ir.program import BUFFER, INTO, JOINED, PART, Part
from msplit.engines.cuda.ir.windows import ROUNDED, SIBLINGS, TILES
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.passes.convolution.fuse_prologue import OP as PROLOGUED
from msplit.engines.cuda.passes.measured import MeasuredFusion, Trial, Way, given_decision, lowered, sample
from msplit.engines.cuda.passes.pattern import Dominators, Readers, heights
from msplit.formats.files import JsonValue
from msplit.opset.traits import CONV2D, ops_with, traits

OP = "_SiblingConv2D"
MOST = 4
"""Convolutions that one step does."""

EPILOGUES = ((), ("BiasAdd",), ("BiasAdd", "Relu"))
"""Steps that may follow each of them in the same kernel."""

_WINDOW = ("strides", "padding", "explicit_paddings", "dilations", "T")


def find_siblings(graph: OpGraph) -> list[list[Op]]:
    """Sets of 2 to `MOST` siblings, the member first that most convolutions come behind: it decides on the stream of all."""
    readers = Readers(graph)
    found: dict[tuple[Any, ...], list[Op]] = {}
    for op in graph.ops.values():
        kind = proved(_kind, graph, op, readers)
        if kind is not None:
            found.setdefault(kind, []).append(op)
    if all(len(members) < 2 for members in found.values()):
        return []
    behind = heights(graph, readers, lambda op: op.op in CONV2D)
    sets = []
    for members in found.values():
        members.sort(key=lambda op: -behind[op.node])
        # As few sets as hold them all, of nearly equal size.
        parts = np.array_split(np.arange(len(members)), -(-len(members) // MOST))
        sets += [[members[number] for number in part] for part in parts if len(part) > 1]
    return sets


def _kind(graph: OpGraph, op: Op, readers: Readers) -> tuple[Any, ...]:
    """A key that is equal for siblings, of an op that can have some."""
    require(op.op in CONV2D and str(op.attrs.get("data_format", "NHWC")) == "NHWC")
    steps = tuple(str(step) for step in op.attrs.get("fused_ops", ())) if op.op == "_FusedConv2D" else ()
    data, *rest = op.inputs
    shape, filter = known(graph.shapes.get(data)), known(graph.constants.get(rest[0]))
    require(steps in EPILOGUES and len(rest) == 1 + bool(steps) and filter.ndim == 4 and shape[-1] == filter.shape[2])
    require(0 not in (*shape, *filter.shape) and data not in graph.constants)
    # A filter that others read too would be held twice.
    require(all(key in graph.constants for key in rest) and readers.only(rest[0]) is not None)
    window = tuple(str(op.attrs.get(name)) for name in _WINDOW)
    return data, steps, filter.shape[:3], filter.dtype.name, window


def _merge(graph: OpGraph, members: Sequence[Op], tiles: tuple[int, ...]) -> None:
    """Makes siblings one op, and notes it in `merges`."""
    first = members[0]
    filters = [graph.constants[op.inputs[1]] for op in members]
    sizes = tuple(int(filter.shape[3]) for filter in filters)
    inputs = [first.inputs[0], graph.constant(np.concatenate(filters, 3))]
    if len(first.inputs) > 2:
        inputs.append(graph.constant(np.concatenate([graph.constants[op.inputs[2]].reshape(-1) for op in members])))
    attrs = {**first.attrs, SIBLINGS: sizes, TILES: tiles}
    made = graph.add(OP, first, attrs, inputs)
    made.source_nodes, made.batch = [node for op in members for node in op.source_nodes], len(members)
    names = {op.out: (made.node, port) for port, op in enumerate(members)}
    for old, new in names.items():
        graph.describe(new, graph.shapes[old], graph.dtypes.get(old))
    graph.drop(members)
    graph.rename(names)
    graph.merges.append(Merge(first.op, len(members), 0, launches=True))
    graph.forget_constants()


JOIN = 0.2
"""µs that a fork of streams and the join after it take at the least: merged siblings save them, and `Times.beside` leaves them out."""


@dataclass(frozen=True)
class Times:
    """Measured times of one set of siblings, µs per run of all of them.

    Attributes:
        tiles: Of the fastest kernel for all.
        merged: That kernel alone.
        loaded: As many of it side by side as `tuner.LANES`.
        one_by_one: The members one after the other.
        one_by_one_loaded: Likewise, on each of as many streams.
        beside: The members each on a stream of its own, without what it costs to fork and to join.
    """

    tiles: Tiles
    merged: float
    loaded: float
    one_by_one: float
    one_by_one_loaded: float
    beside: float

    def wins(self) -> bool:
        """Returns whether one kernel is better, with streams and without."""
        alone = self.merged < MARGIN * self.one_by_one and self.merged <= self.beside + JOIN
        return alone and self.loaded < self.one_by_one_loaded / MARGIN


def _times_of(value: JsonValue) -> Times:
    tiles, *times = value.items(len(fields(Times)))
    return Times(conv.tiles_of(tiles), *(time.number() for time in times))


FAMILY: Family[Times | None] = Family(
    "merged convolutions",
    lambda times: None if times is None else astuple(times),
    lambda value: value.or_none(_times_of),
    None,
)
"""The choices that are made here: `Times`, None where no kernel gives the same numbers. A key begins with the data's shape, the filter's
height and width, and the members' output channels."""


def _key(graph: OpGraph, members: Sequence[Op], device: torch.device) -> tuple[Any, ...]:
    first = members[0]
    filters = [graph.constants[op.inputs[1]] for op in members]
    sizes = tuple(filter.shape[3] for filter in filters)
    how = first.op, attrs_key(first.attrs), bool(first.attrs.get(ROUNDED))
    return graph.shapes[first.inputs[0]], filters[0].shape[:2], sizes, filters[0].dtype.name, *how


def _trial(graph: OpGraph, members: Sequence[Op], device: torch.device) -> Trial[Tiles]:
    """Each member by its fastest kernel, against kernels for all: of the data, the filters side by side, and the biases."""
    first = members[0]
    filters = [to_torch(graph.constants[op.inputs[1]], device) for op in members]
    biases = [[to_torch(graph.constants[key], device) for key in op.inputs[2:]] for op in members]
    data = sample(graph, first.inputs[0], filters[0].dtype, device)
    alone = []
    for op, filter, bias in zip(members, filters, biases, strict=True):
        chosen, weights = conv.choose(op, [data, FILTERS[op.op](filter, True), *bias], lowered)
        alone.append(Way(lowered(chosen), data, weights, bias))
    expected = [member()[0] for member in alone]
    together = FILTERS[OP](torch.cat(filters, 3), True)
    sizes = tuple(int(one.shape[-1]) for one in expected)
    rest = [torch.cat([bias[0].reshape(-1) for bias in biases])] if biases[0] else []

    def candidates() -> Iterator[tuple[Tiles, Way]]:
        for tiles in conv.candidates(data, together, expected[0].numel() // sizes[0], sizes):
            attrs = {**first.attrs, SIBLINGS: sizes, TILES: tiles}
            run = lowered(Op(first.node, first.name, OP, attrs, [], first.source_nodes))
            yield tiles, Way(run, data, together, rest)

    return Trial(alone, candidates(), expected)


def _times(tuner: Tuner, trial: Trial[Tiles]) -> Times | None:
    trial = trial.rotating()
    alone = trial.baseline

    def one_by_one() -> list[Any]:
        return [member() for member in alone]

    merged = tuner.ranked(trial.candidates, trial.expected, cold=True)
    if not merged:
        return None
    us = 1e3 / CALLS
    return Times(
        merged[0].choice,
        us * merged[0].milliseconds,
        us * tuner.milliseconds(merged[0].call, LANES, cold=True),
        us * tuner.milliseconds(one_by_one, cold=True),
        us * tuner.milliseconds(one_by_one, LANES, cold=True),
        us * tuner.milliseconds_of(alone, cold=True),
    )


# It comes after all other passes but pointwise fusion, so that biases and activations are in.
SIBLING_CONVOLUTIONS = MeasuredFusion(
    FAMILY,
    find_siblings,
    _merge,
    _key,
    _trial,
    _times,
    kernel=lambda times: times.tiles if times is not None and times.wins() else None,
    worth=lambda graph, members: conv.worth_a_kernel(to_torch(graph.constants[members[0].inputs[1]][:0]).dtype),
    across_gpus=True,
)


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


def concat_into(graph: OpGraph, writes: Writes) -> bool:
    """Turns Concats into views of buffers that their parts are written into, where that saves kernels."""
    axes = {op.node: axis for op in graph.ops.values() if (axis := proved(_axis, graph, op)) is not None}
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


def _axis(graph: OpGraph, op: Op) -> int:
    """The axis along which an op joins two or more values of known shapes."""
    require(op.op in _JOINS and op.out in graph.shapes and op.out in graph.dtypes)
    shapes = [known(graph.shape(key)) for key in _parts(op)]
    require(len(shapes) >= 2 and all(0 not in shape for shape in shapes))
    return int(known(graph.constants.get(op.inputs[_axis_slot(op)]))) % len(graph.shapes[op.out])


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
    """Decides for `concat_into`, for data that lie as NHWC: where a convolution runs in our own kernel, which `autotune.conv`
    measures, it writes anywhere, as our pools do. A library's result would be copied."""

    given = given_decision(concat_into)

    def writes(graph: OpGraph, op: Op) -> bool:
        if given is not None:
            return given(graph, op)[0]
        if op.attrs.get("data_format", "NHWC") != "NHWC" or len(graph.shapes.get((op.node, 0), ())) != _RANK:
            return False
        steps = tuple(str(step) for step in op.attrs.get("fused_ops", ()) if str(step) != "Add")
        chosen = op.op == PROLOGUED or SIBLINGS in op.attrs
        convolves = (op.op in CONV2D or chosen) and steps in EPILOGUES
        free = chosen or device.type != "cuda"
        return op.op in _POOLS or (convolves and (free or (measure and _runs_in_tiles(graph, op, device))))

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
