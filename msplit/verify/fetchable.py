"""Values of a graph that can be fetched and held against another engine's, one by one, and how many can not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Graph
from msplit.engines.variables import variable_names
from msplit.flatten.control_flow import all_frames
from msplit.flatten.flat import FlatGraph
from msplit.opset import schema
from msplit.opset.traits import CONSTANTS, EXIT, MERGE, SWITCH, VARIABLES, ops_with, written

Key = tuple[int, int]
"""A node and the port of its value."""

Mask = NDArray[np.bool_]
"""A truth value per node."""

IN_LOOPS = "inside of loops"
IN_BRANCHES = "inside of branches that may not be taken"
ON_HOST = "made on the host, such as shapes and strings"
NO_NUMBERS = "strings, handles and what else is no number"
FLOWS = "flows of TensorArrays, which only put in order what reads and writes them"
REFERENCES = "references to variables, which are compared after the step"
AMBIGUOUS = (
    "what they are depends on whether a variable is read before or after it is written, and nothing settles that"
)

_FLOW = ("flow", "flow_in", "flow_out")
"""Names that TensorFlow gives to flows among the inputs and outputs of ops."""


@dataclass(frozen=True, eq=False)
class Fetchable:
    """Values that a step computes, as far as they can be compared.

    Attributes:
        keys: What outputs and targets need and can be compared, in topological order. Constants and what is fed are not among it.
        left_out: Why -> how many values can not be compared for that.
        unfetchable: Those that nobody can fetch, or that say nothing: of loops, of branches, flows, references, and the ambiguous ones.
        writers: Variable -> the nodes that write it, in topological order, where what they write does not depend on chance.
        after: Nodes that write a variable, or follow one that does. To fetch them changes variables.
    """

    keys: tuple[Key, ...]
    left_out: Mapping[str, int]
    unfetchable: frozenset[Key]
    writers: Mapping[str, tuple[int, ...]]
    after: Mask


def fetchable(flat: FlatGraph) -> Fetchable:
    """Finds them."""
    needed = _needed(flat)
    writers, unordered = _state(flat, needed)
    after = flat.graph.descendants([node for nodes in writers.values() for node in nodes])
    ambiguous = flat.graph.descendants(unordered) & after
    reasons = {key: why or (AMBIGUOUS if ambiguous[key[0]] else "") for key, why in _values(flat, needed)}
    left = Counter(why for why in reasons.values() if why)
    certain = {name: tuple(nodes) for name, nodes in writers.items() if not ambiguous[nodes].any()}
    if lost := len(writers) - len(certain):
        left[AMBIGUOUS] += lost
    keys = tuple(key for key, why in reasons.items() if not why)
    unfetchable = frozenset(key for key, why in reasons.items() if why not in ("", ON_HOST, NO_NUMBERS))
    return Fetchable(keys, dict(left), unfetchable, certain, after)


def dtype(flat: FlatGraph, key: Key) -> str:
    """The type of a value; "" where nobody knows it."""
    attrs = flat.graph.attrs[key[0]]
    found = schema.output_dtype(flat.graph.ops[key[0]], attrs, key[1]) or attrs.get("dtype")
    return found if isinstance(found, str) else ""


def is_number(flat: FlatGraph, key: Key) -> bool:
    """True if a value is an array of numbers."""
    return dtype(flat, key) not in ("", "string", "variant", "resource")


def reads_variable(flat: FlatGraph, node: int) -> bool:
    """True if a node reads a variable itself: also by way of a reference's Identity, which shows what is written later, too."""
    graph = flat.graph
    sources = graph.inputs(node)
    behind = (one for source, _ in sources if graph.ops[source] == "Identity" for one in graph.inputs(source))
    return any(_is_handle(flat, one) for one in (*sources, *behind))


def read_by(flat: FlatGraph, found: Fetchable, nodes: Iterable[int]) -> list[Key]:
    """The numbers that nodes read. In place of one that can not be fetched, those that it is made of: what the Exit of a loop reads is
    what the loop does."""
    graph, back = flat.graph, flat.back_edges
    waiting = list(nodes)
    own, keys = set(waiting), set(found.keys)
    seen, read = set(waiting), dict[Key, None]()
    for node in waiting:
        turned = [(source, 0) for source in back.src[back.dst == node].tolist()]
        for key in [*graph.inputs(node), *turned]:
            if key in keys or (node in own and key not in found.unfetchable):
                read[key] = None
            elif key in found.unfetchable and key[0] not in seen:
                seen.add(key[0])
                waiting.append(key[0])
    return [key for key in read if is_number(flat, key)]


