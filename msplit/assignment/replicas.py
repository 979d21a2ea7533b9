"""Copies of a graph beside each other in one: what they share, and how they are made and joined.

Copies of a model side by side in one graph: what they share, what each has of its own, and how their outputs become one.

Shared is what is the same for all of them: inputs, lookup tables with what fills them, queues and iterators, and whatever is computed of
these without a weight, such as hashed strings. All else is there once per replica, in a scope of its own: nodes, variables, loop frames,
functions. The inputs and outputs of the whole are called as those of one.

Nodes that the replicas of a model share, and nodes that can not be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Graph, TensorValue
from msplit.errors import LoadError, MsplitError
from msplit.flatten.control_flow import is_stateful
from msplit.formats.endpoints import endpoint, split_tensor
from msplit.formats.model import STREAM_ID, Endpoint, Model
from msplit.formats.tensors import add_copy, add_node
from msplit.opset import schema
from msplit.opset.traits import CONSTANTS, DRAWS, PLACEHOLDERS, VARIABLES, ops_with, traits

_STAYS_WHOLE = frozenset().union(
    *(ops_with(word) for word in ("enter", "exit", "next", "switch", "switch n", "merge", "functional")), DRAWS
)
"""Ops that are never shared: control flow stays with what it controls, functions may hold weights, and each replica draws for itself."""

_CUSTOM_HANDLES = ops_with("handle") - VARIABLES
FLOATING = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
"""Types of weights, and of what can be averaged."""


def refuse(model: Model, graph: Graph, needed: NDArray[np.bool_]) -> None:
    """Refuses a model that replicas can not be made of.

    Raises:
        MsplitError: It changes variables, has variables of custom ops, or no output.
    """
    where = str(model.source)
    for node in np.flatnonzero(needed).tolist():
        op, name = graph.ops[node], graph.names[node]
        if traits(op).writes:
            raise MsplitError(
                f"the outputs need {name!r} ({op}), which changes variables; replicas are for inference",
                where=where,
                fix="name what the model predicts with --part outputs=",
            )
        if op in _CUSTOM_HANDLES:
            raise MsplitError(
                f"{name!r} is a variable of a custom op ({op}), whose values only its own library can copy",
                where=where,
                fix="freeze the model, or name other outputs with --part outputs=",
            )
    if not model.outputs:
        raise MsplitError("the model has no output", where=where, fix="name the tensors with --part outputs=")
    infos = (
        model.meta.signature_def[model.signature].outputs if model.signature and model.choice.outputs is None else {}
    )
    parts = [name for name in sorted(infos) if infos[name].WhichOneof("encoding") != "name"]
    if parts:
        raise MsplitError(
            f"output {parts[0]!r} is of several tensors, sparse or ragged, which differ in size from replica to replica",
            where=where,
            fix="name dense outputs with --part outputs=",
        )


def initializers(model: Model, graph: Graph, needed: NDArray[np.bool_]) -> list[int]:
    """Nodes that fill the tables that are needed: initializers, groups of them taken apart, without those of weights."""
    lasting = lasting_nodes(graph)
    waiting = [graph.index[name] for name in model.init_ops]
    found: dict[int, None] = {}
    seen = set(waiting)
    while waiting:
        node = waiting.pop(0)
        if graph.ops[node] == "NoOp":
            further = [int(one) for one in graph.predecessors(node) if int(one) not in seen]
            seen.update(further)
            waiting += further
            continue
        before = np.flatnonzero(graph.ancestors([node])).tolist()
        if any(needed[one] and graph.ops[one] in VARIABLES for one in before):
            continue  # the value comes from a checkpoint
        if any(needed[one] and one in lasting for one in before):
            found[node] = None
    return list(found)


def lasting_nodes(graph: Graph) -> set[int]:
    """Tables, queues and iterators, which last from step to step under their own names. Variables do, too, and are not meant."""
    return {node for node in graph.nodes_with("shared_name") if graph.ops[node] not in VARIABLES}


def shared_nodes(model: Model, graph: Graph, graph_defs: Sequence[Any], init: Sequence[int]) -> NDArray[np.bool_]:
    """Mask of the nodes that all replicas share."""
    others = list({id(one): one for one in graph_defs if one is not model.graph_def}.values())
    theirs = [{node.name: node for node in one.node} for one in others]
    own = {node.name: node for node in model.graph_def.node} if others else {}

    def equal(node: int) -> bool:
        name = graph.names[node]
        return all(nodes[name].attr["value"] == own[name].attr["value"] for nodes in theirs)

    # What variables, inputs and initializers depend on is shared, so its constants must be equal in all models.
    lasting = lasting_nodes(graph)
    fed = [node for node, op in enumerate(graph.ops) if op in PLACEHOLDERS]
    shared = graph.ancestors([*lasting, *fed, *init])
    different = [node for node in np.flatnonzero(shared).tolist() if graph.ops[node] in CONSTANTS and not equal(node)]
    if different:
        raise LoadError(
            f"the weights are of a model with other values in {graph.names[different[0]]!r}, which all replicas share",
            where=str(model.source),
            fix="give models with the same vocabularies and the same preprocessing",
        )
    # From there on in topological order: a node all of whose inputs are shared may be shared too.
    waiting = np.bincount(graph.edges.dst, minlength=len(graph))
    ready = [node for node in range(len(graph)) if not waiting[node] or shared[node]]
    done = np.zeros(len(graph), np.bool_)
    while ready:
        node = ready.pop()
        if done[node]:
            continue
        done[node] = True
        if not shared[node] and not _same_for_all(graph, node, lasting, equal):
            continue
        shared[node] = True
        for consumer in graph.successors(node).tolist():
            waiting[consumer] -= 1
            if not waiting[consumer]:
                ready.append(consumer)
    return shared


def _same_for_all(graph: Graph, node: int, lasting: Container[int], equal: Callable[[int], bool]) -> bool:
    """True if a node of which all inputs are shared is shared, too."""
    op = graph.ops[node]
    if op in CONSTANTS:
        value = graph.attrs[node].get("value")
        if not isinstance(value, TensorValue) or (value.dtype in FLOATING and value.shape):
            return False  # weights: though they may be equal, each replica has its own
        return equal(node)
    if op in _STAYS_WHOLE or op in VARIABLES or schema.lookup(op) is None:
        return False
    return not is_stateful(op) or any(int(before) in lasting for before in graph.predecessors(node))


_NAMES_OF_A_STEP = ("frame_name", "var_name")
"""Attributes that name what is there once per step and name: loop frames, temporary variables."""


@dataclass(frozen=True)
class Replica:
    """One copy.

    Attributes:
        graph_def: Where its nodes and functions are taken from: the model's own graph, or one that differs in constants alone.
        stream: Stream id of all its nodes.
        device: Device of all its nodes, "" for none. What the model pins to a CPU stays on that of this task.
        seed: Added to the seeds of what draws random numbers: those of equal seeds would be the same in all replicas.
        host: What runs on the host and so is on no stream, as (function, node); None for the function is the graph itself.
    """

    graph_def: Any = field(repr=False)
    stream: int
    device: str = ""
    seed: int = 0
    host: Container[tuple[str | None, str]] = field(default=(), repr=False)


@dataclass(frozen=True)
class Ensemble:
    """Copies in one graph.

    Attributes:
        inputs: Tensor by name of the input.
        outputs: By name of the output its node, type and shape.
        variables: Name of a variable -> the replica whose value it has, and what it is called in the model.
        init_op: What fills the tables, "" where there are none.
        shared: Nodes that are there once.
        copied: Nodes of one replica.
    """

    graph_def: Any = field(repr=False)
    inputs: Mapping[str, str]
    outputs: Mapping[str, Endpoint]
    variables: Mapping[str, tuple[int, str]]
    init_op: str
    shared: int
    copied: int


@dataclass(frozen=True)
class _Names:
    """Names of the model's nodes in the ensemble. The scope "" is that of what all share.

    Attributes:
        needed: Nodes that the outputs need.
        shared: Those of them that all share.
        fed: Placeholder by the tensor inside of the model that it stands for.
    """

    graph: Graph
    needed: NDArray[np.bool_]
    shared: NDArray[np.bool_]
    fed: Mapping[tuple[str, int], str]

    def node(self, scope: str, name: str) -> str:
        return name if self.shared[self.graph.index[name]] else f"{scope}/{name}"

    def tensor(self, scope: str, name: str, port: int) -> str:
        fed = self.fed.get((name, port))
        return fed or f"{self.node(scope, name)}{f':{port}' if port else ''}"

    def input(self, scope: str, text: str) -> str:
        return f"^{self.node(scope, text[1:])}" if text[0] == "^" else self.tensor(scope, *split_tensor(text))

    def together(self, scope: str, classes: Sequence[bytes]) -> list[bytes]:
        """The node's colocation partners: the replica's own. What is left out, or belongs to one replica of many, holds nobody."""
        names = [text[5:].decode(errors="replace") for text in classes if text.startswith(b"loc:@")]
        numbers = [(name, self.graph.index.get(name)) for name in names]
        there = [name for name, number in numbers if number is not None and self.needed[number]]
        return [
            f"loc:@{self.node(scope, name)}".encode() for name in there if scope or self.shared[self.graph.index[name]]
        ]


def ensemble(model: Model, replicas: Sequence[Replica], combine: str) -> Ensemble:
    """Puts copies of a model side by side.

    Args:
        model: What is fed and fetched; nodes that its outputs do not need are left out.
        replicas: The copies, one or more.
        combine: What becomes of their outputs: ``mean``, or ``stack`` along a new first axis. One that no weight reaches stays as it is.

    Raises:
        MsplitError: An output can not be averaged, or the model trains or has parts that can not be copied.
        LoadError: What is shared is not the same in all replicas.
    """
    inner, graph, needed = _reached(model)
    refuse(model, graph, needed)
    init = initializers(model, graph, needed)
    needed |= graph.ancestors(init)
    shared = needed & shared_nodes(model, graph, [replica.graph_def for replica in replicas], init)
    fed = {(end.node, end.port): free_name(f"{end.node}_{end.port}", graph.index) for end in inner}
    names = _Names(graph, needed, shared, fed)
    made = schema.graph_pb2.GraphDef(versions=model.graph_def.versions)
    for end in inner:
        shape: dict[str, Any] = {} if end.shape is None else {"shape": end.shape}
        add_node(made, fed[end.node, end.port], "Placeholder", dtype=_type_of(model, end), **shape)
    _copy(made, model.graph_def, names)
    base = _free_scope(model)
    scopes = {f"{base}_{number}": replica for number, replica in enumerate(replicas)}
    for scope, replica in scopes.items():
        _copy(made, replica.graph_def, names, scope, replica)
    outputs = _outputs(made, model, names, list(scopes), combine)
    init_op = free_name("init", {node.name for node in made.node}) if init else ""
    if init:
        add_node(made, init_op, "NoOp", [f"^{graph.names[node]}" for node in init])
    copied = np.flatnonzero(needed & ~shared).tolist()
    own = [graph.names[node] for node in copied if graph.ops[node] in VARIABLES]
    defaults = np.flatnonzero(shared & ~graph.ancestors(init) & graph.with_ops(VARIABLES)).tolist()
    variables = {graph.names[node]: (0, graph.names[node]) for node in defaults}  # what an input has by default
    variables |= {f"{scope}/{name}": (number, name) for number, scope in enumerate(scopes) for name in own}
    there = {node.name for node in made.node}
    fed_by = {end.name: names.fed.get((end.node, end.port), end.tensor) for end in model.inputs}
    inputs = {name: tensor for name, tensor in fed_by.items() if split_tensor(tensor)[0] in there}
    return Ensemble(made, inputs, outputs, variables, init_op, int(np.count_nonzero(shared)), len(copied))


def has_variables(model: Model) -> bool:
    """True if the outputs of a model need variables."""
    _, graph, needed = _reached(model)
    return bool(np.any(needed & graph.with_ops(VARIABLES)))


def _reached(model: Model) -> tuple[list[Endpoint], Graph, NDArray[np.bool_]]:
    """Inputs inside of the model, the graph without what computes them, and which of its nodes the outputs need."""
    index, ops = model.graph.index, model.graph.ops
    inner = {(end.node, end.port): end for end in model.inputs if ops[index[end.node]] not in PLACEHOLDERS}
    graph = _without_what_feeds(model.graph, inner.values())
    kept = () if model.meta is None else model.inputs  # a signature takes them, needed or not
    roots = [index[end.node] for end in (*model.outputs, *kept) if (end.node, end.port) not in inner]
    return list(inner.values()), graph, graph.ancestors(roots)


def _without_what_feeds(graph: Graph, inner: Collection[Endpoint]) -> Graph:
    """The graph without what computes its inputs, where they are no placeholders."""
    edges = graph.edges
    kept = np.ones(len(edges), np.bool_)
    for end in inner:
        kept &= (edges.src != graph.index[end.node]) | (edges.port != end.port)
    return replace(graph, edges=edges.where(kept)) if inner else graph


def _free_scope(model: Model) -> str:
    """A beginning that no name of the model has, and no function as its end."""
    base = "replica"
    functions = [function.signature.name for function in model.graph_def.library.function]
    while any(name.startswith(f"{base}_") for name in model.graph.names) or any(
        f"_{base}_" in name for name in functions
    ):
        base += "s"
    return base


def free_name(name: str, taken: Container[str]) -> str:
    """A name, with a number behind it where it is taken."""
    number, found = 0, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def _copy(made: Any, source: Any, names: _Names, scope: str = "", replica: Replica | None = None) -> None:
    """Copies what a replica has of its own, or without one what all share, and the functions that are called there."""
    library = {function.signature.name: function for function in reversed(source.library.function)}
    encoded = {node.name: node for node in reversed(source.node)}
    suffix = f"_{scope}" if scope else ""
    called: list[str] = []
    for number in np.flatnonzero(names.needed & (names.shared != (replica is not None))).tolist():
        node = made.node.add()
        node.CopyFrom(encoded[names.graph.names[number]])
        _adapt(node, names, scope, replica)
        called += _rename_functions(node, library, suffix)
    _copy_functions(made, source.library, library, called, scope, replica)


def _copy_functions(
    made: Any, encoded: Any, library: Mapping[str, Any], called: list[str], scope: str, replica: Replica | None
) -> None:
    """Copies functions, those that they call, and which of them are gradients of others."""
    suffix = f"_{scope}" if scope else ""
    copied = set()
    while called:
        name = called.pop()
        if name in copied:
            continue
        copied.add(name)
        function = made.library.function.add()
        function.CopyFrom(library[name])
        function.signature.name += suffix
        inside = {one.name for one in (*function.signature.input_arg, *function.node_def)}
        for node in function.node_def:
            _settle(node, name, replica)
            groups = node.attr["_class"].list.s if "_class" in node.attr else []
            for number, text in enumerate(groups):
                if scope and text[5:].decode(errors="replace") not in inside:  # no node but a name, which each has
                    groups[number] = text[:5] + f"{scope}/".encode() + text[5:]
            called += _rename_functions(node, library, suffix)
    for gradient in encoded.gradient:
        if {gradient.function_name, gradient.gradient_func} <= copied:
            made.library.gradient.add(
                function_name=gradient.function_name + suffix, gradient_func=gradient.gradient_func + suffix
            )


def add_functions(made: Any, library: Any) -> None:
    """Copies the functions that nodes call, those that they call, and which of them are gradients of others."""
    functions = {function.signature.name: function for function in reversed(library.function)}
    called = [name for node in made.node for name in _rename_functions(node, functions, "")]
    copied = set[str]()
    while called:
        if (name := called.pop()) in copied:
            continue
        copied.add(name)
        function = add_copy(made.library.function, functions[name])
        called += (name for node in function.node_def for name in _rename_functions(node, functions, ""))
        gradients = [one for one in library.gradient if one.function_name == name]
        made.library.gradient.extend(gradients)
        called += (one.gradient_func for one in gradients)


def _adapt(node: Any, names: _Names, scope: str, replica: Replica | None) -> None:
    """Makes a copied node one of a replica, or one that all share."""
    inputs = [names.input(scope, text) for text in node.input]
    del node.input[:]
    node.input.extend(inputs)
    if "_class" in node.attr:
        together = names.together(scope, node.attr["_class"].list.s)
        del node.attr["_class"]
        if together:
            node.attr["_class"].list.s.extend(together)
    _settle(node, None, replica)
    if replica is None:
        return
    own = {key: node.attr[key].s for key in _NAMES_OF_A_STEP if key in node.attr}
    if node.op in VARIABLES:
        own["shared_name"] = node.attr["shared_name"].s or node.name.encode()
    for key, value in own.items():
        node.attr[key].s = f"{scope}/".encode() + value
    node.name = f"{scope}/{node.name}"
    if replica.device:
        node.device = _device(replica.device, node.device)


def _settle(node: Any, function: str | None, replica: Replica | None) -> None:
    """Puts a node on the stream of its replica, and has it draw what no other draws; what all share is on none."""
    if STREAM_ID in node.attr:
        del node.attr[STREAM_ID]
    if replica is None:
        return
    if (function, node.name) not in replica.host:
        node.attr[STREAM_ID].i = replica.stream
    seeded = any(key in node.attr and node.attr[key].i for key in ("seed", "seed2"))
    if seeded and node.op in DRAWS:  # without one TensorFlow takes another each time
        node.attr["seed2"].i += replica.seed


def _device(device: str, pinned: str) -> str:
    """The device of a replica's node. What is pinned to a CPU has no kernel elsewhere: it is on the CPU of the same task."""
    if "CPU" not in pinned.upper():
        return device
    parts = [part for part in device.split("/") if part.startswith(("job:", "replica:", "task:"))]
    return "".join(f"/{part}" for part in (*parts, "device:CPU:0"))


