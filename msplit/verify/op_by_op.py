"""Holds each op of the compiled graph against TensorFlow by itself, on TensorFlow's own values of what it reads.

Behind other layers a wrong formula may be invisible: GELU with tanh in place of erf is 5e-4 away where it is computed, and less than
rounding in the last of twelve layers. `fetchable` tells which values of a graph can be held against another engine's one by one, and of
how many not, and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Graph
from msplit.engines.base import Arrays, Job
from msplit.engines.tensorflow.engine import session_on_cpu
from msplit.engines.variables import variable_names
from msplit.flatten.control_flow import all_frames
from msplit.flatten.flat import FlatGraph, Tensor
from msplit.opset import schema
from msplit.opset.traits import CALLS, CONDS, CONSTANTS, DRAWS, EXIT, LOOPS, MERGE, SWITCH, VARIABLES, ops_with, written
from msplit.verify.compare import ModelComparison, OutputComparison, compare, tolerance_of
from msplit.verify.tolerances import move

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import Compiled


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


def is_number(flat: FlatGraph, key: Key) -> bool:
    """True if a value is an array of numbers."""
    return flat.dtype(*key) not in ("", "string", "variant", "resource")


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
                refers = trains and flat.dtype(*key).endswith("_ref")
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
    found = flat.dtype(*key)
    return found == "resource" or found.endswith("_ref")


OP_BY_OP = "TensorFlow on the CPU, op by op"
"""Name of what a compiled graph is held against."""

MOST_BYTES = 1 << 30
"""Bytes of values that are fetched in one run: they are in memory twice."""

_ONE_OP = {"float32": 2.0**-16, "float64": 2.0**-42, "complex64": 2.0**-16, "complex128": 2.0**-42}
"""Tolerances of one op that adds nothing up, by type."""

_SUMS = {"float32": 1e-4, "float64": 1e-10, "complex64": 1e-4, "complex128": 1e-10}
"""Tolerances of products and convolutions: algorithms that need fewer products round more."""

_AMPLITUDE, _MOVES, _TIMES = 2.0**-21, 4, 4.0
"""How far the values that an op reads are moved, relative to each; how often; and how many times as far what it makes of them may be
from TensorFlow's. Behind a difference of two numbers that are near each other, or next to a boundary, rounding is all there is."""

_PRODUCTS = ops_with("half gains")
_OPAQUE = DRAWS | LOOPS | CONDS | CALLS
"""Ops of which nothing is compared: what they give is drawn, or is numbered in another way once a loop is one op."""


