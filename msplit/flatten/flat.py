"""Flat graphs: the nodes that a model's outputs need, the nodes of the file that they come from, and where they run.

The flat view of a model: a DAG of the nodes that its outputs need, functions inlined.

From the flat graph back to the nodes of the file.

Placement of nodes: on the host or on the GPU.

As TensorFlow places them on a machine with one GPU:

- A node that asks for a CPU device is the host's.
- A node without a GPU kernel for its types (string, table, parsing and dataset ops, an integer MatMul) is the host's. So is one
  whose GPU kernel keeps all that it gives in host memory: it launches nothing. That is how TensorFlow computes with shapes: Shape,
  and Pack, StridedSlice, AddV2 and many others on int32.
- Constants, placeholders and handles follow who uses them: they are the host's if all their consumers are, or take them in host
  memory (the axis of a ConcatV2). An Identity that the host could run whose consumers all are there stays there; any other is the GPU's.
- NoOp orders others and computes nothing; it is the GPU's unless it asks for a CPU, so that it never looks like a crossing.
- An op that TensorFlow does not have is a custom op and usually there because of its GPU kernel: it is the GPU's, unless an
  attribute says that it handles strings, or a string or a lookup table goes into it.
- `While`, `If` and calls that stay calls run where their bodies run; they are the host's where all they give is strings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, Edges, Graph, Ints
from msplit.escape import html, line
from msplit.flatten.control_flow import is_stateful
from msplit.formats.model import STREAM_ID, Model, Nodes
from msplit.opset import schema
from msplit.opset.traits import ops_with


@dataclass(frozen=True)
class Region:
    """Nodes that must stay on one stream.

    Attributes:
        kind: "loop" (a v1 while frame with everything nested in it), "cond" (a v1 Switch..Merge region) or "variable" (the
            readers and writers of one ref variable).
        name: Frame name, name of the Switch's predicate, or the variable.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Tensor:
    """Output `port` of one node of a flat graph, with the name the user knows it by."""

    name: str
    node: int
    port: int


@dataclass(frozen=True, eq=False, repr=False)
class FlatGraph:
    """The flat graph: the input of analysis, rules and engines.

    Attributes:
        graph: A DAG: back edges of v1 loops are cut, calls are inlined (their nodes are named ``call/body_node``). `While`, `If` and
            their stateless kin stay one node each, `graph.functions` holds their bodies.
        back_edges: The edges that were cut (NextIteration -> Merge), in the numbering of `graph`.
        origin_function: Per node the index in `function_names` of the function it comes from, -1 for the top-level graph.
        origin_node: Per node its index in that function's NodeDefs (not counting parameters) or in the top-level GraphDef. The few
            nodes that inlining adds (NoOp joins of control edges, an Identity where a call gives a parameter back) have the index of
            their call; parameters, which are nodes only in the view of a single function, have -1.
        region: Per node the index of its outermost region in `regions`, or -1.
        host: Per node, whether it has no GPU kernel (string, table, parsing, iterator ops) or is pinned to a CPU device.
        stateful: Per node, whether its op is stateful (reads or writes a resource, or is random).
        targets: Nodes that must run though nothing of them is fetched, those inside of inlined calls included.
    """

    model: Model
    graph: Graph
    back_edges: Edges
    origin_function: Ints
    origin_node: Ints
    function_names: Sequence[str]
    region: Ints
    regions: Sequence[Region]
    host: NDArray[np.bool_]
    stateful: NDArray[np.bool_]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    targets: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.graph)

    def __repr__(self) -> str:
        fed, made = (", ".join(tensor.name for tensor in some[:4]) for some in (self.inputs, self.outputs))
        return f"<FlatGraph model: {line(str(self.model.path))}, nodes: {len(self):,}, inputs: {line(fed)}, outputs: {line(made)}>"

    def _repr_html_(self) -> str:
        return f"<code>{html(repr(self))}</code>"

    @property
    def all_edges(self) -> Edges:
        """The edges of `graph` and those that close loops."""
        edges, back = self.graph.edges, self.back_edges
        if not len(back):
            return edges
        pairs = ((getattr(edges, name), getattr(back, name)) for name in ("src", "port", "dst", "slot"))
        return Edges.of(*map(np.concatenate, pairs))

    def dtype(self, node: int, port: int = 0) -> str:
        """The type of an output; "" where nobody knows it."""
        attrs = self.graph.attrs[node]
        found = schema.output_dtype(self.graph.ops[node], attrs, port) or attrs.get("dtype")
        return found if isinstance(found, str) else ""

    def origin(self, node: int) -> tuple[str | None, int]:
        """(function name or None for the top-level graph, index of the NodeDef in it)."""
        function = int(self.origin_function[node])
        return (self.function_names[function] if function >= 0 else None), int(self.origin_node[node])