def _needed(flat: FlatGraph) -> Mask:
    """Nodes that outputs and targets need, bodies of loops included."""
    back = flat.back_edges
    found = flat.graph.ancestors([*(tensor.node for tensor in flat.outputs), *flat.targets])
    while (more := back.src[found[back.dst] & ~found[back.src]]).size:
        found |= flat.graph.ancestors(more.tolist())
    return found


def _values(flat: FlatGraph, needed: Mask) -> Iterator[tuple[Key, str]]:
    """Values in topological order, and why each can not be fetched and compared; "" where it can."""
    graph = flat.graph
    frames = all_frames(graph)
    fed = {(tensor.node, tensor.port) for tensor in flat.inputs}
    read = set(zip(graph.edges.src.tolist(), graph.edges.port.tolist(), strict=True))
    dead, flows = set[int](), set[int]()
    given, revived = CONSTANTS | ops_with("fed"), MERGE | EXIT
    trains = any(written(op) for node, op in enumerate(graph.ops) if needed[node])
    for node in graph.topological.tolist():
        op = graph.ops[node].removeprefix("Ref")
        if op in SWITCH or (op not in revived and any(int(one) in dead for one in graph.predecessors(node))):
            dead.add(node)
        if _is_flow(graph, node, flows):
            flows.add(node)
        if not needed[node] or op in given:
            continue
        why = ""
        frame = frames.inside.get(node, 0)
        if frames.parent[frame] if op in EXIT else frame:
            why = IN_LOOPS
        elif node in dead:
            why = IN_BRANCHES
        elif flat.host[node]:
            why = ON_HOST
        count = schema.output_count(graph.ops[node], graph.attrs[node])
        for port in range(1 if count is None else count):
            key = (node, port)
            if key in fed or (port and key not in read):
                continue
            if why or is_number(flat, key):
                refers = trains and dtype(flat, key).endswith("_ref")
                yield key, why or (FLOWS if node in flows else REFERENCES if refers else "")
            elif op not in VARIABLES:
                yield key, NO_NUMBERS


def _is_flow(graph: Graph, node: int, flows: set[int]) -> bool:
    """True if the output of a node is a TensorArray's flow, a number that says nothing: `flows` are the nodes in front that give one."""
    info = schema.lookup(graph.ops[node])
    if info is not None and any(one.name in _FLOW for one in info.outputs):
        return True
    takes = info is not None and any(one.name in _FLOW for one in info.inputs)
    return not takes and bool(flows) and any(source in flows for source, _ in graph.inputs(node))


def _state(flat: FlatGraph, needed: Mask) -> tuple[dict[str, list[int]], list[int]]:
    """The nodes that write each variable, and those that read or write one while another may write it."""
    graph, names = flat.graph, variable_names(flat)
    refers: dict[int, set[str]] = {}  # a node that hands on a handle or a reference -> variables
    writers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    for node in graph.topological.tolist():
        if not needed[node]:
            continue
        if node in names:
            refers[node] = {names[node]}
            continue
        inputs = graph.inputs(node)
        held = [refers.get(source, set()) if _is_handle(flat, (source, port)) else set() for source, port in inputs]
        found = set().union(*held)
        if not found:
            continue
        slots = written(graph.ops[node])
        changed = set().union(*(held[slot] for slot in slots if slot < len(held)))
        for name in changed:
            writers.setdefault(name, []).append(node)
        if _is_handle(flat, (node, 0)):
            refers[node] = found
        else:
            for name in found - changed:
                readers.setdefault(name, []).append(node)
    touching: dict[int, set[int]] = {}  # what writes -> all that may see whether it has
    for name, nodes in writers.items():
        for node in nodes:
            touching.setdefault(node, set()).update(nodes, readers.get(name, ()))
    unordered = set[int]()
    for node, others in touching.items():
        before = graph.ancestors([node])
        if others := {other for other in others if not before[other]}:
            behind = graph.descendants([node])
            unordered |= {other for other in others if not behind[other]}
    return writers, sorted(unordered)


def _is_handle(flat: FlatGraph, key: Key) -> bool:
    """True if a value stands for a variable."""
    found = dtype(flat, key)
    return found == "resource" or found.endswith("_ref")
