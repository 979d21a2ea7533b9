"""Loops, conds and calls as functional ops, and the ops that they run.

Control flow of TensorFlow 1 as functional ops, `If` and `While`; and what these run, known before anything runs.

Ops that loops, conds and calls run, known before anything runs.

Conds of TensorFlow 1, and those that freezing a TensorFlow 2 model makes of them, as an `If` per Merge.

A Switch hands its data on, to both branches; a Merge chooses between what they give. Where the predicate is a constant, such as
an `is_training` that nobody feeds, the Merge is what the branch that is taken gives, and nothing of the other one is needed.

Loops of TensorFlow 1, and those that freezing a TensorFlow 2 model makes of them, as a `While`.

A frame is Enter, Merge, Switch, NextIteration and Exit per loop variable around one LoopCond (the white paper "Implementation of Control
Flow in TensorFlow", 2017). What LoopCond needs of the Merges is the cond, what the NextIterations need of the Switches is the body. What a
body pushes onto stacks belongs to it too, although nothing in it reads that: the loop of its gradient pops it.

A flat graph in which some nodes do something else. Nodes keep their numbers, so that stream ids stay theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, Edges, FunctionRef, Graph, TensorValue
from msplit.engines.cuda.frontend.tensor_lists import LISTS
from msplit.engines.cuda.ir.functions import FRAME, FUNCTIONAL, Bodies, Body, body_of, functions_of, names_all, taken
from msplit.engines.cuda.ir.graph import Key, final
from msplit.engines.cuda.ir.lowering import listed
from msplit.errors import LoadError
from msplit.flatten.control_flow import PickedAttrs, all_frames, has_effect
from msplit.flatten.flat import FlatGraph, Tensor
from msplit.formats.endpoints import behind
from msplit.opset.traits import CONDS, DRAWN_ON_DEVICE, DRAWS, FREE_OF_EFFECTS, ops_with, written


@dataclass
class Changes:
    """Changes of some nodes.

    Attributes:
        attrs: Node -> its new attributes.
        inputs: Node -> its new data inputs; it has no other inputs then.
        stands_for: Value -> what is read in its place.
        stateful: Node -> whether it has effects now, where that changes.
    """

    ops: dict[int, str] = field(default_factory=dict)
    attrs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    inputs: dict[int, Sequence[Key]] = field(default_factory=dict)
    stands_for: dict[Key, Key] = field(default_factory=dict)
    stateful: dict[int, bool] = field(default_factory=dict)

    def final(self, key: Key) -> Key:
        """The value that is read in the end in a value's place."""
        return final(self.stands_for, key)


def rewired(flat: FlatGraph, changes: Changes) -> FlatGraph:
    """The graph with the changes made. What nothing reads any more is still there, and not needed."""
    if not changes.ops and not changes.stands_for:
        return flat
    graph, edges = flat.graph, flat.graph.edges
    rows: list[tuple[int, int, int, int]] = []
    columns = (column.tolist() for column in (edges.src, edges.port, edges.dst, edges.slot))
    for source, port, target, slot in zip(*columns, strict=True):
        if target not in changes.inputs:
            read = (source, port) if port == CONTROL else changes.final((source, port))
            rows.append((*read, target, slot))
    for target, keys in changes.inputs.items():
        rows += [(*changes.final(key), target, slot) for slot, key in enumerate(keys)]
    host = flat.host.copy()
    host[list(changes.ops)] = False
    stateful = flat.stateful.copy()
    stateful[list(changes.stateful)] = list(changes.stateful.values())
    changed = Graph(
        graph.names,
        [changes.ops.get(node, op) for node, op in enumerate(graph.ops)],
        graph.devices,
        _patched(graph.attrs, changes.attrs),
        Edges.of(*zip(*rows, strict=True)) if rows else edges,
        graph.functions,
    )
    outputs = tuple(Tensor(out.name, *changes.final((out.node, out.port))) for out in flat.outputs)
    return replace(flat, graph=changed, host=host, stateful=stateful, outputs=outputs)


def _patched(attrs: Sequence[Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]]) -> PickedAttrs:
    """Attributes of nodes of which some have others."""
    which, index = np.zeros(len(attrs), np.int32), np.arange(len(attrs), dtype=np.int32)
    nodes = list(others)
    which[nodes], index[nodes] = 1, np.arange(len(nodes))
    return PickedAttrs([attrs, list(others.values())], which, index)


