"""Loops of TensorFlow 1, and those that freezing a TensorFlow 2 model makes of them, as a `While`.

A frame is Enter, Merge, Switch, NextIteration and Exit per loop variable around one LoopCond (the white paper "Implementation of Control
Flow in TensorFlow", 2017). What LoopCond needs of the Merges is the cond, what the NextIterations need of the Switches is the body. What a
body pushes onto stacks belongs to it too, although nothing in it reads that: the loop of its gradient pops it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msplit.core.graph import FunctionRef, Graph
from msplit.engines.cuda.frontend.functionalize_cond import IN_A_BRANCH, raise_conds
from msplit.engines.cuda.frontend.rewire import Changes, rewired
from msplit.engines.cuda.ir.functions import FRAME, Bodies, Body, body_of
from msplit.engines.cuda.ir.graph import Key
from msplit.errors import LoadError
from msplit.flatten.control_flow import all_frames
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import written


@dataclass(frozen=True, eq=False)
class _Loop:
    """One frame.

    Attributes:
        node: The Exit that becomes the `While`.
        frame: The frame's name.
        exits: Exit -> number of its loop variable.
        inputs: What the loop variables begin with, and then what the frame reads of the outside.
    """

    node: int
    frame: str
    exits: Mapping[int, int]
    inputs: Sequence[Key]
    cond: Body
    body: Body


@dataclass(frozen=True, eq=False)
class Raised:
    """A graph with TensorFlow 1's loops and conds as nodes of op `While` and `If`.

    Attributes:
        bodies: The functions of the model and of those nodes.
        origin: Output of a loop -> the value that it is in the graph as it was.
        frames: Node that a loop has become -> the nodes whose work it does: its frame's, and those of frames inside of that.
    """

    flat: FlatGraph
    bodies: Bodies
    origin: Mapping[Key, Key]
    frames: Mapping[int, tuple[int, ...]]


def raise_control(flat: FlatGraph) -> Raised:
    """Raises loops and conds to nodes. Nodes keep their numbers. A damaged graph that would have cycles then is left as it is."""
    made = raise_loops(*raise_conds(flat))
    if made.flat is not flat and len(made.flat.graph.topological) < len(made.flat.graph):
        return Raised(flat, Bodies(flat.model), {}, {})
    return made


def raise_loops(flat: FlatGraph, given: Mapping[str, Body]) -> Raised:
    """The graph with each frame as one node of op `While`, their functions beside those that are given.

    An Exit of the frame becomes the `While`, and what is inside of the frame is not needed any more. Frames inside of frames come first.
    What is no loop as TensorFlow makes them stays as it is.
    """
    if "LoopCond" not in flat.graph.ops:
        return Raised(flat, Bodies(flat.model, given), {}, {})
    bodies = dict(given)
    origin: dict[Key, Key] = {}
    inside: dict[int, tuple[int, ...]] = {}
    for frames in _by_depth(flat.graph):
        changes = Changes()
        for nodes, writes in frames:
            loop = _loop(flat, nodes, writes)
            if loop is None:
                continue
            name = flat.graph.names[loop.node]
            bodies |= {f"{name}/cond": loop.cond, f"{name}/body": loop.body}
            own = {op.node for function in (loop.cond, loop.body) for op in function.ops}
            inside[loop.node] = tuple(sorted(own.union(*(inside[node] for node in own if node in inside))))
            changes.ops[loop.node] = "While"
            functions = {"cond": FunctionRef(f"{name}/cond"), "body": FunctionRef(f"{name}/body")}
            changes.attrs[loop.node] = {**functions, FRAME: loop.frame}
            changes.inputs[loop.node] = loop.inputs
            changes.stateful[loop.node] = bool(writes)
            for node, number in loop.exits.items():
                if node != loop.node:
                    changes.stands_for[node, 0] = (loop.node, number)
                    origin[loop.node, number] = (node, 0)
        flat = rewired(flat, changes)
    return Raised(flat, Bodies(flat.model, bodies), origin, inside)


def _by_depth(graph: Graph) -> list[list[tuple[list[int], list[int]]]]:
    """The nodes of each frame, without those of frames inside of it, and what in all of these writes variables; deepest frames first."""
    found = all_frames(graph)
    members: list[tuple[list[int], list[int]]] = [([], []) for _ in found.parent]
    for node, frame in found.inside.items():
        members[frame][0].append(node)
        while frame and written(graph.ops[node].removesuffix(IN_A_BRANCH)):
            members[frame][1].append(node)
            frame = found.parent[frame]
    levels: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(max(found.depth))]
    for nodes, depth in zip(members[1:], found.depth[1:], strict=True):
        levels[-depth].append(nodes)
    return levels


def _loop(flat: FlatGraph, nodes: Sequence[int], writes: Sequence[int]) -> _Loop | None:
    """The loop that the nodes of a frame are; None where they are none that is known. Writes are told, they do not run."""
    graph = flat.graph
    of_op: dict[str, list[int]] = {}
    for node in nodes:
        of_op.setdefault(graph.ops[node].removeprefix("Ref"), []).append(node)
    enters, exits, conditions = of_op.get("Enter", []), of_op.get("Exit", []), of_op.get("LoopCond", [])
    if len(conditions) != 1 or not exits or not all(map(graph.inputs, [*enters, *exits, *conditions])):
        return None
    # A loop variable is an Enter, a Merge that something comes back to, a Switch and, where it is read behind the loop, an Exit.
    goes_back = dict(zip(flat.back_edges.dst.tolist(), flat.back_edges.src.tolist(), strict=True))
    begins: dict[int, int] = {}  # Merge -> its Enter
    for merge in of_op.get("Merge", []):
        sources = graph.inputs(merge)
        if len(sources) == 1 and sources[0][0] in enters and merge in goes_back and graph.inputs(goes_back[merge]):
            begins[merge] = sources[0][0]
    decided: dict[int, int] = {}  # Switch -> its Merge
    for switch in of_op.get("Switch", []):
        read = [node for node, _ in graph.inputs(switch)]
        if len(read) == 2 and read[1] == conditions[0] and read[0] in begins:
            decided[switch] = read[0]
    left = {node: decided.get(graph.inputs(node)[0][0]) for node in exits}  # Exit -> its Merge
    first = min([node for node in exits if not flat.host[node]] or exits)
    if None in left.values():
        return None
    # The loop variable of the Exit that stands for the loop comes first: its output keeps its number.
    variables = sorted(begins, key=lambda merge: (merge != left[first], merge))
    order = {merge: number for number, merge in enumerate(variables)}
    # What is read of the outside goes through every turn as it is. A variable that no Switch hands on has no value in a turn.
    outside = sorted(set(enters) - set(begins.values()))
    passed: list[Key] = [(node, 0) for node in outside]
    turns: list[Key] = [(-1 - number, 0) for number in range(len(order))]
    for switch, merge in decided.items():
        turns[order[merge]] = (switch, 1)
    results = [graph.inputs(goes_back[merge])[0] for merge in variables]
    try:
        cond = body_of(flat, [*((merge, 0) for merge in variables), *passed], graph.inputs(conditions[0])[:1])
        body = body_of(flat, [*turns, *passed], [*results, *passed], effects=of_op.get("StackPushV2", []))
    except LoadError:  # of a constant in it
        return None
    inputs = [graph.inputs(node)[0] for node in [*(begins[merge] for merge in variables), *outside]]
    told = [(graph.ops[node].removesuffix(IN_A_BRANCH), graph.names[node]) for node in writes]
    body = replace(body, every_op=[*body.every_op, *told])
    frame = str(graph.attrs[enters[0]].get("frame_name", ""))
    exits_of = {node: order[merge] for node, merge in left.items() if merge is not None}
    return _Loop(first, frame, exits_of, inputs, cond, body)