@dataclass(frozen=True, eq=False)
class _Program:
    """A compiled graph, and the inputs and variables that it is stepped on.

    Attributes:
        meanings: Value -> another of the flat graph, which it is in the compiled graph.
    """

    compiled: Compiled
    job: Job
    feeds: Arrays
    meanings: dict[Key, Key] = field(default_factory=dict)

    def made(self, given: Mapping[Key, NDArray[Any]]) -> Iterator[tuple[str, tuple[int, ...], Key, NDArray[Any]]]:
        """What each step makes of given values; see `Compiled.alone`."""
        return self.compiled.alone(self.job, self.feeds, given)

    @cached_property
    def fetched(self) -> set[Key]:
        """Values that can be compared and do not depend on what the step has written by then."""
        ops, known = self.job.flat.graph.ops, fetchable(self.job.flat)
        return {key for key in known.keys if not known.after[key[0]] and ops[key[0]] not in _OPAQUE}

    @cached_property
    def producers(self) -> Mapping[Key, int]:
        """Step that makes each value."""
        return self.compiled.program.producers()

    @cached_property
    def place(self) -> Mapping[int, int]:
        """Place of each node in topological order."""
        return {int(node): number for number, node in enumerate(self.job.flat.graph.topological)}

    def tolerance(self, nodes: Sequence[int], dtype: str) -> float:
        """Tolerance of what an op makes that does the work of some nodes."""
        adds = any(self.job.flat.graph.ops[node] in _PRODUCTS for node in nodes)
        return (_SUMS if adds else _ONE_OP).get(dtype, 0.0) or tolerance_of(dtype)

    def wrong(self, given: dict[Key, NDArray[Any]], among: Collection[Key]) -> dict[Key, OutputComparison]:
        """Those of some values that are further from the given ones than an op may be, also where what it reads is moved a little.

        An op that does the work of nodes behind its own may give what the last of them gives: then that is what is given from there on.
        """
        found: dict[Key, OutputComparison] = {}
        got: dict[Key, NDArray[Any]] = {}
        for op, nodes, key, made in self.made(given):
            if key in among:
                name = f"{self.job.flat.graph.names[key[0]]}:{key[1]} ({op})"
                tolerance = self.tolerance(nodes, made.dtype.name)
                meanings = [key, *((node, 0) for node in self.behind(key, nodes) if (node, 0) in given)]
                compared = [
                    compare({name: made}, {name: given[one]}, tolerance=tolerance).outputs[0] for one in meanings
                ]
                right = next((one for one, each in zip(meanings, compared, strict=True) if each.passed), None)
                if right is None:
                    found[key], got[key] = compared[0], made
                elif right != key:
                    self.meanings[key] = right
                    given[key] = given[right]
        for seed in range(_MOVES if found else 0):
            moved = {key: move(value, _AMPLITUDE, np.random.default_rng([seed, *key])) for key, value in given.items()}
            for _, _, key, made in self.made(moved):
                if key in found:
                    one = found[key]
                    by = compare({"": made}, {"": got[key]}, tolerance=one.tolerance).outputs[0]
                    carried = (
                        one.mismatches <= _TIMES * by.mismatches if one.exact else one.needed <= _TIMES * by.needed
                    )
                    if carried:
                        del found[key]
        return found

    def behind(self, key: Key, nodes: Sequence[int]) -> list[int]:
        """Nodes that an op does the work of which stand behind the one whose value it gives, the last first."""
        behind = [node for node in nodes if self.place[node] > self.place[key[0]]]
        return sorted(behind, key=self.place.__getitem__, reverse=True)

    def parts(self, left_out: set[Key]) -> Iterator[tuple[set[Key], list[Key]]]:
        """Values to compare, as many as fit into memory at a time, each time with those that the ops read that make them; without some that
        become known meanwhile."""
        fetched = self.fetched
        judged, read, size = set[Key](), dict[Key, None](), 0
        for step in self.compiled.program.steps:
            made = [
                key
                for key in ((step.op.node, port) for port in range(step.outputs))
                if key in fetched and key not in left_out
            ]
            if made and size and size + step.bytes > MOST_BYTES:
                yield judged, [key for key in read if key in fetched]
                judged, read, size = set(), {}, 0
            self.note_read(list(step.inputs) if made else [], read, fetched - left_out if left_out else fetched)
            more = [(node, 0) for key in made for node in self.behind(key, step.op.source_nodes)]
            judged |= set(made)
            read |= dict.fromkeys([*made, *more, *(self.meanings[key] for key in read if key in self.meanings)])
            size += step.bytes
        if judged:
            yield judged, [key for key in read if key in fetched]

    def note_read(self, waiting: list[Key], read: dict[Key, None], fetched: Collection[Key]) -> None:
        """Notes values that are read, and those that values are made of which are not fetched."""
        steps, producers = self.compiled.program.steps, self.producers
        while waiting:
            key = waiting.pop()
            if key not in read:
                read[key] = None
                waiting += steps[producers[key]].inputs if key in producers and key not in fetched else ()


class TensorFlowValues:
    """TensorFlow's values, on the CPU, of what is inside of the step of a job. The last session stays open for the same values of other
    inputs, unless steps draw random numbers: they are those of a first step. Used as a context."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._draws = not DRAWS.isdisjoint(job.flat.graph.ops)
        self._asked: tuple[Key, ...] | None = None
        self._open = ExitStack()

    def __enter__(self) -> TensorFlowValues:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def of(self, feeds: Arrays, keys: Sequence[Key]) -> dict[Key, NDArray[Any]]:
        """The values of a step."""
        names = {f"{node}:{port}": (node, port) for node, port in keys}
        if self._asked != tuple(keys) or self._draws:
            self._open.close()
            job = self._job
            cut = replace(job.flat, outputs=tuple(Tensor(name, *key) for name, key in names.items()), targets=())
            session = session_on_cpu(cut, op_libraries=job.op_libraries, inlined=True, state=job.state)
            self._session = self._open.enter_context(closing(session))
            self._asked = tuple(keys)
        made = self._session.step(feeds)
        return {key: np.asarray(made[name]) for name, key in names.items()}


def compare_ops(compiled: Compiled, job: Job, feeds: Arrays, tensorflow: TensorFlowValues) -> ModelComparison:
    """Compares what each op of the compiled graph makes of TensorFlow's values of what it reads with TensorFlow's value of that: see
    `_ONE_OP`.

    A pass may give a value another meaning that its readers know of, such as rows in another order. So a value that is not TensorFlow's is
    wrong only where readers that get it as it is come to other values than TensorFlow, or where it is an output.
    """
    flat = job.flat
    program = _Program(compiled, job, feeds)
    outputs = {(output.node, output.port) for output in flat.outputs}
    found: list[OutputComparison] = []
    other_meaning = set[Key]()
    for judged, keys in program.parts(other_meaning):
        given = tensorflow.of(feeds, keys)
        given |= {key: given[other] for key, other in program.meanings.items() if key in given}
        if wrong := program.wrong(given, judged):
            left = {key: value for key, value in given.items() if key not in wrong}
            blamed = flat.graph.ancestors([key[0] for key in program.wrong(left, judged - wrong.keys())])
            found += [one for key, one in wrong.items() if blamed[key[0]] or key in outputs]
            other_meaning |= wrong.keys()
    return ModelComparison(tuple(found))
