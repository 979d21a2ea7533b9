"""Protobuf graphs as plain data: nodes with edges, attributes as values.

Attributes as plain values, decoded only when somebody asks.

A GraphDef as plain data: names, ops and integer edges.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from msplit.core.graph import CONTROL, BrokenInput, Edges, Function, FunctionRef, Graph, numbered
from msplit.formats.tensors import dtype_name, shape_tuple, tensor_value


def plain(value: Any) -> Any:
    """An AttrValue as a plain value; see `msplit.core.graph.Graph.attrs`."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    return _SCALARS[kind](getattr(value, kind))


class NodeAttrs(Mapping[str, Any]):
    """The attributes of one node or function call; a value is decoded when it is first asked for, and kept.

    Nodes whose attributes are equal share one of these (see `AttrTable`). `known` are values in place of those in the message.
    """

    __slots__ = ("_decoded", "_encoded")

    def __init__(self, encoded: Any, known: dict[str, Any] | None = None) -> None:
        self._encoded = encoded
        self._decoded = known

    def __getitem__(self, key: str) -> Any:
        # Indexing a protobuf map with a key that it lacks would add the key to the message.
        if key not in self._encoded:
            raise KeyError(key)
        return self.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an attribute, or a default."""
        decoded = self._decoded
        if decoded is None:
            decoded = self._decoded = {}
        elif key in decoded:
            return decoded[key]
        if key not in self._encoded:
            return default
        value = decoded[key] = plain(self._encoded[key])
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._encoded

    def __iter__(self) -> Iterator[str]:
        # The order of a protobuf map changes from process to process.
        return iter(sorted(self._encoded))

    def __len__(self) -> int:
        return len(self._encoded)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True, eq=False)
class _Kinds:
    """Facts from one look at every node of a message; see `AttrTable`.

    Attributes:
        attrs: Per node its attributes.
        of: Per node its kind: nodes of one kind have the same op and the same attributes, but for the values of constants.
        keys: Per kind the names of its attributes.
        functions: Per kind the functions that its attributes name, by attribute.
    """

    attrs: list[NodeAttrs]
    of: list[int]
    keys: list[frozenset[str]]
    functions: list[tuple[str, ...]]


def _kinds(nodes: Any, untold: bool) -> _Kinds:
    """Looks at every node once. Most of a large graph is the same few nodes over and over."""
    found: dict[tuple[str, frozenset[Any]], int] = {}
    shared: list[NodeAttrs] = []
    kinds = _Kinds([], [], [], [])
    for node in nodes:
        encoded = node.attr
        parts: list[Any] = []
        constant = False
        for key, value in encoded.items():
            held = value.WhichOneof("value")
            if held == "type":
                parts.append((key, value.type))
            elif held == "tensor":
                constant = True  # may be as large as the model, so that it is not compared
                parts.append(key)
            else:
                parts.append((key, value.SerializeToString()))
        signature = (node.op, frozenset(parts))  # the order of a protobuf map depends on that in which it was filled
        kind = found.get(signature)
        if kind is None:
            kind = found[signature] = len(shared)
            silent = node.op == "Variable" or (untold and node.op == "Placeholder")
            shared.append(NodeAttrs(encoded, {"shape": None} if silent and _no_axes(encoded) else None))
            kinds.keys.append(frozenset(encoded))
            kinds.functions.append(tuple(_functions_of(encoded)))
        kinds.attrs.append(NodeAttrs(encoded) if constant else shared[kind])
        kinds.of.append(kind)
    return kinds


def _no_axes(encoded: Any) -> bool:
    return "shape" in encoded and not encoded["shape"].shape.dim


def _functions_of(encoded: Any) -> Iterator[str]:
    # Sorted, because the order of a protobuf map changes from process to process.
    for key in sorted(encoded):
        value = encoded[key]
        for function in [value.func] if value.HasField("func") else value.list.func:
            yield function.name


class AttrTable(Sequence[Mapping[str, Any]]):
    """The attributes of NodeDefs, decoded on access, and `before` them those of the stand-ins for a function's parameters.

    A shape without axes of a ``Variable``, TensorFlow's first, says nothing, and so does that of a placeholder where `untold`.
    """

    def __init__(self, nodes: Any, before: Sequence[Mapping[str, Any]] = (), *, untold: bool = False) -> None:
        self._nodes = nodes
        self._before = before
        self._untold = untold

    def __len__(self) -> int:
        return len(self._before) + len(self._nodes)

    @cached_property
    def _found(self) -> _Kinds:
        return _kinds(self._nodes, self._untold)

    @cached_property
    def _all(self) -> list[Mapping[str, Any]]:
        return [*self._before, *self._found.attrs]

    def __getitem__(self, index: Any) -> Any:  # of an int or a slice, as of any sequence
        return self._all[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._all)

    def kinds(self) -> list[int]:
        """Per node a number; nodes of the same number have the same op and the same attributes, but for the values of constants."""
        first = len(self._before)
        return [*range(first), *(first + kind for kind in self._found.of)] if first else self._found.of

    def nodes_with(self, key: str) -> list[int]:
        """Nodes that have an attribute, ascending."""
        first = len(self._before)
        found = [index for index, attrs in enumerate(self._before) if key in attrs]
        having = {kind for kind, keys in enumerate(self._found.keys) if key in keys}
        if having:
            found += [index for index, kind in enumerate(self._found.of, first) if kind in having]
        return found

    def function_names(self) -> list[tuple[int, str]]:
        """(node, function) for every attribute that names a function, by node and then by attribute."""
        named = self._found.functions
        having = {kind for kind, functions in enumerate(named) if functions}
        if not having:
            return []
        first = len(self._before)
        return [
            (index, function)
            for index, kind in enumerate(self._found.of, first)
            if kind in having
            for function in named[kind]
        ]


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _call(value: Any) -> FunctionRef:
    return FunctionRef(value.name, NodeAttrs(value.attr))


def _list(value: Any) -> tuple[Any, ...]:
    for kind in ("s", "i", "f", "b", "type", "shape", "tensor", "func"):
        items = getattr(value, kind)
        if len(items):
            return tuple(map(_SCALARS[kind], items))
    return ()


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "s": _text,
    "i": int,
    "f": float,
    "b": bool,
    "type": dtype_name,
    "shape": shape_tuple,
    "tensor": tensor_value,
    "func": _call,
    "list": _list,
    "placeholder": str,
}


Resolve = Callable[[str], "tuple[int, int] | str"]
"""Producer and port of a data input as written, or what is wrong with it."""

_TENSOR_NAME = re.compile(r"(.+):([0-9]{1,9})", re.DOTALL)

_SCALARS_UNTOLD = 21
"""Newest producer, TensorFlow 1.1, whose placeholders have ``shape {}`` whatever their shape is. A graph that names none is as old."""


def to_graph(graph_def: Any, functions: Mapping[str, Function]) -> Graph:
    """The nodes of a GraphDef as a Graph, which keeps it alive. An input that names nothing becomes a `BrokenInput`, not an error."""
    nodes = graph_def.node
    names = [node.name for node in nodes]
    index = numbered(names)

    def resolve(text: str) -> tuple[int, int] | str:
        match = _TENSOR_NAME.fullmatch(text)
        if not match:
            return "has a port that is not a number" if text.partition(":")[0] in index else "names no node"
        producer = index.get(match[1])
        return "names no node" if producer is None else (producer, int(match[2]))

    edges, broken = connect(nodes, index, resolve)
    return Graph(
        names=names,
        ops=interned(node.op for node in nodes),
        devices=interned(node.device for node in nodes),
        attrs=AttrTable(nodes, untold=graph_def.versions.producer <= _SCALARS_UNTOLD),
        edges=edges,
        functions=functions,
        broken_inputs=broken,
    )


def interned(texts: Iterable[str]) -> Sequence[str]:
    """A list that holds each different text once."""
    intern = sys.intern
    return [intern(text) for text in texts]


def connect(
    nodes: Any,
    index: Mapping[str, int],
    resolve: Resolve,
    first: int = 0,
    control_index: Mapping[str, int] | None = None,
) -> tuple[Edges, tuple[BrokenInput, ...]]:
    """Edges of NodeDefs.

    Args:
        nodes: The NodeDefs.
        index: Node number by name: a data input that is found here is port 0 of that node.
        resolve: Resolves all other data inputs.
        first: Number of the first NodeDef.
        control_index: Node number by name for control inputs, where it differs from `index`.

    Returns:
        The edges, and the inputs that could not be made edges.
    """
    src, port, dst, slot = array("i"), array("i"), array("i"), array("i")
    broken: list[BrokenInput] = []
    controls = index if control_index is None else control_index
    sorted_already = True
    for number, node in enumerate(nodes, first):
        position = 0
        control_seen = False
        for text in node.input:
            producer = index.get(text)
            if producer is not None and not control_seen:
                src.append(producer)
                port.append(0)
                dst.append(number)
                slot.append(position)
                position += 1
                continue
            if text.startswith("^"):
                control_seen = True
                producer = controls.get(text[1:])
                if producer is None:
                    broken.append(BrokenInput(number, text, "names no node"))
                    continue
                src.append(producer)
                port.append(CONTROL)
                dst.append(number)
                slot.append(CONTROL)
                continue
            if control_seen:
                broken.append(BrokenInput(number, text, "stands after a control input"))
                sorted_already = False
            found = (producer, 0) if producer is not None else resolve(text)
            if isinstance(found, str):
                broken.append(BrokenInput(number, text, found))
            else:
                src.append(found[0])
                port.append(found[1])
                dst.append(number)
                slot.append(position)
            position += 1
    columns = [
        np.frombuffer(column, dtype=np.int32) if column else np.empty(0, np.int32) for column in (src, port, dst, slot)
    ]
    return (Edges(*columns) if sorted_already else Edges.of(*columns)), tuple(broken)