OriginalNode = tuple[str | None, str]
"""Function (None for the top-level graph) and name of a node there."""


@dataclass(frozen=True)
class Conflict:
    """A node of a function's body for which the places that call the function want different stream ids.

    Attributes:
        wanted: The ids that are wanted, each with the flat names of the nodes that want it, the chosen one first.
    """

    function: str | None
    node: str
    wanted: Mapping[int, tuple[str, ...]]

    @property
    def chosen(self) -> int:
        """The id that is written."""
        return next(iter(self.wanted))

    def __str__(self) -> str:
        asked = "; ".join(f"stream {stream}: {', '.join(nodes)}" for stream, nodes in self.wanted.items())
        return f"{self.function}: {self.node} gets stream {self.chosen} at every place it is called from ({asked})"


def to_ids(
    flat: FlatGraph, ids: Sequence[int], cost: Sequence[float] | None = None
) -> tuple[dict[OriginalNode, int], tuple[Conflict, ...]]:
    """Maps stream ids of flat nodes to the nodes of the file that they come from.

    Calls that were inlined get no id, nor do parameters. Where the places that call a function want different ids for one node,
    it gets the id that most cost asks for, or the lowest of those where costs are equal: the order of the nodes decides nothing.

    Args:
        flat: The flat graph.
        ids: Per flat node its stream id; a negative one gives none.
        cost: Per flat node its weight where ids disagree; every node weighs the same without it.

    Returns:
        The ids, in the order of the flat nodes, and every disagreement.
    """
    streams = np.asarray(ids).tolist()
    if not flat.function_names:
        top = flat.model.graph.names
        pairs = zip(flat.origin_node.tolist(), streams, strict=True)
        return {(None, top[number]): stream for number, stream in pairs if stream >= 0}, ()
    wanted: dict[tuple[int, int], dict[int, list[int]]] = {}
    origins = zip(flat.origin_function.tolist(), flat.origin_node.tolist(), strict=True)
    for node, (origin, stream) in enumerate(zip(origins, streams, strict=True)):
        if stream >= 0 and origin[1] >= 0:
            wanted.setdefault(origin, {}).setdefault(stream, []).append(node)
    result: dict[OriginalNode, int] = {}
    conflicts = []
    for (function, number), by_stream in wanted.items():
        name, node_name, op = original(flat, function, number)
        # Joins that inlining adds come from a call, which is no node of theirs.
        for stream in list(by_stream):
            by_stream[stream] = [node for node in by_stream[stream] if flat.graph.ops[node] == op]
            if not by_stream[stream]:
                del by_stream[stream]
        if not by_stream:
            continue
        ranked = list(by_stream)
        if len(ranked) > 1:
            weight = {s: fsum(cost[n] if cost is not None else 1 for n in nodes) for s, nodes in by_stream.items()}
            ranked.sort(key=lambda stream: (-weight[stream], stream))
            shown = {stream: tuple(flat.graph.names[node] for node in by_stream[stream]) for stream in ranked}
            conflicts.append(Conflict(name, node_name, shown))
        result[name, node_name] = ranked[0]
    return result, tuple(conflicts)


def as_written(flat: FlatGraph, ids: Ints, cost: NDArray[np.float64]) -> Ints:
    """Per flat node the id that its node of the file gets, which all copies of it share; -1 where that is none. See `to_ids`."""
    if not flat.function_names:
        return ids
    written, _ = to_ids(flat, ids.tolist(), cost.tolist())
    result = np.full(len(flat), -1, np.int32)
    for node in np.flatnonzero(ids >= 0).tolist():
        function, number = int(flat.origin_function[node]), int(flat.origin_node[node])
        if number >= 0:
            name, node_name, op = original(flat, function, number)
            if op == flat.graph.ops[node]:
                result[node] = written.get((name, node_name), -1)
    return result


def with_ids(model: Model) -> Nodes:
    """The nodes of a file that have a stream id, by function, in the order of the file."""
    found = {"": _named_with_ids(model.graph)}
    found |= {name: _named_with_ids(function.body) for name, function in model.graph.functions.items()}
    return {name: nodes for name, nodes in found.items() if nodes}


def _named_with_ids(graph: Graph) -> tuple[str, ...]:
    return tuple(graph.names[node] for node in graph.nodes_with(STREAM_ID))


def among(flat: FlatGraph, nodes: Nodes) -> NDArray[np.bool_]:
    """Mask of the nodes of a flat graph that have an id and come from some nodes of the file."""
    known = {function: frozenset(names) for function, names in nodes.items()}
    mask = np.zeros(len(flat), np.bool_)
    for node in flat.graph.nodes_with(STREAM_ID):
        function, number = int(flat.origin_function[node]), int(flat.origin_node[node])
        if number >= 0:
            name, node_name, _ = original(flat, function, number)
            mask[node] = node_name in known.get(name or "", ())
    return mask


