"""Shape inference over a flat graph: one pass in topological order, functional loops and branches included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, Floats, Function, Graph
from msplit.flatten.flat import FlatGraph
from msplit.shapes.dtypes import output_dtypes
from msplit.shapes.inputs import input_shapes
from msplit.shapes.registry import Outputs, Shape, join, known
from msplit.shapes.result import Result, State
from msplit.shapes.trip_count import runs_in_loops
from msplit.shapes.values import missing
from msplit.shapes.walk import run

MAX_PASSES = 3
"""Passes over a graph whose loops change the shapes of what they carry; afterwards those shapes count as unknown."""


@dataclass(frozen=True, eq=False)
class Shapes:
    """Shapes of all tensors of a graph.

    Attributes:
        graph: The graph.
        outputs: Per node one shape per output. A shape is a tuple of sizes, None for an unknown size; None alone is an unknown rank.
        folded: Per node, whether its value is known before anything runs: shape arithmetic.
        assumed: What was taken for granted, one sentence each, such as an unknown batch size.
        bodies: For each `While`, `If`, `Case` and call: the shapes inside its functions, by node and attribute.
        trip_counts: For each `While` that counts to a limit known before it runs: how often its body runs.
        runs: Per node how often it runs in a step, by the loops of TensorFlow 1 that it is in: NaN where that is not known. None: once.
        parameters: Of a function's body the nodes that are its parameters, and ..
        results: .. those that give its results.
    """

    graph: Graph
    outputs: Sequence[Outputs]
    folded: NDArray[np.bool_]
    assumed: tuple[str, ...] = ()
    bodies: Mapping[int, Mapping[str, Shapes]] = field(default_factory=dict)
    trip_counts: Mapping[int, int] = field(default_factory=dict)
    runs: Floats | None = None
    parameters: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    def shape(self, node: int, port: int = 0) -> Shape:
        """Shape of a tensor; None where even its rank is unknown."""
        outputs = self.outputs[node]
        return outputs[port] if 0 <= port < len(outputs) else None

    def dtype(self, node: int, port: int = 0) -> str:
        """Type of a tensor as in ``"float32"``, "" where the graph does not say."""
        dtypes = output_dtypes(self.graph.ops[node], self.graph.attrs[node], port + 1)
        return dtypes[port] if 0 <= port < len(dtypes) else ""

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Per node, whether the shapes of its first output and of those that something reads are known in full."""
        verdicts: dict[int, bool] = {}
        result = np.empty(len(self.outputs), dtype=np.bool_)
        for node, outputs in enumerate(self.outputs):
            # Outputs are shared between nodes: one verdict per object spares most of the work.
            verdict = verdicts.get(id(outputs))
            if verdict is None:
                verdict = verdicts[id(outputs)] = all(known(shape) for shape in outputs)
            result[node] = verdict
        for node in np.flatnonzero(~result).tolist():
            out = self.graph.out_edges(node)
            read = set(self.graph.edges.port[out].tolist()) - {CONTROL} | {0}
            result[node] = all(known(shape) for port, shape in enumerate(self.outputs[node]) if port in read)
        return result


def infer(
    flat: FlatGraph, *, batch: int | None = None, shapes: Mapping[str, tuple[int | None, ...]] | None = None
) -> Shapes:
    """Infers the shapes of all tensors without running anything.

    Args:
        flat: The graph.
        batch: Size of the first unknown dimension of every input; 1 where it is not given, and `Shapes.assumed` says so.
        shapes: Whole shapes of inputs, by name (with or without the ``:0`` of a tensor's name).

    Returns:
        Shapes; what can not be known is None, never a guess.

    Raises:
        MsplitError: An input that does not exist, or a shape that contradicts the graph's.
    """
    result, assumed = inferred(flat, batch, shapes)
    return replace(_finish(flat.graph, result, {}), assumed=tuple(assumed), runs=runs_in_loops(flat, result))


def inferred(
    flat: FlatGraph, batch: int | None, shapes: Mapping[str, tuple[int | None, ...]] | None
) -> tuple[Result, list[str]]:
    """The same as `infer` with all that was found on the way, known values above all; and what was taken for granted.

    Raises:
        MsplitError: As `infer`.
    """
    fed, assumed = input_shapes(flat, batch, shapes or {})
    graph = flat.graph
    back = flat.back_edges
    overrides: dict[tuple[int, int], Shape] = dict(fed)
    result = run(graph, State(graph.functions), overrides)
    for attempt in range(MAX_PASSES):
        changed = False
        for src, port, dst in zip(back.src.tolist(), back.port.tolist(), back.dst.tolist(), strict=True):
            before, carried = result.shape(dst, 0), result.shape(src, port)
            joined = join(before, carried)
            if joined != before:
                overrides[dst, 0] = None if attempt == MAX_PASSES - 1 else joined
                changed = True
        if not changed:
            break
        result = run(graph, State(graph.functions), overrides)
    return result, assumed


def _finish(graph: Graph, result: Result, done: dict[int, Shapes], function: Function | None = None) -> Shapes:
    """The shapes of a graph and of all bodies inside it; a body that stands in several places is finished once."""
    if id(result) in done:
        return done[id(result)]
    folded = np.zeros(len(graph), dtype=np.bool_)
    ops = graph.ops
    for key, value in result.values.items():
        if isinstance(key, int) and ops[key] != "Const" and not missing(value).any():
            folded[key] = True
    bodies = {
        node: {name: _finish(function.body, body, done, function) for name, (function, body) in inner.items()}
        for node, inner in result.bodies.items()
    }
    parameters, results = (function.parameters, function.results) if function else ((), ())
    shapes = done[id(result)] = Shapes(
        graph,
        result.outputs,
        folded,
        bodies=bodies,
        trip_counts=result.trip_counts,
        parameters=tuple(item.node for item in parameters),
        results=tuple(item.node for item in results),
    )
    return shapes
