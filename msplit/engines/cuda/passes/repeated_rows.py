"""Rows that a graph repeats itself: what makes them, what depends on them, and whether it pays to compute one of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.shared import REPEATING
from msplit.cost.formulas import Case, work
from msplit.cost.gpus import DEFAULT_GPU, data_sheet
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, known
from msplit.formats.tensors import numpy_dtype
from msplit.opset.traits import ops_with
from msplit.shapes.registry import Node

_RESHAPES = ops_with("reshape")


def repeats(graph: OpGraph, inputs: Collection[str], rows: int) -> bool:
    """True if an op repeats what is made of these inputs alone so often."""
    fed, found = {graph.feeds[name] for name in inputs if name in graph.feeds}, set[int]()
    for number, op in graph.ops.items():
        read = [key for key in op.inputs if key not in graph.constants]
        if read and all(key in fed or key[0] in found for key in read):
            found.add(number)
            few, every = (math.prod(graph.shape(key) or ()) for key in (read[0], op.out))
            if op.op in REPEATING and every == rows * few:
                return True
    return False


def differing(graph: OpGraph, small: OpGraph, once: Collection[int]) -> set[int]:
    """Those of some ops that give something else in the small graph."""
    found = set[int]()
    for number, op in graph.ops.items():
        if number in once and (
            any(key[0] in found for key in op.inputs)
            or any(graph.shape(key) != small.shape(key) for key in outputs(graph, number))
            or any(
                key in graph.constants and not equal(graph.constants[key], small.constants[taken])
                for key, taken in zip(op.inputs, small.ops[number].inputs, strict=True)
            )
        ):
            found.add(number)
    return found


def outputs(graph: OpGraph, number: int) -> list[Key]:
    """The values that an op gives."""
    return [(number, port) for port in range(graph.ports(number))]


def pays(graph: OpGraph, small: OpGraph, once: Collection[int], views: Collection[str]) -> bool:
    """True if one row takes less time, by a data sheet, than is lost where others need all rows in memory: all but `views`."""
    sheet, lost = data_sheet(DEFAULT_GPU), 0.0
    for number, op in graph.ops.items():
        if number not in once and op.op not in views:
            wide = [key for key in op.inputs if key[0] in once]
            lost += sum(sheet.launch_us + 2 * _bytes(graph, key) / sheet.bytes_per_us for key in wide)
    return sum(_time_us(graph, number) - _time_us(small, number) for number in once) > lost


def _bytes(graph: OpGraph, key: Key) -> int:
    value = graph.constants.get(key)
    dtype = numpy_dtype(known(graph.dtype(key))) if value is None else value.dtype
    return math.prod(known(graph.shape(key) if value is None else value.shape)) * dtype.itemsize


def _time_us(graph: OpGraph, number: int) -> float:
    """The time of an op beyond its launch, by a data sheet."""
    op, sheet = graph.ops[number], data_sheet(DEFAULT_GPU)
    if op.op in _RESHAPES:
        return 0.0
    shapes = [graph.shape(key) if key not in graph.constants else graph.constants[key].shape for key in op.inputs]
    sizes = [float(_bytes(graph, key)) for key in op.inputs]
    node = Node(op.op, op.attrs, [*shapes], [None] * len(shapes), [None] * len(shapes))
    made = work(Case(node, (graph.shape(op.out),), sheet.sms, sizes))
    taken = 0.0
    if made is not None:  # a product of one row has other waits than one of many
        taken = (made.setup + made.chain) / sheet.clock_mhz
        taken += made.flops / sheet.flops_per_us(known(graph.dtype(op.out)), made.product)
    return taken + (sum(sizes) + sum(_bytes(graph, key) for key in outputs(graph, number))) / sheet.bytes_per_us


def pays_to_split(graph: OpGraph, op: Op, width: int, *, alone: bool) -> bool:
    """True if a product takes longer, by a data sheet, for so much of each row than the kernel that a product of one row adds: none, where
    the rest of the rows lies `alone`, and nothing is joined any more."""
    sheet, size = data_sheet(DEFAULT_GPU), numpy_dtype(known(graph.dtype(op.out))).itemsize
    rows, columns = known(graph.shape(op.out))
    flops = 2.0 * rows * width * columns / sheet.flops_per_us(known(graph.dtype(op.out)), product=True)
    return alone or flops + 3.0 * rows * width * size / sheet.bytes_per_us > sheet.launch_us


def equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """True if two constants are."""
    return one is other or np.array_equal(one, other)
