"""Graphs for the TensorFlow engine: nodes with devices, and gradients of functions as nodes.

A copy of the model's GraphDef with one device per stream, for the stock runtime. Needs no TensorFlow.

The copy holds every node of the original top-level graph, so that savers, initializers and assets work as they are, and the
inlined nodes of functions beside them. Nodes of the flat graph carry the device of their stream; the others are left to
TensorFlow's placer.

The gradient of a function of a graph's library, which a `SymbolicGradient` node computes, as nodes: TensorFlow makes them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msplit.core.dag import DisjointSets
from msplit.core.graph import CONTROL, Edges, Ints
from msplit.engines.variables import seeds, storage
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.formats.functions import GRADIENT, modules_of
from msplit.formats.tensors import add_copy, dtype_name
from msplit.opset import schema
from msplit.opset.traits import DRAWS, VARIABLES

CLONE_LIMIT = 1 << 20
"""Bytes up to which a constant is copied to every stream that reads it."""

HOST = -1
"""The place of a host node; every other place is a stream."""


@dataclass(frozen=True, eq=False)
class PlacedGraph:
    """A graph ready for a session.

    Attributes:
        feeds: Tensor name by input name.
        fetches: Tensor name by output name.
        targets: Nodes to run though nothing of them is fetched.
        variables: Nodes that hold variables, each the first that refers to its storage.
        clones: Constants that were copied to a further stream.
        copies: Distinct (tensor, place) pairs whose tensor is made at another place.
        moved: Nodes whose place is not that of their id, because a variable or a loop binds them to another.
        changed: Whether `graph_def` differs from the model's own.
    """

    graph_def: Any
    feeds: Mapping[str, str]
    fetches: Mapping[str, str]
    targets: tuple[str, ...]
    variables: tuple[str, ...]
    clones: int = 0
    copies: int = 0
    moved: int = 0
    changed: bool = True


def unplaced(flat: FlatGraph) -> PlacedGraph:
    """The model as its user has it: no device, no node changed.

    Only random ops without a seed get one, derived from their name, so that two runs can be compared.
    """
    model = flat.model
    graph_def, changed = _seeded(model.graph_def)
    return PlacedGraph(
        graph_def=graph_def,
        feeds={endpoint.name: endpoint.tensor for endpoint in model.inputs},
        fetches={endpoint.name: endpoint.tensor for endpoint in model.outputs},
        targets=tuple(model.targets),
        variables=_variables(flat),
        changed=changed,
    )


def place(
    flat: FlatGraph,
    ids: Ints,
    devices: Sequence[str],
    host: str,
    *,
    pinned: Ints | None = None,
    clone_limit: int = CLONE_LIMIT,
) -> PlacedGraph:
    """Puts every node of the flat graph on the device of its stream.

    Args:
        pinned: Index in `devices` of the device of each node that is to have that one, whatever its stream; -1 for the others.
        clone_limit: See `CLONE_LIMIT`. A larger constant is kept once, on a stream that reads it.

    Raises:
        EngineError: The flat graph can not be written as a GraphDef.
    """
    graph_def, _ = _seeded(flat.model.graph_def)
    if graph_def is flat.model.graph_def:
        graph_def = copy.deepcopy(graph_def)
    places = _places(flat, ids)
    moved = int(np.count_nonzero((places != ids) & (places != HOST)))
    if pinned is not None:
        places = np.where(pinned >= 0, pinned, places).astype(np.int32)
    nodes, names = file_nodes(flat, graph_def)
    edges = flat.all_edges
    _home_constants(flat, nodes, edges, places)
    clones = _Clones(graph_def, flat, clone_limit)
    copies: set[tuple[int, int, int]] = set()
    starts = np.searchsorted(edges.dst, np.arange(len(flat) + 1))
    fed = {tensor.node for tensor in flat.inputs}
    for v, node in enumerate(nodes):
        if "_class" in node.attr:
            del node.attr["_class"]  # the device says it; and in a function it may name a node by its old name
        place_of_v = int(places[v])
        device = node.device = host if place_of_v == HOST else devices[place_of_v]
        data: list[str] = []
        control: list[str] = []
        for e in range(int(starts[v]), int(starts[v + 1])):
            u, port = int(edges.src[e]), int(edges.port[e])
            if port == CONTROL:
                control.append(f"^{names[u]}")
                continue
            name = names[u]
            if places[u] != place_of_v:
                clone = clones.of(u, nodes[u], place_of_v, device)
                if clone is not None:
                    name = clone
                else:
                    copies.add((u, port, place_of_v))
            data.append(f"{name}:{port}" if port else name)
        wanted = sum(not text.startswith("^") for text in node.input)
        if wanted != len(data):
            if v in fed and flat.origin_function[v] < 0:
                continue  # what is fed may have lost its inputs in the flat graph; TensorFlow wants them there
            raise EngineError(
                f"node {names[v]!r} has {wanted} inputs in the file and {len(data)} after its functions were inlined",
                where=str(flat.model.source),
                fix="this is a defect of msplit: report it; --streams 1 runs the model as it is",
            )
        del node.input[:]
        node.input.extend(data + control)
    _release(graph_def, flat, nodes)
    return PlacedGraph(
        graph_def=graph_def,
        feeds={tensor.name: f"{names[tensor.node]}:{tensor.port}" for tensor in flat.inputs},
        fetches={tensor.name: f"{names[tensor.node]}:{tensor.port}" for tensor in flat.outputs},
        targets=tuple(names[target] for target in flat.targets),
        variables=_variables(flat),
        clones=len(clones.made),
        copies=len(copies),
        moved=moved,
    )


def file_nodes(flat: FlatGraph, graph_def: Any) -> tuple[list[Any], list[str]]:
    """The NodeDef of every flat node: the one in `graph_def`, or a copy of a function's added to it. And their names."""
    library = {function.signature.name: function for function in graph_def.library.function}
    used = {node.name for node in graph_def.node}
    nodes: list[Any] = []
    names: list[str] = []
    top_level, modules = list(graph_def.node), modules_of(flat.model.graph.functions)
    for v in range(len(flat)):
        function, index = flat.origin(v)
        if function in modules:
            raise EngineError(
                f"TensorFlow runs the module that JAX wrote as a whole: nothing inside of it, such as {flat.graph.names[v]}, has a device",
                where=str(flat.model.path),
                fix="run it with --engine tensorflow --streams 1, or by msplit's own engine, which divides it over streams",
            )
        node = top_level[index] if function is None else library[function].node_def[index]
        if node.op != flat.graph.ops[v]:
            # Inlining adds a few nodes of its own, which stand for a part of the call.
            node = _added(graph_def, flat, v)
            node.name = _unique(flat.graph.names[v], used)
        elif function is not None:
            node = add_copy(graph_def.node, node)
            node.name = _unique(flat.graph.names[v], used)
            if "frame_name" in node.attr:  # each call runs its loops in frames of its own
                node.attr["frame_name"].s = str(flat.graph.attrs[v]["frame_name"]).encode()
        nodes.append(node)
        names.append(node.name)
    return nodes, names


