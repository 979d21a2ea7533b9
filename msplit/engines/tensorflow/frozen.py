"""Takes a part of a model out of its session, with the values of variables and what its tables hold; and runs one that was taken out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays
from msplit.engines.host.program import IMPORT, TABLE, VECTORS, HostGraph, as_input
from msplit.engines.tensorflow.placed import PlacedGraph
from msplit.engines.tensorflow.runtime import errors_of, silent_deprecations, tensorflow
from msplit.engines.tensorflow.variables import callable_of
from msplit.formats.decode import NodeAttrs
from msplit.formats.tensors import add_copy, add_node
from msplit.opset.traits import ENTER, ITERATORS, MERGE, SWITCH, VARIABLES

_LARGEST = 1 << 30
"""Bytes of constants that a graph may have: protobuf holds 2 GiB."""


class OpenGraph(Protocol):
    """A graph in a session that tells what is in it: a `SessionExecutable`."""

    def dtype(self, tensor: str) -> str:
        """The type of a tensor."""

    def values(self, tensors: Sequence[str]) -> list[NDArray[Any]]:
        """Values of tensors that depend on no input; of a variable in place of its handle."""

    def table(self, handle: str, keys: str, values: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of a lookup table."""


class NotFrozen(Exception):
    """A part of a model can not be taken out of its session; says why."""


def freeze(session: OpenGraph, placed: PlacedGraph) -> HostGraph:
    """The graph of a session's outputs with all that it takes: what does not depend on its inputs is computed now, once.

    Raises:
        NotFrozen: It reads data of its own, or holds what no GraphDef can.
        EngineError: TensorFlow can not compute what it needs.
    """
    nodes = {node.name: node for node in placed.graph_def.node}
    fed = {_key(tensor) for tensor in placed.feeds.values()}
    order = list(_ordered(nodes, [*placed.fetches.values()], fed))
    depends = _dependent(nodes, order, fed)
    frozen = type(placed.graph_def)()
    frozen.versions.CopyFrom(placed.graph_def.versions)
    named = {tensor: f"input_{number}:0" for number, tensor in enumerate(sorted(fed))}
    for tensor, name in named.items():
        dtype = session.dtype(tensor)
        add_node(frozen, _node(name), "Placeholder", dtype=dtype)
    read = [source for name in order if name in depends for source in nodes[name].input if not source.startswith("^")]
    wanted = dict.fromkeys(map(_key, [*read, *placed.fetches.values()]))
    wanted = {key: None for key in wanted if key not in fed and _node(key) not in depends}
    _add_constants(frozen, session, nodes, [*wanted], named)
    for name in order:
        if name in depends:
            _add(frozen, nodes[name], named, depends)
    library = {function.signature.name for function in placed.graph_def.library.function}
    if any(_calls(node, library) for node in frozen.node):
        frozen.library.CopyFrom(placed.graph_def.library)
    feeds = {name: named[_key(tensor)] for name, tensor in placed.feeds.items()}
    fetches = {name: named.get(_key(tensor), _key(tensor)) for name, tensor in placed.fetches.items()}
    return HostGraph(frozen, feeds, fetches)


def _dependent(nodes: Mapping[str, Any], order: list[str], fed: set[str]) -> set[str]:
    """Nodes that depend on what is fed, or run behind such."""
    found: set[str] = set()
    for name in order:
        if any(_key(source) in fed or _node(source) in found for source in nodes[name].input):
            found.add(name)
    return found


def _ordered(nodes: Mapping[str, Any], fetches: list[str], fed: set[str]) -> Iterator[str]:
    """Nodes that the outputs need, each behind those that it reads; the walk stops at what is fed."""
    done: dict[str, bool] = {}  # False while it is on the way
    stack = [_node(tensor) for tensor in reversed(fetches) if _key(tensor) not in fed]
    while stack:
        name = stack[-1]
        if name in done:
            stack.pop()
            if not done[name]:
                done[name] = True
                yield name
            continue
        node = nodes[name]
        if node.op in ENTER | MERGE | SWITCH | ITERATORS or node.op.startswith("Iterator"):
            raise NotFrozen(f"{node.op} ({name})")
        done[name] = False
        stack.extend(_node(source) for source in node.input if _key(source) not in fed and _node(source) not in done)