def original(flat: FlatGraph, function: int, number: int) -> tuple[str | None, str, str]:
    """Function, name and op of an original node."""
    graph: Any = flat.model.graph
    if function < 0:
        return None, graph.names[number], graph.ops[number]
    name = flat.function_names[function]
    body = graph.functions[name]
    place = number + len(body.parameters)
    return name, body.body.names[place], body.body.ops[place]


_MAKERS, _PASSERS = ops_with("runs where it is read"), ops_with("host passes")
_FUNCTIONAL = ops_with("functional")
_STRINGS = ("string", "string_ref")
_MANY = 64
"""Tensors of one argument that are taken at their word: a damaged file may claim millions."""

_QUEUE = re.compile("[A-Za-z]*Queue")
_TABLE = re.compile("Hash(Table|table)")


@dataclass(frozen=True)
class _Placement:
    """Placement of a node from its op and types alone.

    Attributes:
        host: Whether the host runs it, before its neighbours are looked at.
        memory: Per input whether it is data that is taken in host memory; what is left out is not.
        follows: "consumers" or "neighbours" where it has no placement of its own.
    """

    host: bool
    memory: tuple[bool, ...] = ()
    follows: str = ""


def stateful_nodes(graph: Graph) -> NDArray[np.bool_]:
    """Mask of the nodes that are stateful; see `is_stateful`."""
    return graph.with_ops({op for op in set(graph.ops) if is_stateful(op)})


def host_nodes(graph: Graph) -> NDArray[np.bool_]:
    """Mask of the nodes of a DAG that the host runs; see the module's text."""
    kinds: list[_Placement] = []
    which = _classify(graph, kinds)
    host = np.array([kind.host for kind in kinds], np.bool_)[which]
    pinned_to_host = _pinned_to_host(graph.devices)
    host |= pinned_to_host
    _unknown_ops(graph, host)
    free = ~pinned_to_host
    makers = np.array([kind.follows == "consumers" for kind in kinds], np.bool_)[which] & free
    passers = np.array([kind.follows == "neighbours" for kind in kinds], np.bool_)[which] & free
    _follow(graph, host, makers, passers, _in_host_memory(graph, kinds, which))
    return host


def _pinned_to_host(devices: Sequence[str]) -> NDArray[np.bool_]:
    """Mask of the nodes that ask for a CPU device, as in ``"/job:localhost/device:CPU:0"`` or ``"/cpu:0"``."""
    by_device = {
        device: any(
            part.lower().split(":")[-2:-1] == ["cpu"] or part.lower() in ("cpu", "device:cpu")
            for part in device.split("/")
        )
        for device in set(devices)
    }
    return np.fromiter((by_device[device] for device in devices), np.bool_, len(devices))


def _classify(graph: Graph, kinds: list[_Placement]) -> Ints:
    """Per node the index of its kind in `kinds`, which is filled. Nodes of one op and the same types share a kind."""
    by_key: dict[Any, int] = {}
    asked: dict[str, tuple[str, ...]] = {}

    def kind_of(node: int, most: int) -> int:
        op = graph.ops[node]
        names = asked.get(op)
        if names is None:
            names = asked[op] = _asked(op)
        key: Any = (op, *_types(graph.attrs[node], names, most)) if names else op
        kind = by_key.get(key)
        if kind is None:
            kind = by_key[key] = len(kinds)
            kinds.append(_placement(op, dict(zip(names, key[1:], strict=True)) if names else {}))
        return kind

    first, of = graph.per_kind()
    alike = [kind_of(node, _MANY) for node in first.tolist()]
    which = np.array(alike, np.int32)[of]
    # Nodes with more inputs than that may be believed when they claim more.
    for node in np.flatnonzero(np.diff(graph.in_start) >= _MANY).tolist():
        which[node] = kind_of(node, len(graph.in_edges(node)) + 1)
    return which


def _types(attrs: Mapping[str, Any], names: tuple[str, ...], most: int) -> list[Any]:
    """Values of the attributes that decide a node's placement.

    A number of tensors that its inputs belie is as good as a smaller one: `most`, at least `_MANY`, is the largest that is believed.
    """
    values = [attrs.get(name) for name in names]
    for place, value in enumerate(values):
        if type(value) is str or value is None:
            continue
        if not isinstance(value, str | int | tuple) or (
            isinstance(value, tuple) and not all(isinstance(item, str) for item in value)
        ):
            values[place] = None
        elif isinstance(value, int) and value > _MANY:
            values[place] = min(value, most)
    return values


def _asked(op: str) -> tuple[str, ...]:
    """Attributes that decide the placement of an op's nodes."""
    info = schema.lookup(op)
    if info is None or not info.gpu:
        return ()
    names: dict[str, None] = {}
    for arg in (*info.inputs, *info.outputs):
        names.update(dict.fromkeys(name for name in (arg.type_attr, arg.number_attr, arg.type_list_attr) if name))
    for kernel in info.gpu:
        names.update(dict.fromkeys(kernel.types))
    return tuple(names)


