"""Shape inference: the pass over a graph, shapes of what is fed, and trip counts of loops.

Shape inference over a flat graph: one pass in topological order, functional loops and branches included.

Shapes of what is fed: from the file, `--batch` and `--shape`.

How often a loop runs whose condition is `counter < limit`, or several of these joined by "and".

The counter starts at a known value and the body adds a known amount to it; the limit is known and the loop does not change it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from msplit.core.arguments import whole
from msplit.core.graph import Floats, Function, Graph
from msplit.errors import MsplitError
from msplit.flatten.control_flow import all_frames
from msplit.flatten.flat import FlatGraph, Tensor
from msplit.formats.endpoints import behind
from msplit.formats.tensors import fits
from msplit.opset.traits import ADD, ENTER, MERGE, PLACEHOLDERS
from msplit.shapes.registry import (
    MAX_SIZE,
    Shape,
    Sizes,
    Value,
    join,
    known,
    merge,
    plain_shape,
    shape_text,
)
from msplit.shapes.result import InferenceState, Result, Shapes, key_of
from msplit.shapes.values import FILLED, missing
from msplit.shapes.walk import run

Fed = dict[tuple[int, int], Shape]
"""Shape by (node, port)."""


def input_shapes(flat: FlatGraph, batch: int | None, shapes: Mapping[str, Sizes]) -> tuple[Fed, list[str]]:
    """The shape of every input, and what was assumed about them.

    Raises:
        MsplitError: An input that does not exist, a shape that contradicts the graph's, a batch below 1.
    """
    if batch is not None:
        batch = whole("the batch", batch)
    given = _by_input(flat, shapes)
    all_stated = stated_shapes(flat)
    fed: Fed = {}
    assumed: list[str] = []
    unknown: list[str] = []
    ones: list[str] = []
    takes_batch = False
    for tensor in flat.inputs:
        stated = all_stated[tensor.name]
        takes_batch = takes_batch or tensor.name in given or not known(stated)
        if tensor.name in given:
            fed[tensor.node, tensor.port] = _checked(tensor, stated, given[tensor.name])
            continue
        if stated is not None and None in stated:
            axis = stated.index(None)
            stated = (*stated[:axis], 1 if batch is None else batch, *stated[axis + 1 :])
            if batch is None:
                ones.append(tensor.name)
        if not known(stated):
            unknown.append(tensor.name)
        if stated is not None:
            fed[tensor.node, tensor.port] = stated
    if ones:
        assumed.append(f"the batch of {_listed(ones)} is not in the file: 1 was taken (--batch N says another)")
    if unknown:
        example = unknown[0]
        assumed.append(f"the shape of {_listed(unknown)} is not known in full (--shape {example}=1,128 says it)")
    if batch is not None and flat.inputs and not takes_batch:
        assumed.append(f"no input has an unknown dimension: the batch of {batch} changed nothing")
    return fed, assumed


def stated_shapes(flat: FlatGraph) -> dict[str, Shape]:
    """The shape of every input as the file has it, by name."""
    endpoints = {endpoint.name: endpoint.shape for endpoint in flat.model.inputs}
    return {tensor.name: merge(_attribute(flat, tensor), endpoints.get(tensor.name)) for tensor in flat.inputs}


def _by_input(flat: FlatGraph, shapes: Mapping[str, Sizes]) -> dict[str, Sizes]:
    """The given shapes by the name of the input, whichever of its names the user wrote."""
    names: dict[str, str] = {}
    for tensor in flat.inputs:
        node = flat.graph.names[tensor.node]
        for alias in (f"{node}:{tensor.port}", node, f"{tensor.name}:{tensor.port}", tensor.name):
            names[alias] = tensor.name
    result: dict[str, Sizes] = {}
    for name, shape in shapes.items():
        if name not in names:
            listed = ", ".join(tensor.name for tensor in flat.inputs) or "none"
            raise MsplitError(
                f"there is no input called {name!r}",
                where=str(flat.model.source),
                fix=f"name one of the inputs: {listed}",
            )
        sizes = shape if isinstance(shape, tuple | list) else (shape,)
        result[names[name]] = tuple(
            None if size is None else whole(f"a size of input {name!r}", size, -MAX_SIZE, MAX_SIZE) for size in sizes
        )
    return result


def _attribute(flat: FlatGraph, tensor: Tensor) -> Shape:
    if flat.graph.ops[tensor.node] not in PLACEHOLDERS:
        return None
    attrs = flat.graph.attrs[tensor.node]
    hints = attrs.get("_output_shapes")
    return merge(plain_shape(attrs.get("shape")), plain_shape(hints[0]) if isinstance(hints, tuple) and hints else None)


def _checked(tensor: Tensor, stated: Shape, given: Sizes) -> Shape:
    if any((size or 0) < 0 for size in given):
        raise MsplitError(
            f"input {tensor.name!r} is given the shape {shape_text(given)}, which has a negative size",
            fix="write sizes of at least 0",
        )
    if stated is None:
        return given
    if not fits(given, stated):
        raise MsplitError(
            f"input {tensor.name!r} has the shape {shape_text(stated)} in the graph and is given {shape_text(given)}",
            fix=f"give {len(stated)} sizes that agree with it, where ? may be anything",
        )
    return merge(given, stated)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


IDENTITY = ("Identity",)
TensorId = tuple[int, int]
"""A node and a port."""

MOST_RUNS = 1e12
"""Runs of a node that are believed: loops inside loops inside loops could be more than a number holds."""

Counted = Callable[[TensorId, TensorId], "int | None"]
"""From the two tensors that a comparison compares: the trips until the first is no longer less than the second."""


def trip_count(graph: Graph, condition: TensorId, counted: Counted) -> int | None:
    """Trip count of a loop, how often its body runs, by the condition on which it goes on and the trips of one comparison.

    None where it is not known: one side of an "and" that is not understood may end the loop sooner.
    """
    waiting, seen = [condition], set[TensorId]()
    found: list[int] = []
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        op, sources = graph.ops[place[0]], graph.inputs(place[0])
        if op in ("Identity", "LogicalAnd"):
            waiting += sources
        elif op == "Less" and len(sources) == 2 and (count := counted(*sources)) is not None:
            found.append(count)
        else:
            return None
    return min(found, default=None)


def trips_between(start: float | None, limit: float | None, step: float | None) -> int | None:
    """Count the steps from a start until a limit is reached.

    None where one of them is not known, nothing ends the loop, or the step is a fraction: the counter is rounded then.
    """
    if start is None or limit is None or step is None or step <= 0 or step % 1 or not math.isfinite(limit - start):
        return None
    return max(0, int(-(-(limit - start) // step)))


def single(value: Value | None) -> float | None:
    """The only element of a value, if it is known; an int where the value is one of integers."""
    if value is None or value.size != 1 or missing(value).any():
        return None
    element: float = value.item()
    return element


def added(graph: Graph, result: Result, tensor: TensorId, counter: int, *passed: str) -> float | None:
    """The number that is added to a counter, a node, to give a tensor; None where that is not known, or not all that is done.

    Ops of `passed` hand the counter on, as Identity does.
    """
    place = behind(graph, tensor, IDENTITY)[0]
    sources = graph.inputs(place)
    if graph.ops[place] not in ADD or len(sources) != 2:
        return None
    others = [source for source in sources if behind(graph, source, ("Identity", *passed))[0] != counter]
    return number(graph, result, others[0]) if len(others) == 1 else None


def number(graph: Graph, result: Result, tensor: TensorId) -> float | None:
    """A tensor's only element, if it is known."""
    return single(result.value(key_of(*behind(graph, tensor, IDENTITY))))