def _rename_functions(node: Any, library: Mapping[str, Any], suffix: str) -> Iterator[str]:
    """Has a node call the functions of its replica, and gives the names that they had."""
    if node.op in library:
        yield node.op
        node.op += suffix
    waiting = list(node.attr.values())
    while waiting:
        value = waiting.pop()
        for called in (*([value.func] if value.HasField("func") else ()), *value.list.func):
            if called.name in library:
                yield called.name
                called.name += suffix
            waiting += called.attr.values()


def _outputs(made: Any, model: Model, names: _Names, scopes: Sequence[str], combine: str) -> dict[str, Endpoint]:
    """Combines what the replicas give, under the names of the model's own outputs."""
    taken = {node.name for node in made.node}
    found: dict[str, Endpoint] = {}
    for end in model.outputs:
        same = next((other for other in model.outputs if other.tensor == end.tensor and other.name in found), None)
        if same is not None:
            found[end.name] = replace(found[same.name], name=end.name)
            continue
        if names.shared[names.graph.index[end.node]] or (end.node, end.port) in names.fed:
            node, port = split_tensor(names.tensor("", end.node, end.port))
            found[end.name] = replace(end, node=node, port=port)
            continue
        node = free_name(f"{end.node}_{end.port}" if end.port else end.node, taken)
        dtype, shape = _type_of(model, end), end.shape
        parts = [names.tensor(scope, end.node, end.port) for scope in scopes]
        if combine == "stack":
            add_node(made, node, "Pack", parts, T=dtype, N=len(parts), axis=0)
            shape = None if shape is None else (len(parts), *shape)
        elif dtype in FLOATING:
            total, count = free_name(f"{node}/sum", taken), free_name(f"{node}/count", taken)
            add_node(made, total, "AddN", parts, T=dtype, N=len(parts))
            add_node(made, count, "Const", dtype=dtype, value=(dtype, len(parts)))
            add_node(made, node, "RealDiv", [total, count], T=dtype)
            taken |= {total, count}
        else:
            raise MsplitError(
                f"output {end.name!r} is of type {dtype}, of which there is no mean",
                where=str(model.source),
                fix="stack the outputs (--combine stack), or name those to average with --part outputs=",
            )
        taken.add(node)
        found[end.name] = Endpoint(end.name, node, 0, dtype, shape)
    return found


def _type_of(model: Model, end: Endpoint) -> str:
    dtype = end.dtype or endpoint(model.graph, model.graph.index[end.node], end.port).dtype
    if not dtype:
        raise MsplitError(
            f"the type of {end.name!r} ({end.tensor}) is not known: it comes of a custom op",
            where=str(model.source),
            fix="name a tensor in front of it or behind it with --part inputs= or outputs=",
        )
    return dtype.removesuffix("_ref")
