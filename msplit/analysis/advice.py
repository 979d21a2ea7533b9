"""Advice about a graph: kernels whose cost is a guess, and the shipped rule set that fits.

Kernels whose cost is a guess because shapes are unknown, and whether the user could tell those.

Which values of unknown shape are dense all the same: the cuda engine proves it before it runs, and nothing of them is a guess to it.

What `tf.feature_column` makes of a bucketized column is a sparse tensor's life (`Where`, `SparseFillEmptyRows`, `Unique`,
`SparseSegmentMean`), whose shapes depend on values as far as shape inference can see. But every row has its ids: buckets are never
negative, and the coordinates are made of constants and shapes. This finds that pattern in one pass over the graph, without the arrays
that the engine's own proof works on (`engines.cuda.passes.embedding`, which knows more); tests hold the two together.

Which shipped rule set fits a graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.embeddings import Column
from msplit.core.graph import CONTROL, Graph, Ints, TensorValue
from msplit.cost.costs import Costs
from msplit.errors import LoadError
from msplit.flatten.flat import FlatGraph
from msplit.formats.stablehlo import CALL_MODULE, left_whole
from msplit.opset.traits import VARIABLES, ops_with
from msplit.shapes import Shapes
from msplit.shapes.registry import known

Mask = NDArray[np.bool_]

_SHAPE_OF = ops_with("shape of")
_PASS = ops_with("keeps coordinates")
_GATHERS = (ops_with("gather") | ops_with("gather nd")) - ops_with("reads by handle")
_NOT_NEGATIVE = ops_with("not negative")
_BY_VALUE, _FOLLOWING = ops_with("dynamic"), ops_with("dense if its input is")
_LOWER_BOUNDS = ops_with("lower bound")


def proved(graph: Graph, shapes: Shapes) -> Mask:
    """Per node, whether its shapes are known or proved dense. Linear."""
    fixed, positive = _fixed(graph), _not_negative(graph)
    ops, outputs = graph.ops, shapes.outputs
    result = [False] * len(graph)
    grid = fixed.tolist()  # coordinates that no value decides: fixed, or all of the fixed ones taken in order
    for node in graph.topological.tolist():
        if all(known(shape) for shape in outputs[node]):
            result[node] = True
            continue
        sources = [source for source, _ in graph.inputs(node)]
        op = ops[node]
        if not sources or not all(result[source] for source in sources):
            continue
        if op == "Where":
            result[node] = grid[node] = _always(graph, sources[0], positive)
        elif op in _GATHERS:
            result[node] = True
            grid[node] = all(grid[source] for source in sources)
        elif op in _PASS:
            result[node] = True
            grid[node] = grid[sources[0]]
        elif op == "SparseFillEmptyRows":
            result[node] = grid[node] = grid[sources[0]]
        elif op not in _BY_VALUE or op in _FOLLOWING:
            # It hands on what it is given, unless it makes a shape up by itself.
            result[node] = any(not known(shapes.shape(source, port)) for source, port in graph.inputs(node))
    return np.asarray(result, np.bool_)


def _fixed(graph: Graph) -> Mask:
    """Nodes that are made of constants and of shapes only."""
    edges = graph.edges
    result = np.zeros(len(graph), np.bool_)
    for node in graph.topological.tolist():
        op = graph.ops[node]
        if op in _SHAPE_OF:
            result[node] = True
            continue
        first, last = int(graph.in_start[node]), int(graph.in_start[node + 1])
        data = [int(edges.src[edge]) for edge in range(first, last) if edges.port[edge] != CONTROL]
        result[node] = op == "Const" or (bool(data) and all(result[source] for source in data))
    return result


def _not_negative(graph: Graph) -> Mask:
    """Nodes whose elements are integers of at least 0, whatever is fed."""
    result = np.zeros(len(graph), np.bool_)
    for node in graph.topological.tolist():
        op = graph.ops[node]
        sources = [source for source, _ in graph.inputs(node)]
        if op == "Const":
            constant = _constant(graph, node)
            result[node] = constant is not None and bool((constant >= 0).all())
        elif op in _PASS or op in _GATHERS:
            result[node] = bool(sources) and result[sources[0]]
        elif op in _NOT_NEGATIVE:
            result[node] = bool(sources) and all(result[source] for source in sources)
        else:
            result[node] = op == "Bucketize" or op in _SHAPE_OF
    return result


def _constant(graph: Graph, node: int) -> NDArray[Any] | None:
    """The elements of a small constant of integers; weights are not decoded."""
    value = graph.attrs[node].get("value")
    if graph.ops[node] != "Const" or not isinstance(value, TensorValue) or "int" not in value.dtype:
        return None
    if not 0 < math.prod(value.shape) <= _SMALL:
        return None
    try:
        return value.load()
    except LoadError:  # a damaged file may have anything in its place
        return None


_SMALL = 4096
"""Elements of a constant that is looked at."""


def _always(graph: Graph, node: int, positive: Mask) -> bool:
    """True if a condition is true for every element, whatever is fed."""
    waiting = [node]
    while waiting:
        at = waiting.pop()
        op, sources = graph.ops[at], [source for source, _ in graph.inputs(at)]
        if op == "LogicalAnd" or op in _PASS:
            waiting += sources if op == "LogicalAnd" else sources[:1]
        elif op in _LOWER_BOUNDS and len(sources) == 2 and positive[sources[0]]:
            limit = _constant(graph, sources[1])
            if limit is None or not bool((limit <= 0 if op == "GreaterEqual" else limit < 0).all()):
                return False
        else:
            return False
    return True


@dataclass(frozen=True, eq=False)
class Guesses:
    """Kernels of unknown shape.

    Attributes:
        nodes: These kernels, ascending.
        kernels: All kernels of the graph.
        ops: Ops of `nodes` by number, most first.
        dense: Further kernels whose shapes depend on values as far as shape inference can see; the cuda engine proves them dense, and
            they are no guess to it.
        inputs: Inputs of the model whose shapes are not known in full and that such a kernel depends on: the shapes that would help.
            Where there are none, the shapes depend on values.
        whole: Why a module that JAX wrote is one of them, and is not looked into; "" where none is.
    """

    nodes: Ints
    kernels: int
    ops: Mapping[str, int]
    dense: int
    inputs: tuple[str, ...]
    whole: str = ""

    @property
    def share(self) -> float:
        """Share of the kernels."""
        return len(self.nodes) / self.kernels if self.kernels else 0.0

    @property
    def mend(self) -> str:
        """Advice to the user on missing shapes, as a sentence."""
        if self.whole:
            return f"What JAX wrote is not looked into: {self.whole}."
        if not self.inputs:
            return "No option settles it: the shapes depend on values, or on ops that nothing is known of."
        named = ", ".join(f"--shape {name}=…" for name in self.inputs[:3])
        return f"{named}{' and so on' if len(self.inputs) > 3 else ''} may settle it."


def guesses(flat: FlatGraph, costs: Costs, shapes: Shapes) -> Guesses:
    """Finds the kernels whose cost is a guess. Linear."""
    launches = (costs.time_us > 0) & ~flat.host
    unknown = np.flatnonzero(launches & ~costs.known).astype(np.int32)
    settled = proved(flat.graph, shapes) if len(unknown) else np.zeros(len(flat), np.bool_)
    nodes = np.asarray([node for node in unknown.tolist() if not _settled(flat, node, settled)], np.int32)
    ops = flat.graph.ops
    return Guesses(
        nodes=nodes,
        kernels=int(np.count_nonzero(launches)),
        ops=dict(Counter(ops[node] for node in nodes.tolist()).most_common()),
        dense=len(unknown) - len(nodes),
        inputs=_open_inputs(flat, shapes, nodes) if len(nodes) else (),
        whole=next((left_whole(flat.graph.attrs[node]) for node in nodes.tolist() if ops[node] == CALL_MODULE), ""),
    )


def _settled(flat: FlatGraph, node: int, settled: NDArray[np.bool_]) -> bool:
    """True if a kernel's own shapes and those of what it reads are proved."""
    return bool(settled[node]) and all(settled[source] for source, _ in flat.graph.inputs(node))


