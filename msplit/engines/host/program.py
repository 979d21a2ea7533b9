"""A host part that needs nothing but its inputs, and its run by the table of host ops: no TensorFlow, no session."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Function, FunctionRef, TensorValue
from msplit.engines.host.hashing import Texts, all_bytes, as_objects
from msplit.engines.host.native import HostStep, parts_of
from msplit.engines.host.strings import LookupTable
from msplit.engines.host.table import HostNode, NativeNode, NotOurs, Run, host_op, host_ops
from msplit.errors import EngineError, InvalidInput, LoadError
from msplit.formats.decode import NodeAttrs
from msplit.formats.functions import Library
from msplit.formats.tensors import numpy_dtype
from msplit.formats.wire import parse_binary
from msplit.opset import schema
from msplit.opset.traits import ops_with

TABLE = "HashTableV2"
"""A lookup table."""
VECTORS = "MutableHashTableOfTensorsV2"
"""One whose values are vectors."""
IMPORT = "LookupTableImportV2"
"""What fills one with two constants."""

_BODIES = ("then_branch", "else_branch", "f")
"""Attributes that name a function that a node runs."""
_DEEPEST = 16
"""Most functions inside of each other."""

Lower = Callable[[HostNode], "Run | None"]
"""Gives the function of a node of numbers that the table of host ops does not have; None for one that nobody has."""


@dataclass(frozen=True, eq=False)
class HostGraph:
    """A part of a model with all that it takes: its constants are values of variables, too, and its tables are filled from constants.

    Attributes:
        graph_def: A GraphDef, in topological order.
        feeds: Input -> its tensor.
        fetches: Output -> its tensor.
    """

    graph_def: Any
    feeds: Mapping[str, str]
    fetches: Mapping[str, str]

    def packed(self) -> tuple[dict[str, Any], bytes]:
        """The names as JSON data, and the bytes of the graph."""
        return {"feeds": dict(self.feeds), "fetches": dict(self.fetches)}, self.graph_def.SerializeToString(
            deterministic=True
        )

    @classmethod
    def unpacked(cls, names: Mapping[str, Any], data: bytes, where: str) -> HostGraph:
        """A graph as it was packed.

        Raises:
            LoadError: That is no graph.
        """
        graph = parse_binary(data, schema.graph_pb2.GraphDef(), where)
        return cls(
            graph, *({str(key): str(value) for key, value in names[part].items()} for part in ("feeds", "fetches"))
        )

    def __reduce__(self) -> tuple[Callable[..., HostGraph], tuple[Any, ...]]:
        """A graph without the message, whose class is TensorFlow's by name: to load that takes 500 MB, or fails where there is none."""
        return HostGraph.unpacked, (*self.packed(), "a graph of another process")


class _Node(NamedTuple):
    """A node of a graph or of a function; inputs are ``node:port``."""

    name: str
    op: str
    attrs: Mapping[str, Any]
    inputs: Sequence[str]


_PROGRAMS: WeakValueDictionary[bytes, HostProgram] = WeakValueDictionary()
"""By hash of what they run."""