def _added(graph_def: Any, flat: FlatGraph, v: int) -> Any:
    node = graph_def.node.add()
    node.op = flat.graph.ops[v]
    if node.op != "NoOp":
        name = flat.graph.attrs[v]["T"]
        node.attr["T"].type = next((number for number in range(1, 40) if dtype_name(number) == name), 0)
    return node


def _unique(name: str, used: set[str]) -> str:
    unique, count = name, 0
    while unique in used:
        count += 1
        unique = f"{name}__{count}"
    used.add(unique)
    return unique


def binding_edges(flat: FlatGraph) -> list[tuple[int, int]]:
    """Edges whose both ends must be on one device: what they carry is a resource or a reference to a variable."""
    graph = flat.graph
    kinds: dict[tuple[int, int], bool] = {}
    found: list[tuple[int, int]] = []
    for edges in (graph.edges, flat.back_edges):
        for u, port, v in zip(edges.src.tolist(), edges.port.tolist(), edges.dst.tolist(), strict=True):
            if port == CONTROL:
                continue
            if (u, port) not in kinds:
                kinds[u, port] = _binds(flat, u, port)
            if kinds[u, port]:
                found.append((u, v))
    return found


def _binds(flat: FlatGraph, node: int, port: int) -> bool:
    op, attrs = flat.graph.ops[node], flat.graph.attrs[node]
    if schema.lookup(op) is None:
        return bool(flat.stateful[node]) and "shared_name" in attrs  # a custom op that makes a resource
    dtype = schema.output_dtype(op, attrs, port)
    return dtype is not None and (dtype == "resource" or dtype.endswith("_ref"))


def with_their_state(
    flat: FlatGraph, bound: Iterable[tuple[int, int]], handles: Iterable[int]
) -> tuple[DisjointSets, dict[Any, int]]:
    """Sets of nodes that must be in one place, by edges that bind and by storage that handles share; the first handle of each storage."""
    together, first = DisjointSets(len(flat)), dict[Any, int]()
    for u, v in bound:
        together.join(u, v)
    for v in handles:
        shared = storage(flat.graph.ops[v], flat.graph.names[v], flat.graph.attrs[v])
        if shared is not None:
            together.join(first.setdefault(shared, v), v)
    return together, first