def _add_constants(
    frozen: Any, session: OpenGraph, nodes: Mapping[str, Any], wanted: list[str], named: dict[str, str]
) -> None:
    """Adds a constant for each value that depends on no input, and a table for each handle."""
    sources = {key: _source(key, nodes, session.dtype(key) == "resource") for key in wanted}
    tables = {key for key, source in sources.items() if "key_dtype" in nodes[_node(source)].attr}
    plain = [key for key in wanted if key not in tables]
    for key in plain:
        if session.dtype(key) in ("resource", "variant") and nodes[_node(sources[key])].op not in VARIABLES:
            raise NotFrozen(f"{nodes[_node(sources[key])].op} ({_node(sources[key])})")
    values = dict(zip(plain, session.values([sources[key] for key in plain]), strict=True))
    size = 0

    def add(name: str, dtype: str, value: NDArray[Any]) -> None:
        nonlocal size
        size += sum(map(len, value.reshape(-1).tolist())) if value.dtype == object else value.nbytes
        if size > _LARGEST:
            raise NotFrozen(f"constants of more than {_LARGEST >> 20:,} MiB")
        add_node(frozen, name, "Const", dtype=dtype, value=(dtype, value))

    for number, key in enumerate(wanted):
        name, attrs = f"constant_{number}", NodeAttrs(nodes[_node(sources[key])].attr)
        named[key] = f"{name}:0"
        if key in values:
            dtype = session.dtype(sources[key]).removesuffix("_ref")
            add(name, str(attrs["dtype"]) if dtype == "resource" else dtype, values[key])
            continue
        types = str(attrs["key_dtype"]), str(attrs["value_dtype"])
        contents = _contents(session, nodes[_node(sources[key])], sources[key], types)
        shape = contents[1].shape[1:]
        op, more = (VECTORS, {"value_shape": shape}) if shape else (TABLE, {})
        add_node(frozen, name, op, key_dtype=types[0], value_dtype=types[1], **more)
        for part, dtype, value in zip(("keys", "values"), types, contents, strict=True):
            add(f"{name}/{part}", dtype, value)
        inputs = (name, f"{name}/keys", f"{name}/values")
        add_node(frozen, f"{name}/import", IMPORT, inputs, Tin=types[0], Tout=types[1])


def _contents(session: OpenGraph, node: Any, handle: str, types: tuple[str, str]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values of a table. One of open addressing gives out places that hold nothing, too, under keys of their own.

    Raises:
        NotFrozen: Its keys are vectors.
    """
    keys, values = session.table(handle, *types)
    if keys.ndim > 1:
        if keys.shape[1:] != (1,):
            raise NotFrozen(f"{node.op} ({node.name}), whose keys are vectors")
        keys = keys[:, 0]
        values = values.reshape(len(keys), *(size.size for size in node.attr["value_shape"].shape.dim))
    unused = session.values([_key(name) for name in node.input if not name.startswith("^")])
    there = ~np.isin(keys, unused) if unused else np.ones(len(keys), np.bool_)
    return keys[there], values[there]


def _source(key: str, nodes: Mapping[str, Any], is_handle: bool) -> str:
    """The output that a handle comes from, through nodes that hand it on."""
    while is_handle and nodes[_node(key)].op == "Identity":
        key = _key(nodes[_node(key)].input[0])
    return key


def _add(frozen: Any, node: Any, named: Mapping[str, str], depends: set[str]) -> None:
    """Adds a node that depends on inputs, with what it reads under its name there."""
    data = [named.get(_key(name), name) for name in node.input if not name.startswith("^")]
    after = [name for name in node.input if name.startswith("^") and name[1:] in depends]
    if node.op == "ResourceGather":  # the variable is a constant now
        attrs = NodeAttrs(node.attr)
        batch, axis = int(attrs.get("batch_dims", 0)), f"{node.name}/axis"
        types = {"Tparams": str(attrs["dtype"]), "Tindices": str(attrs["Tindices"]), "Taxis": "int32"}
        add_node(frozen, axis, "Const", dtype="int32", value=("int32", np.int32(batch)))
        add_node(frozen, node.name, "GatherV2", [*data, axis, *after], **types, batch_dims=batch)
        return
    if "Variable" in node.op or node.op.startswith("Resource"):
        raise NotFrozen(f"{node.op} ({node.name})")
    copy = add_copy(frozen.node, node)
    copy.device = ""
    for key in [key for key in copy.attr if key.startswith("_")]:
        del copy.attr[key]
    del copy.input[:]
    copy.input.extend(data + after)


def _calls(node: Any, library: set[str]) -> bool:
    functions = [name for value in node.attr.values() for name in (value.func.name, *(f.name for f in value.list.func))]
    return node.op in library or any(name in library for name in functions)


def _node(name: str) -> str:
    return name.lstrip("^").partition(":")[0]


def _key(name: str) -> str:
    return name if ":" in name or name.startswith("^") else f"{name}:0"


class FrozenSession:
    """A part that was taken out of a model, in a session of its own.

    Raises:
        EngineError: TensorFlow is not installed, or has no such op.
    """

    def __init__(self, graph: HostGraph, where: str, timeout: float | None) -> None:
        v1 = tensorflow().compat.v1
        self._where, made = where, v1.Graph()
        config = v1.ConfigProto(device_count={"GPU": 0})
        self._session = v1.Session(graph=made, config=config)
        with errors_of(where), made.as_default(), silent_deprecations():
            # The message may be one of msplit's own classes, which TensorFlow does not take.
            proto = v1.GraphDef.FromString(graph.graph_def.SerializeToString())
            tensorflow().graph_util.import_graph_def(proto, name="")
            self._session.run([made.get_operation_by_name(node.name) for node in proto.node if node.op == IMPORT])
            feeds, fetches = (
                [made.get_tensor_by_name(name) for name in names.values()] for names in (graph.feeds, graph.fetches)
            )
            self._inputs = {name: tensor.dtype.name for name, tensor in zip(graph.feeds, feeds, strict=True)}
            self._outputs = tuple(graph.fetches)
            self._step = callable_of(self._session, feeds, fetches, [], timeout=timeout)

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """Runs it on the inputs: outputs by name."""
        arrays = [as_input(name, feeds[name], dtype) for name, dtype in self._inputs.items()]
        with errors_of(self._where):
            return dict(zip(self._outputs, map(np.asarray, self._step(*arrays)), strict=True))
