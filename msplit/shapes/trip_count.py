"""How often a loop runs whose condition is `counter < limit`, or several of these joined by "and".

The counter starts at a known value and the body adds a known amount to it; the limit is known and the loop does not change it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from msplit.core.graph import Floats, Graph
from msplit.flatten.control_flow import all_frames
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import ADD
from msplit.shapes.registry import Value
from msplit.shapes.result import Result, key_of
from msplit.shapes.values import missing

Tensor = tuple[int, int]
"""A node and a port."""

MOST_RUNS = 1e12
"""Runs of a node that are believed: loops inside loops inside loops could be more than a number holds."""

Counted = Callable[[Tensor, Tensor], "int | None"]
"""From the two tensors that a comparison compares: the trips until the first is no longer less than the second."""


def trip_count(graph: Graph, condition: Tensor, counted: Counted) -> int | None:
    """Trip count of a loop, how often its body runs, by the condition on which it goes on and the trips of one comparison.

    None where it is not known: one side of an "and" that is not understood may end the loop sooner.
    """
    waiting, seen = [condition], set[Tensor]()
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
    """How often a step is taken from a start until a limit is reached.

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


def added(graph: Graph, result: Result, tensor: Tensor, counter: int, *passed: str) -> float | None:
    """What is added to a counter, a node, to give a tensor; None where that is not known, or not all that is done.

    Ops of `passed` hand the counter on, as Identity does.
    """
    place = behind(graph, tensor)[0]
    sources = graph.inputs(place)
    if graph.ops[place] not in ADD or len(sources) != 2:
        return None
    others = [source for source in sources if behind(graph, source, *passed)[0] != counter]
    return number(graph, result, others[0]) if len(others) == 1 else None


def number(graph: Graph, result: Result, tensor: Tensor) -> float | None:
    """A tensor's only element, if it is known."""
    return single(result.value(key_of(*behind(graph, tensor))))


def behind(graph: Graph, tensor: Tensor, *more: str) -> Tensor:
    """What Identities, and nodes of more ops, hand on."""
    while (op := graph.ops[tensor[0]]) == "Identity" or op in more:
        inputs = graph.inputs(tensor[0])
        if not inputs:
            break
        tensor = inputs[0]
    return tensor


def runs_in_loops(flat: FlatGraph, result: Result) -> Floats | None:
    """How often each node runs in a step because of the loops of TensorFlow 1 that it is in.

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


def _counted(graph: Graph, result: Result, goes_back: Mapping[int, int], counter: Tensor, limit: Tensor) -> int | None:
    """Trip count of a frame whose condition compares a Merge, which is the counter, with what does not change."""
    merge = behind(graph, counter)[0]
    back = graph.inputs(goes_back[merge]) if merge in goes_back else []
    begins = behind(graph, counter, "Merge", "Enter")
    if graph.ops[merge] != "Merge" or not back:
        return None
    # Inside of the loop the counter comes out of the Switch behind its Merge.
    step = added(graph, result, back[0], merge, "Switch")
    return trips_between(number(graph, result, begins), number(graph, result, limit), step)
