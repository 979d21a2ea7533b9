"""Convolutions of the same data (siblings) as one step: horizontal fusion.

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

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch

from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.autotune.choices import Family
from msplit.engines.cuda.autotune.tuner import CALLS, LANES, MARGIN, Tuner
from msplit.engines.cuda.ir.dtypes import to_torch
from msplit.engines.cuda.ir.graph import Merge, Op, OpGraph, attrs_key
from msplit.engines.cuda.ir.tf32 import ROUNDED
from msplit.engines.cuda.ir.windows import SIBLINGS, TILES
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.passes.measured import MeasuredFusion, Trial, Way, lowered, sample
from msplit.engines.cuda.passes.pattern import Readers, heights
from msplit.formats.files import JsonValue
from msplit.opset.traits import CONV2D

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
        kind = _kind(graph, op, readers)
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


def _kind(graph: OpGraph, op: Op, readers: Readers) -> tuple[Any, ...] | None:
    """A key that is equal for siblings; None for an op that can have none."""
    if op.op not in CONV2D or str(op.attrs.get("data_format", "NHWC")) != "NHWC":
        return None
    steps = tuple(str(step) for step in op.attrs.get("fused_ops", ())) if op.op == "_FusedConv2D" else ()
    data, *rest = op.inputs
    shape, filter = graph.shapes.get(data), graph.constants.get(rest[0])
    if steps not in EPILOGUES or len(rest) != 1 + bool(steps) or shape is None or filter is None or filter.ndim != 4:
        return None
    if shape[-1] != filter.shape[2] or 0 in (*shape, *filter.shape) or data in graph.constants:
        return None
    # A filter that others read too would be held twice.
    if any(key not in graph.constants for key in rest) or readers.only(rest[0]) is None:
        return None
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