def runs_in_loops(flat: FlatGraph, result: Result) -> Floats | None:
    """Runs of each node in a step because of the loops of TensorFlow 1 that it is in.

    That is the product of the trip counts of the loops around it, NaN where one of them is not known. None: each node runs once.
    """
    graph = flat.graph
    looped = np.array([region.kind == "loop" for region in flat.regions] + [False], dtype=np.bool_)[flat.region]
    frames = all_frames(graph)
    if len(frames.parent) == 1 and not looped.any():
        return None
    goes_back = dict(zip(flat.back_edges.dst.tolist(), flat.back_edges.src.tolist(), strict=True))
    runs = np.full(len(frames.parent), np.nan)
    runs[0] = 1.0
    for node, frame in frames.inside.items():
        if graph.ops[node] == "LoopCond" and (inputs := graph.inputs(node)):
            count = trip_count(graph, inputs[0], functools.partial(_counted, graph, result, goes_back))
            runs[frame] = np.nan if count is None else count
    for frame in range(1, len(runs)):
        runs[frame] = min(runs[frame] * runs[frames.parent[frame]], MOST_RUNS)
    # What shares a variable with a loop stays with it, and a damaged one has no frame: what is in a frame is told below.
    found: Floats = np.where(looped, np.nan, 1.0)
    for node, frame in frames.inside.items():
        found[node] = runs[frame]
    return found


def _counted(
    graph: Graph, result: Result, goes_back: Mapping[int, int], counter: TensorId, limit: TensorId
) -> int | None:
    """Trip count of a frame whose condition compares a Merge, which is the counter, with what does not change."""
    merge = behind(graph, counter, IDENTITY)[0]
    back = graph.inputs(goes_back[merge]) if merge in goes_back else []
    begins = behind(graph, counter, ENTER | MERGE | {"Identity"})
    if graph.ops[merge] != "Merge" or not back:
        return None
    # Inside of the loop the counter comes out of the Switch behind its Merge.
    step = added(graph, result, back[0], merge, "Switch")
    return trips_between(number(graph, result, begins), number(graph, result, limit), step)


MAX_PASSES = 3
"""Passes over a graph whose loops change the shapes of what they carry; afterwards those shapes count as unknown."""


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
    """As `infer`, with all that was found on the way, known values above all; and what was taken for granted.

    Raises:
        MsplitError: As `infer`.
    """
    fed, assumed = input_shapes(flat, batch, shapes or {})
    graph = flat.graph
    back = flat.back_edges
    overrides: dict[tuple[int, int], Shape] = dict(fed)
    result = run(graph, InferenceState(graph.functions), overrides)
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
        result = run(graph, InferenceState(graph.functions), overrides)
    return result, assumed


def _finish(graph: Graph, result: Result, done: dict[int, Shapes], function: Function | None = None) -> Shapes:
    """The shapes of a graph and of all bodies inside it; a body that stands in several places is finished once."""
    if id(result) in done:
        return done[id(result)]
    folded = np.zeros(len(graph), dtype=np.bool_)
    ops = graph.ops
    # Ones like a value that is not known, and what is made of them, are known, too. TensorFlow computes them nevertheless.
    written = set[int]()
    for key, value in result.values.items():
        if not isinstance(key, int) or ops[key] == "Const":
            continue
        if ops[key] in FILLED or written:
            made_of = [node for node, _ in graph.inputs(key)]
            if not written.isdisjoint(made_of) or (ops[key] in FILLED and made_of[0] not in result.values):
                written.add(key)
        folded[key] = key not in written and not missing(value).any()
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