def _places(flat: FlatGraph, ids: Ints) -> Ints:
    """The place of every node: its stream or HOST, such that what must be together is.

    What a resource or a reference binds goes where its handle is; a loop or cond goes where its first node is.
    """
    places = np.where(flat.host, HOST, ids).astype(np.int32)
    bound = binding_edges(flat)
    handles = {u for u, _ in bound}
    tied = handles | {v for _, v in bound}
    together, _ = with_their_state(flat, bound, sorted(handles))
    first: dict[int, int] = {}
    in_regions = np.flatnonzero((flat.region >= 0) & ~flat.host).tolist()
    for v in in_regions:
        together.join(first.setdefault(int(flat.region[v]), v), v)
    members: dict[int, list[int]] = {}
    for v in sorted(tied.union(in_regions)):
        members.setdefault(together.find(v), []).append(v)
    for group in members.values():
        holders = [v for v in group if v in handles]
        leader = min(holders, key=lambda v: (flat.graph.level[v], v)) if holders else group[0]
        place = int(places[leader])
        for v in group:
            if v in tied or (place != HOST and places[v] != HOST):
                places[v] = place
    return places


def _variables(flat: FlatGraph) -> tuple[str, ...]:
    found: dict[Any, str] = {}
    for v, op in enumerate(flat.graph.ops):
        if op in VARIABLES and flat.origin_function[v] < 0:
            name = flat.model.graph_def.node[int(flat.origin_node[v])].name
            found.setdefault(storage(op, name, flat.graph.attrs[v]) or name, name)
    return tuple(found.values())


def _release(graph_def: Any, flat: FlatGraph, nodes: Sequence[Any]) -> None:
    """Leaves top-level nodes that the outputs do not need to the placer, so that savers and initializers follow their variables.

    A further handle of a placed variable is placed with it: two devices would mean two variables.
    """
    devices: dict[Any, str] = {}
    for v, node in enumerate(nodes):
        held = storage(flat.graph.ops[v], node.name, flat.graph.attrs[v])
        if held is not None:
            devices.setdefault(held, node.device)
    inside = set(flat.origin_node[flat.origin_function < 0].tolist())
    for index, attrs in enumerate(flat.model.graph.attrs):
        if index not in inside:
            node = graph_def.node[index]
            node.device = devices.get(storage(node.op, node.name, attrs), "")


def _home_constants(flat: FlatGraph, nodes: Sequence[Any], edges: Edges, places: Ints) -> None:
    """Moves a constant that nothing on its own stream reads to the first stream that reads it."""
    readers: dict[int, list[int]] = {}
    for u, port, v in zip(edges.src.tolist(), edges.port.tolist(), edges.dst.tolist(), strict=True):
        if port != CONTROL and nodes[u].op == "Const":
            readers.setdefault(u, []).append(int(places[v]))
    for u, at in readers.items():
        streams = [place for place in at if place != HOST]
        if not flat.host[u] and streams and int(places[u]) not in streams:
            places[u] = min(streams)


class _Clones:
    """Copies of constants, made when a node of another place reads one."""

    def __init__(self, graph_def: Any, flat: FlatGraph, limit: int) -> None:
        self.graph_def = graph_def
        self.limit = limit
        self.used = {node.name for node in graph_def.node}
        self.made: dict[tuple[int, int], str] = {}
        self.fed = {tensor.node for tensor in flat.inputs}

    def of(self, constant: int, node: Any, place: int, device: str) -> str | None:
        """Name of the copy at a place, or None where the node is no constant or too large a one."""
        # One with control inputs lives in a loop frame or a branch, where a copy without them does not belong.
        if node.op != "Const" or constant in self.fed or any(text.startswith("^") for text in node.input):
            return None
        key = (constant, place)
        if key not in self.made:
            if constant_bytes(node) > self.limit:
                return None
            clone = add_copy(self.graph_def.node, node)
            clone.attr.pop("_class", None)
            clone.device = device
            clone.name = _unique(f"{node.name}__{'host' if place == HOST else f'stream_{place}'}", self.used)
            self.made[key] = clone.name
        return self.made[key]


def constant_bytes(node: Any) -> int:
    """An upper bound of the bytes of a Const node's value."""
    tensor = node.attr["value"].tensor
    count = math.prod(max(int(dim.size), 0) for dim in tensor.tensor_shape.dim)
    return max(int(tensor.ByteSize()), count * 8 if not tensor.tensor_content else len(tensor.tensor_content))