def _placement(op: str, types: Mapping[str, Any]) -> _Placement:
    """The placement of nodes of an op with the types that `_asked` asks for, None where a node does not say."""
    info = schema.lookup(op)
    if info is None or op == "NoOp":
        return _Placement(host=False)
    attrs = info.filled({name: value for name, value in types.items() if value is not None})
    inputs = schema.input_dtypes(op, attrs)
    outputs = schema.output_dtypes(op, attrs)
    # Calls run where their functions do; on the host only where they give nothing but strings.
    if op in _FUNCTIONAL:
        return _Placement(host=bool(outputs) and all(dtype in _STRINGS for dtype in outputs or ()))
    # Without a kernel for the GPU, with strings, or as a queue: on the host.
    kernel = schema.gpu_kernel(op, attrs)
    strings = any(dtype in _STRINGS for dtype in (*(inputs or ()), *(outputs or ())))
    if kernel is None or strings or _QUEUE.match(op):
        return _Placement(host=True)
    # A handle is a name, not data: that it is kept in host memory says nothing about where the work is.
    memory = tuple(
        in_host and dtype != "resource"
        for in_host, dtype in zip(schema.host_slots(info.inputs, attrs, kernel) or (), inputs or (), strict=True)
    )
    # Ops that make or pass on handles follow their surroundings; others go by the memory of their outputs, or inputs.
    if op in _MAKERS:
        return _Placement(host=False, memory=memory, follows="consumers")
    if op in _PASSERS:
        return _Placement(host=False, follows="neighbours")
    given = [arg.name in kernel.host_memory for arg in info.outputs]
    taken = [arg.name in kernel.host_memory for arg in info.inputs]
    return _Placement(host=all(given) if given else bool(taken) and all(taken), memory=memory)


def _unknown_ops(graph: Graph, host: NDArray[np.bool_]) -> None:
    """Finds the custom ops that work on strings or tables, and adds them to `host`."""
    unknown = {op for op in set(graph.ops) if schema.lookup(op) is None and op not in graph.functions}
    if not unknown:
        return
    for node, op in enumerate(graph.ops):
        if op not in unknown or host[node]:
            continue
        attrs = graph.attrs[node]
        host[node] = any(_says_string(attrs[name]) for name in attrs if not name.startswith("_")) or any(
            _TABLE.search(graph.ops[source])
            or schema.output_dtype(graph.ops[source], graph.attrs[source], port) in _STRINGS
            for source, port in graph.inputs(node)
        )


def _says_string(value: Any) -> bool:
    return value in _STRINGS or (isinstance(value, tuple) and any(item in _STRINGS for item in value))


def _in_host_memory(graph: Graph, kinds: list[_Placement], which: Ints) -> NDArray[np.bool_]:
    """Per edge, whether the consumer takes the tensor in host memory."""
    starts = np.cumsum([0, *(len(kind.memory) for kind in kinds)])
    flat = np.array([in_host for kind in kinds for in_host in kind.memory] + [False], np.bool_)
    kind = which[graph.edges.dst]
    slot = graph.edges.slot
    known = (slot != CONTROL) & (starts[kind] + slot < starts[kind + 1])
    return flat[np.where(known, starts[kind] + slot, len(flat) - 1)]


def _follow(
    graph: Graph,
    host: NDArray[np.bool_],
    makers: NDArray[np.bool_],
    passers: NDArray[np.bool_],
    in_host_memory: NDArray[np.bool_],
) -> None:
    """Decides the nodes that follow others, and adds those that are the host's to `host`.

    Args:
        graph: A DAG.
        host: Per node, whether the host runs it as far as is known.
        makers: Nodes that follow their consumers.
        passers: Nodes that are the host's if all around them is.
        in_host_memory: Per edge, whether the consumer takes it in host memory.
    """
    edges = graph.edges
    data = edges.port != CONTROL
    to_host = (in_host_memory | host[edges.dst]) & data
    order = graph.topological[passers[graph.topological]].tolist()
    # Whether all consumers take it in host memory; consumers first.
    for node in reversed(order):
        out = graph.out_edges(node)
        out = out[data[out]]
        if len(out) and to_host[out].all():
            into = np.arange(graph.in_start[node], graph.in_start[node + 1])
            to_host[into] = data[into]
    used = np.bincount(edges.src[data], minlength=len(graph))
    by_host = np.bincount(edges.src[to_host], minlength=len(graph))
    wanted = (used > 0) & (used == by_host)
    host |= wanted & makers
    for node in order:
        host[node] = wanted[node] and all(host[source] for source, _ in graph.inputs(node))
