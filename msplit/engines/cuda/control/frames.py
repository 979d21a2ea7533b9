"""Loops of TensorFlow 1, and those that freezing a TensorFlow 2 model makes of them, as a `While`.

A frame is Enter, Merge, Switch, NextIteration and Exit per loop variable around one LoopCond (the white paper "Implementation of Control
Flow in TensorFlow", 2017). What LoopCond needs of the Merges is the cond, what the NextIterations need of the Switches is the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from msplit.engines.cuda.control.bodies import Bodies, Body, body_of
from msplit.engines.cuda.control.conds import raise_conds
from msplit.engines.cuda.control.rewire import Changes, rewired
from msplit.engines.cuda.program import Key
from msplit.flatten.control_flow import frames
from msplit.flatten.flat import FlatGraph
from msplit.graph import FunctionRef


@dataclass(frozen=True, eq=False)
class _Loop:
    """One frame.

    Attributes:
        node: The Exit that becomes the `While`.
        exits: Exit -> number of its loop variable.
        inputs: What the loop variables begin with, and then what the frame reads of the outside.
        cond, body: Its functions.
    """

    node: int
    exits: Mapping[int, int]
    inputs: Sequence[Key]
    cond: Body
    body: Body


def raise_control(flat: FlatGraph) -> tuple[FlatGraph, Bodies]:
    """The graph with TensorFlow 1's loops and conds as nodes of op `While` and `If`, and the functions of the model and of those."""
    flat, choices = raise_conds(flat)
    flat, bodies = raise_loops(flat)
    return flat, Bodies(flat.model, {**choices, **bodies})


def raise_loops(flat: FlatGraph) -> tuple[FlatGraph, Mapping[str, Body]]:
    """The graph with each frame as one node of op `While`, and the functions of those.

    An Exit of the frame becomes the `While`, and what is inside of the frame is not needed any more. A frame with another one inside
    stays as it is.
    """
    if "LoopCond" not in flat.graph.ops:
        return flat, {}
    nested = frames(flat.graph)
    members: dict[int, list[int]] = {}
    for node in np.flatnonzero(nested.outermost >= 0).tolist():
        members.setdefault(int(nested.outermost[node]), []).append(node)
    bodies: dict[str, Body] = {}
    changes = Changes()
    for nodes in members.values():
        loop = _loop(flat, nodes)
        if loop is None:
            continue
        name = flat.graph.names[loop.node]
        bodies |= {f"{name}/cond": loop.cond, f"{name}/body": loop.body}
        changes.ops[loop.node] = "While"
        changes.attrs[loop.node] = {"cond": FunctionRef(f"{name}/cond"), "body": FunctionRef(f"{name}/body")}
        changes.inputs[loop.node] = loop.inputs
        for node, number in loop.exits.items():
            if (node, 0) != (loop.node, number):
                changes.stands_for[node, 0] = (loop.node, number)
    return rewired(flat, changes), bodies


def _loop(flat: FlatGraph, nodes: Sequence[int]) -> _Loop | None:
    """The loop that the nodes of a frame are; None where they are more than one, or none that is known."""
    graph = flat.graph
    of_op: dict[str, list[int]] = {}
    for node in nodes:
        of_op.setdefault(graph.ops[node].removeprefix("Ref"), []).append(node)
    enters, exits = of_op.get("Enter", []), of_op.get("Exit", [])
    names = {graph.attrs[node].get("frame_name") for node in enters}
    if len(names) != 1 or len(of_op.get("LoopCond", [])) != 1 or not exits:
        return None
    (condition,) = of_op["LoopCond"]
    goes_back = dict(zip(flat.back_edges.dst.tolist(), flat.back_edges.src.tolist(), strict=True))
    begins = {}  # Merge -> its Enter
    for merge in of_op.get("Merge", []):
        sources = graph.inputs(merge)
        if merge in goes_back and len(sources) == 1 and sources[0][0] in enters:
            begins[merge] = sources[0][0]
    on_gpu = [node for node in exits if not flat.host[node]]
    first = min(on_gpu or exits)
    # Its loop variable is the first, so that its output is the first one too, as it was.
    leads = graph.inputs(graph.inputs(first)[0][0])[0][0]
    begins = {merge: begins[merge] for merge in sorted(begins, key=lambda merge: (merge != leads, merge))}
    order = {merge: number for number, merge in enumerate(begins)}
    switches: dict[int, int] = {}  # number of the loop variable -> its Switch
    for switch in of_op.get("Switch", []):
        data, decides = graph.inputs(switch)
        if decides[0] == condition and data[0] in order:
            switches[order[data[0]]] = switch
    numbers = {switch: number for number, switch in switches.items()}
    left = {node: numbers.get(graph.inputs(node)[0][0]) for node in exits}
    if None in left.values() or left[first] != 0:
        return None
    outside = [node for node in enters if node not in begins.values()]
    passed: list[Key] = [(node, 0) for node in outside]
    turns = [(switches[number], 1) if number in switches else (-1 - number, 0) for number in range(len(order))]
    results = [graph.inputs(goes_back[merge])[0] for merge in order]
    cond = body_of(flat, [*((merge, 0) for merge in order), *passed], graph.inputs(condition)[:1], nodes)
    body = body_of(flat, [*turns, *passed], [*results, *passed], nodes)
    inputs = [graph.inputs(node)[0] for node in [*begins.values(), *outside]]
    return _Loop(first, {node: number for node, number in left.items() if number is not None}, inputs, cond, body)