class HostProgram:
    """The steps of a host part.

    Args:
        graph: What to run; of a function, inputs and outputs are named by their numbers.
        lower: Functions for ops on numbers that are not in the table of host ops.
        library: Functions that it calls, where it is one itself.
        depth: How many functions it is inside of.

    Attributes:
        missing: Op -> names of its nodes, for those that only TensorFlow can run. With any, no step can be run.
        steps: What it runs, in order.
        compiled: True if all of it runs in C, where that does not refuse the values.
    """

    def __init__(
        self, graph: HostGraph | Function, lower: Lower, library: Mapping[str, Function] | None = None, depth: int = 0
    ) -> None:
        self.missing: dict[str, list[str]] = {}
        self.steps: list[HostStep] = []
        self._place: dict[str, int] = {}
        self._values: list[Any] = []
        self._lower, self._depth, self._graph = lower, depth, graph
        if isinstance(graph, Function):
            names, nodes = graph.body.names, _nodes_of(graph)
            feeds = {str(number): (f"{names[one.node]}:0", one.dtype) for number, one in enumerate(graph.parameters)}
            fetches = {str(number): f"{names[one.node]}:{one.port}" for number, one in enumerate(graph.results)}
        else:
            library, fetches = Library(graph.graph_def.library), dict(graph.fetches)
            nodes = [
                _Node(one.name, one.op, NodeAttrs(one.attr), [_key(key) for key in one.input if key[:1] != "^"])
                for one in graph.graph_def.node
            ]
            types = {node.name: node.attrs for node in nodes if node.op == "Placeholder"}
            feeds = {name: (key, str(types[key.partition(":")[0]]["dtype"])) for name, key in graph.feeds.items()}
        self._library = library or {}
        for node in nodes:
            self._add(node)
        self._feeds = [
            (name, self._place[_key(key)], dtype) for name, (key, dtype) in feeds.items() if _key(key) in self._place
        ]
        self._inputs = tuple(feeds)
        self._fetches = {name: self._place[_key(tensor)] for name, tensor in fetches.items()}
        self._parts = parts_of(self.steps, self._values, {*self._fetches.values()}) if not self.missing else []
        self.compiled = [part.native is not None for part in self._parts] == [True]

    @classmethod
    def of(cls, graph: HostGraph, lower: Lower) -> HostProgram:
        """The program of a graph; the same one for all graphs that are equal, since vocabularies may be large."""
        names, data = graph.packed()
        key = hashlib.sha256(json.dumps(names, sort_keys=True).encode() + data).digest()
        found = _PROGRAMS.get(key)
        if found is None:
            found = _PROGRAMS[key] = cls(graph, lower)
        return found

    def __reduce__(self) -> tuple[Callable[..., HostProgram], tuple[Any, ...]]:
        """A program that is `compiled` can be sent to other processes."""
        return HostProgram.of, (self._graph, bind)

    def _new(self, name: str, value: Any = None) -> int:
        self._place[name] = len(self._values)
        self._values.append(value)
        return self._place[name]

    def hands_on(self) -> list[int] | None:
        """The number of the input that each output is; None where it does anything else."""
        source = {place: int(name) for name, place, _ in self._feeds}
        for step in self.steps:
            if step.node.op not in ops_with("identity") and step.node.op != "NoOp":
                return None
            source |= {place: source.get(step.inputs[0], -1) for place in step.outputs}
        found = [source.get(place, -1) for place in self._fetches.values()]
        return found if min(found, default=0) >= 0 else None

    def _add(self, node: _Node) -> None:
        """Adds a node behind those that it reads."""
        info = schema.lookup(node.op)
        attrs = node.attrs if info is None else info.filled(node.attrs)
        inputs = tuple(self._place[key] for key in node.inputs)
        if node.op == "Const":
            value = attrs["value"]
            self._new(f"{node.name}:0", value.load() if isinstance(value, TensorValue) else None)
        elif node.op == IMPORT:
            handle, keys, values = inputs
            try:
                self._values[handle] = LookupTable(self._values[keys], self._values[values])
            except NotOurs:
                self.missing.setdefault("LookupTableFindV2", []).append(node.name)
        elif "key_dtype" in node.attrs or node.op in ops_with("fed"):  # a table of either kind, or an input
            self._new(f"{node.name}:0")
        else:
            self._add_step(node, attrs, inputs)

    def _add_step(self, node: _Node, attrs: Mapping[str, Any], inputs: tuple[int, ...]) -> None:
        known = tuple(found if isinstance(found := self._values[place], np.ndarray) else None for place in inputs)
        table = self._values[inputs[0]] if inputs else None
        table = table if isinstance(table, LookupTable) else None
        bound = HostNode(node.name, node.op, attrs, known, table, self._bodies(attrs))
        function = own = bind(bound)
        if function is None and not bound.handles_strings:
            function = self._lower(bound)
        outputs = tuple(self._new(f"{node.name}:{port}") for port in range(schema.output_count(node.op, attrs) or 0))
        if function is not None:
            self.steps.append(HostStep(function, inputs, outputs, bound, own is not None))
            return
        inside = [pair for body in bound.bodies for pair in body.missing.items()]
        for op, names in inside or [(node.op, [node.name])]:
            self.missing.setdefault(op, []).extend(names)

    def _bodies(self, attrs: Mapping[str, Any]) -> tuple[HostProgram, ...]:
        """The functions that a node with these attributes runs; none where one can not be."""
        named = [found.name for key in _BODIES if isinstance(found := attrs.get(key), FunctionRef)]
        functions = [self._library[name] for name in named if name in self._library]
        if len(functions) < len(named) or self._depth == _DEEPEST or any(one.body.broken_inputs for one in functions):
            return ()
        return tuple(HostProgram(one, self._lower, self._library, self._depth + 1) for one in functions)

    def step(self, feeds: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Runs all steps on the inputs: outputs by name, of the caller's own.

        Raises:
            EngineError: An input is missing, or is none, or has another type.
            InvalidInput: TensorFlow refuses these values, too.
        """
        values = list(self._values)
        if len(feeds) != len(self._inputs) or any(name not in feeds for name in self._inputs):
            raise _other_inputs(feeds, self._inputs)
        for name, place, dtype in self._feeds:
            values[place] = value if type(value := feeds[name]) is Texts else as_input(name, value, dtype)
        step = None
        try:
            with np.errstate(all="ignore"):
                for part in self._parts:
                    if part.native is not None and part.native(values):
                        continue
                    values = [*map(as_objects, values)]
                    for step in part.steps:
                        made = step.function(*[values[place] for place in step.inputs])
                        if type(made) is tuple:
                            for place, value in zip(step.outputs, made, strict=True):
                                values[place] = value
                        else:
                            values[step.outputs[0]] = made
        except (ValueError, IndexError, TypeError, OverflowError, ZeroDivisionError) as problem:
            assert step is not None
            reason = next(iter(str(problem).splitlines()), type(problem).__name__)
            raise InvalidInput(
                f"{step.node.op} can not take these values: {reason}",
                where=f"node {step.node.name}",
                fix="check the inputs: TensorFlow refuses them, too",
            ) from problem
        return {name: np.array(as_objects(values[place])) for name, place in self._fetches.items()}


def bind(node: HostNode) -> Run | None:
    """The function of a node in the table; None where there is none for it."""
    own = host_ops().get(node.op)
    try:
        return None if own is None else own(node)
    except (NotOurs, ValueError, TypeError, LoadError, KeyError):
        return None


def as_input(name: str, value: Any, dtype: str) -> NDArray[Any]:
    """An input as an array of its type. What a conversion would change is refused: 1.7 is no id, and text no number.

    Raises:
        EngineError: It has another type.
    """
    array = np.asarray(value)
    text = array.dtype.kind in "OSU"
    if text != (dtype == "string") or not (text or np.can_cast(array.dtype, numpy_dtype(dtype))):
        said = "text" if text else array.dtype.name
        raise EngineError(f"input {name} is {dtype}, not {said}", fix="convert it to that type")
    if not text:
        return array.astype(numpy_dtype(dtype), copy=False)
    array = array if array.dtype.hasobject else array.astype(object)
    if all_bytes(array):
        return array
    items = [*_as_bytes(name, array.reshape(-1).tolist())]
    made = np.empty(len(items), object)
    made[:] = items
    return made.reshape(array.shape)


def _as_bytes(name: str, items: list[Any]) -> Iterator[bytes]:
    for item in items:
        if not isinstance(item, str | bytes):
            raise EngineError(f"input {name} is string, and holds a {type(item).__name__}", fix="give str or bytes")
        try:
            yield item.encode() if isinstance(item, str) else bytes(item)
        except UnicodeEncodeError as problem:
            raise EngineError(f"input {name} has a text that UTF-8 can not have: {problem}", fix="give bytes") from None


def _other_inputs(feeds: Mapping[str, Any], wanted: tuple[str, ...]) -> EngineError:
    missing = [name for name in wanted if name not in feeds]
    unknown = next(itertools.filterfalse(wanted.__contains__, feeds), None)
    said = f"input {missing[0]!r} has no value" if missing else f"the model has no input {unknown!r}"
    return EngineError(said, fix=f"its inputs are: {', '.join(wanted) or 'none'}")


def _key(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _nodes_of(function: Function) -> list[_Node]:
    body, first = function.body, len(function.parameters)
    ops = ["Placeholder"] * first + [*body.ops[first:]]
    keys = [[f"{body.names[source]}:{port}" for source, port in body.inputs(node)] for node in range(len(body))]
    return [_Node(body.names[node], ops[node], body.attrs[node], keys[node]) for node in body.topological.tolist()]


def _guard(node: HostNode) -> NativeNode | None:
    """An assertion as `tf.function` writes it: while the condition holds, C hands on what there is; else it refuses the values."""
    handed = node.bodies[0].hands_on() if node.op.endswith("If") else None
    if handed is None or all(step.node.op != "Assert" for step in node.bodies[1].steps):
        return None
    return NativeNode([len(handed), *handed]) if len(handed) == len(node.attrs["Tout"]) else None


@host_op("If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall", native=_guard)
def call(node: HostNode) -> Run:
    """Results of a function, or of one of two by a truth value."""
    chooses = node.op.endswith("If")
    branches = node.bodies if chooses else (node.bodies * 2)[:2]
    if len(branches) != 2 or any(body.missing for body in branches) or node.attrs.get("Tcond", "bool") != "bool":
        raise NotOurs

    def run(*inputs: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        chosen = branches[chooses and not (inputs[0] if inputs[0].ndim == 0 else inputs[0].size)]
        return tuple(chosen.step({str(number): x for number, x in enumerate(inputs[chooses:])}).values())

    return run