def _seeded(graph_def: Any) -> tuple[Any, bool]:
    """The GraphDef, or a copy of it where random ops without a seed have one. And whether it is a copy."""
    if not any(_unseeded(node) for _, body in _bodies(graph_def) for node in body):
        return graph_def, False
    seeded = copy.deepcopy(graph_def)
    for scope, body in _bodies(seeded):
        for node in body:
            if _unseeded(node):
                node.attr["seed"].i, node.attr["seed2"].i = seeds(scope, node.name, 0, 0)
    return seeded, True


def unrewritten(placed: PlacedGraph, config: Any) -> PlacedGraph:
    """A graph whose functions run by these options, a ConfigProto: each call has its own, under which TensorFlow rewrites what it calls."""
    bodies = _bodies(placed.graph_def)
    if not any(_OPTIONS in node.attr for _, body in bodies for node in body):
        return placed
    made, own = copy.deepcopy(placed.graph_def), config.SerializeToString()
    for _, body in _bodies(made):
        for node in body:
            if _OPTIONS in node.attr:
                node.attr[_OPTIONS].s = own
    return replace(placed, graph_def=made, changed=True)


_OPTIONS = "config_proto"
"""The attribute of a call that has them."""


def _bodies(graph_def: Any) -> list[tuple[str, Any]]:
    return [("", graph_def.node), *((f.signature.name, f.node_def) for f in graph_def.library.function)]


def _unseeded(node: Any) -> bool:
    return node.op in DRAWS and not any(name in node.attr and node.attr[name].i for name in ("seed", "seed2"))


_PASSES = 4
"""Most times that TensorFlow is asked: where functions call others it inlines these first, and a gradient with the next pass."""


def expanded(function: Any, library: Any, types: Sequence[int]) -> Any:
    """The GraphDef that computes the gradient of a function, of `argument_0` and so on; None where TensorFlow has none or is not installed.

    It is what the runtime of TensorFlow makes of the node, which differs from `tf.gradients` (gradients of integers, for one).

    Args:
        function: Its FunctionDef, without type parameters.
        library: A FunctionDefLibrary of all that it runs, which must not run itself.
        types: Types of the gradients of its inputs, as DataType numbers.
    """
    from msplit.engines.tensorflow.runtime import quiet_stderr, tensorflow

    try:
        tf = tensorflow()
    except EngineError:
        return None
    from tensorflow.core.protobuf import config_pb2, device_properties_pb2
    from tensorflow.python.grappler import cluster, tf_optimizer

    made = tf.compat.v1.GraphDef(library=library, versions={"producer": tf.version.GRAPH_DEF_VERSION})
    for inner in made.library.function:
        inner.attr.pop("_noinline", None)
    given = [argument.type for argument in (*function.signature.input_arg, *function.signature.output_arg)]
    arguments = [f"argument_{number}" for number in range(len(given))]
    for name, dtype in zip(arguments, given, strict=True):
        made.node.add(name=name, op="Placeholder").attr["dtype"].type = dtype
    gradient = made.node.add(name="gradient", op="SymbolicGradient", input=arguments)
    gradient.attr["Tin"].list.type.extend(given)
    gradient.attr["Tout"].list.type.extend(types)
    gradient.attr["f"].func.name = function.signature.name
    results = made.node.add(name=GRADIENT, op="IdentityN", input=[f"gradient:{port}" for port in range(len(types))])
    results.attr["T"].list.type.extend(types)
    rewriting = {"optimizers": ["function"], "min_graph_nodes": -1, "meta_optimizer_iterations": 1}
    config = config_pb2.ConfigProto(graph_options={"rewrite_options": rewriting})
    cpu = device_properties_pb2.NamedDevice(name="/CPU:0", properties={"type": "CPU"})  # no GPU is touched
    for _ in range(_PASSES):
        try:
            with quiet_stderr(), tf.Graph().as_default():
                tf.graph_util.import_graph_def(made, name="")
                meta = tf.compat.v1.train.export_meta_graph()
                meta.collection_def["train_op"].node_list.value.append(GRADIENT)
                made = tf_optimizer.OptimizeGraph(config, meta, cluster=cluster.Cluster(devices=[cpu]))
        except (ValueError, tf.errors.OpError):
            return None
        if all(node.op != "SymbolicGradient" for node in made.node):
            return made if {node.name for node in made.node}.issuperset(arguments) else None
    return None  # some op of the function has no gradient there