_BEFORE_SWITCHES = ops_with("hands on a condition")
IN_A_BRANCH = " in a branch"
"""Behind the name of an op that runs in those steps only that take the branch."""

_SWITCHES = ops_with("switch")
_NO, _YES = "Merge/no", "Merge/yes"
_CHOICE = {
    _NO: Body([(0, 0), (1, 0)], (), {}, [(0, 0)], ()),
    _YES: Body([(0, 0), (1, 0)], (), {}, [(1, 0)], ()),
}
"""Functions of two values that give one of them."""

_Branch = tuple[Key, int]
"""A predicate, and 1 for the branch that is taken where it is true."""

_NOWHERE: Set[_Branch] = frozenset()


def raise_conds(flat: FlatGraph) -> tuple[FlatGraph, Mapping[str, Body]]:
    """The graph with an `If` for each Merge of a cond, and the functions of those.

    A Merge of which it is not plain what it joins stays as it is.
    """
    if "Merge" not in flat.graph.ops:
        return flat, {}
    graph, changes = flat.graph, Changes()
    fed = {(tensor.node, tensor.port) for tensor in flat.inputs}
    fetched = {(tensor.node, tensor.port) for tensor in flat.outputs}
    inside: dict[int, Set[_Branch]] = {}  # per node the branches that it is in
    for node in graph.topological.tolist():
        op = graph.ops[node]
        around = [_around(graph, inside, edge) for edge in graph.in_edges(node)]
        found: Set[_Branch] = frozenset().union(*around)
        inputs = graph.inputs(node)
        # A Switch hands its data on to both branches; a Merge of two sides of one predicate chooses.
        if _condition(graph, node) is not None:
            changes.stands_for |= {(node, 0): inputs[0], (node, 1): inputs[0]}
        elif op == "Merge" and len(inputs) == 2:
            sides = [_around(graph, inside, edge) for edge in list(graph.in_edges(node))[:2]]
            apart = [branch for branch in sides[0] if (branch[0], 1 - branch[1]) in sides[1]]
            if len(apart) == 1 and (node, 1) not in fetched and not _reads_which(graph, node):
                ((predicate, first),) = apart
                no, yes = (inputs[1], inputs[0]) if first else (inputs[0], inputs[1])
                _choose(changes, node, predicate, no, yes, known(graph, predicate, fed))
                found = sides[0] & sides[1]
        # What draws or writes in a branch does so in those steps only that take it.
        if found:
            inside[node] = found
            if op in DRAWN_ON_DEVICE or written(op):
                taken = [_taken(graph, branch, fed) for branch in found]
                if False in taken and written(op):  # what needs it by control edges goes on without it
                    changes.ops[node], changes.inputs[node], changes.stateful[node] = "NoOp", [], False
                elif None in taken:
                    # Only the run knows which steps these are: no op is known by this name.
                    changes.ops[node] = op + IN_A_BRANCH
                    changes.stateful[node] = True
    return rewired(flat, changes), _CHOICE


def _taken(graph: Graph, branch: _Branch, fed: Set[Key]) -> bool | None:
    """True if a branch is taken; None where only the run knows."""
    predicate, side = branch
    value = known(graph, predicate, fed)
    return None if value is None else bool(value) == bool(side)


def _choose(changes: Changes, merge: int, predicate: Key, no: Key, yes: Key, value: NDArray[np.generic] | None) -> None:
    if value is not None:
        changes.stands_for[merge, 0] = yes if bool(value) else no
        return
    changes.ops[merge] = "If"
    changes.attrs[merge] = {"then_branch": FunctionRef(_YES), "else_branch": FunctionRef(_NO)}
    changes.inputs[merge] = [predicate, no, yes]


def _around(graph: Graph, inside: Mapping[int, Set[_Branch]], edge: int) -> Set[_Branch]:
    """The branches that what comes through an edge is in."""
    source, port = int(graph.edges.src[edge]), int(graph.edges.port[edge])
    found, condition = inside.get(source, _NOWHERE), _condition(graph, source) if port != CONTROL else None
    return found if condition is None else found | {(condition, port)}