def _open_inputs(flat: FlatGraph, shapes: Shapes, nodes: Ints) -> tuple[str, ...]:
    """Inputs of unknown shape in front of some nodes."""
    reached = flat.graph.ancestors(nodes.tolist())
    return tuple(
        tensor.name.removesuffix(":0")
        for tensor in flat.inputs
        if reached[tensor.node] and not known(shapes.shape(tensor.node, tensor.port))
    )


_SHARE = 0.25
_MOST = 0.5
_VISION, _PRODUCTS = ops_with("vision"), ops_with("product")
_WEIGHTS = VARIABLES | {"Const"}
_READS = ops_with("reads weights")
_STEPS = 8


@dataclass(frozen=True)
class Suggestion:
    """The shipped rule set that fits a graph, and why. Whether streams help it at all is for `msplit.schedule.judge` to say."""

    rule_set: str
    why: str


def suggest(flat: FlatGraph, costs: Costs, columns: tuple[Column, ...]) -> Suggestion:
    """Chooses a rule set by what takes the time."""
    times = np.where(flat.host, 0.0, costs.time_us)
    work = float(times.sum())
    if work <= 0:
        return Suggestion("default", "No node launches a kernel.")
    lookups = sum(column.time_us for column in columns)
    if len(columns) > 1 and lookups >= _SHARE * work:
        return Suggestion("recsys", f"{len(columns)} embedding columns take {100 * lookups / work:.0f} % of the work.")
    ops = flat.graph.ops
    convolutions = sum(time for op, time in zip(ops, times.tolist(), strict=True) if op in _VISION)
    if convolutions >= _SHARE * work:
        return Suggestion("vision", f"Convolutions take {100 * convolutions / work:.0f} % of the work.")
    steps = _unrolled(flat)
    if steps:
        why = f"Most products share their weights with others, up to {steps} times: a recurrent network unrolled over time."
        return Suggestion("rnn", why)
    return Suggestion("default", "No kind of model stands out; the default rule set spreads all branches.")


def _unrolled(flat: FlatGraph) -> int:
    """The most products that use one weight, if most products share theirs with at least `_STEPS`; otherwise 0."""
    graph = flat.graph
    weight_of: dict[int, int] = {}
    users: Counter[int] = Counter()
    products = 0
    for node in graph.topological.tolist():
        op = graph.ops[node]
        if op in _WEIGHTS:
            weight_of[node] = node
        elif op in _READS:
            producer = next(iter(graph.inputs(node)), (-1, 0))[0]
            if producer in weight_of:
                weight_of[node] = weight_of[producer]
        elif op in _PRODUCTS:
            products += 1
            for producer, _ in graph.inputs(node)[1:2]:
                if producer in weight_of:
                    users[weight_of[producer]] += 1
    often = [count for count in users.values() if count >= _STEPS]
    return max(often) if products and sum(often) >= _MOST * products else 0
