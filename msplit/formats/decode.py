"""Attributes as plain values, decoded only when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

from msplit.core.graph import FunctionRef
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
    """What one look at every node of a message finds; see `AttrTable`.

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

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
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