def _condition(graph: Graph, node: int) -> Key | None:
    """The predicate of a cond's Switch; None for a loop's, and for all else."""
    inputs = graph.inputs(node) if graph.ops[node] in _SWITCHES else []
    if len(inputs) == 2 and graph.ops[inputs[1][0]] != "LoopCond":
        return behind(graph, inputs[1], ("Identity",))
    return None


def _reads_which(graph: Graph, merge: int) -> bool:
    """Checks if something asks which side a Merge took."""
    return any(int(graph.edges.port[edge]) == 1 for edge in graph.out_edges(merge))


def known(graph: Graph, key: Key, fed: Set[Key]) -> NDArray[np.generic] | None:
    """A value that is a constant, or the default of an input that is not fed."""
    negated = False
    while key not in fed:
        op, inputs = graph.ops[key[0]], graph.inputs(key[0])
        if op == "Const":
            value = graph.attrs[key[0]].get("value")
            if not isinstance(value, TensorValue) or value.dtype == "string":
                return None
            try:
                found = value.load()
            except LoadError:  # whoever runs it is told
                return None
            return np.logical_not(found) if negated else found
        if op not in _BEFORE_SWITCHES or not inputs:
            return None
        negated ^= op == "LogicalNot"
        key = inputs[0]
    return None


@dataclass(frozen=True)
class Within:
    """The inside of one node.

    Attributes:
        missing: Op -> names, for ops that the engine can not run.
        names: Op -> names of all nodes that it may run, those included that only effects need.
    """

    missing: Mapping[str, list[str]] = field(default_factory=dict)
    names: Mapping[str, list[str]] = field(default_factory=dict)

    def writes(self) -> list[str]:
        """Nodes that write variables."""
        return [name for op, names in self.names.items() if written(op) for name in names]

    def acts(self) -> bool:
        """Returns whether it may do anything beside giving values. What only looks and fails does not."""
        free = FREE_OF_EFFECTS | DRAWS | FUNCTIONAL
        return not self.names or any(written(op) or (has_effect(op) and op not in free) for op in self.names)


NOTHING = Within()


class Inside:
    """Insides of the nodes of a graph, given its functions."""

    def __init__(self, flat: FlatGraph, bodies: Bodies) -> None:
        self._flat = flat
        self._bodies = bodies
        self._fed = {(tensor.node, tensor.port) for tensor in flat.inputs}
        self._known: dict[int, Within] = {}

    def of(self, node: int) -> Within:
        """The inside of a node; nothing for one that is no loop, cond or call."""
        op = self._flat.graph.ops[node]
        if op not in FUNCTIONAL:
            return NOTHING
        if node not in self._known:
            self._known[node] = self._look(node, op)
        return self._known[node]

    def _look(self, node: int, op: str) -> Within:
        attrs, where = self._flat.graph.attrs[node], self._flat.graph.names[node]
        wanted = functions_of(op, attrs)
        # Functions that it needs; of a cond whose predicate is known the branch that is taken.
        missing: dict[str, list[str]] = {}
        names: dict[str, list[str]] = {}
        if not names_all(op, wanted):
            missing[op] = [where]
        elif op in CONDS and (inputs := self._flat.graph.inputs(node)):
            predicate = known(self._flat.graph, inputs[0], self._fed)
            if predicate is not None:
                wanted = [wanted[taken(op, predicate, len(wanted))]]
        # Those first that its results need; ops of others, which run for their effects only, may be missing.
        runs = LISTS.keys() | listed().keys() | {"ReadVariableOp"}
        seen: set[str] = set()
        aside: list[str] = []
        pending = [ref.name for ref in wanted]
        while pending or aside:
            needed = bool(pending)
            function = pending.pop() if needed else aside.pop()
            if function in seen:
                continue
            seen.add(function)
            body = self._bodies.of(function)
            if body is None:
                if needed:
                    missing.setdefault(op, []).append(where)
                continue
            for inner, name in body.every_op:
                names.setdefault(inner, []).append(f"{where}/{name}")
            aside += body.aside
            for piece in body.ops if needed else ():
                inside = functions_of(piece.op, piece.attrs) if piece.op in FUNCTIONAL else []
                pending += [ref.name for ref in inside]
                if not (names_all(piece.op, inside) if piece.op in FUNCTIONAL else piece.op in runs):
                    missing.setdefault(piece.op, []).append(f"{where}/{piece.name}")
        return Within(missing, names)


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
