"""A hash that tells whether two files hold the same graph, whatever streams their nodes are on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msplit.formats.model import Model
from msplit.formats.writer import STREAM_ID


def graph_hash(model: Model) -> str:
    """SHA-256 of the graph, as hexadecimal digits.

    It covers every node (name, op, device, inputs, attributes, constants with their values) in the order of the file, every function
    of the library, and what is fed and fetched. It does not cover `_stream_id`, the values of variables (they are in files of their
    own: training on does not change what streams are good for), versions, or debug information. A binary and a text file of
    one graph have the same hash.
    """
    return _digest(model, _without_id, _header)


def _without_id(node: Any) -> bytes:
    if STREAM_ID in node.attr:
        copy = type(node)()
        copy.CopyFrom(node)
        node = copy
        del node.attr[STREAM_ID]
    data: bytes = node.SerializeToString(deterministic=True)
    return data


_INTEGERS = frozenset({3, 4, 5, 6, 9, 10, 17, 22, 23})
"""Numbers of the integer and boolean types in TensorFlow's `DataType`."""

_MOST_INTEGERS = 4096
"""Elements up to which the values of an integer constant count: above it is data, below it may be a shape, an axis or paddings."""


def structure_hash(model: Model) -> str:
    """SHA-256 of what decides which kernels run, as hexadecimal digits.

    As `graph_hash`, but without what no kernel's time depends on: the values of floating-point and string constants and of large integer
    ones, and attributes whose names begin with an underscore. Training on, or leaving the weights out, changes nothing.
    """
    return _digest(model, _structure, _signature)


def _digest(model: Model, of_node: Callable[[Any], bytes], of_function: Callable[[Any], Iterable[bytes]]) -> str:
    """SHA-256 of the nodes, of the library with its nodes, and of what is fed and fetched."""
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        # With its length before it, no two sequences of pieces give the same bytes.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    def add_nodes(nodes: Sequence[Any]) -> None:
        add(len(nodes).to_bytes(8, "little"))
        for node in nodes:
            add(of_node(node))

    add_nodes(model.graph_def.node)
    for function in sorted(model.graph_def.library.function, key=lambda function: function.signature.name):
        for piece in of_function(function):
            add(piece)
        add_nodes(function.node_def)
    for ends in (model.inputs, model.outputs):
        add("\n".join(f"{end.name}\t{end.tensor}" for end in ends).encode())
    add("\n".join(model.targets).encode())
    return digest.hexdigest()


def _header(function: Any) -> Iterable[bytes]:
    """All of a function but its nodes."""
    header = type(function)()
    header.CopyFrom(function)
    del header.node_def[:]
    yield header.SerializeToString(deterministic=True)


def _signature(function: Any) -> Iterable[bytes]:
    """What a function takes and gives."""
    yield function.signature.SerializeToString(deterministic=True)
    for name, value in sorted(function.ret.items()):
        yield f"{name}\t{value}".encode()


def _structure(node: Any) -> bytes:
    bare = type(node)(name=node.name, op=node.op, device=node.device, input=node.input)
    for key, value in node.attr.items():
        if key.startswith("_"):
            continue
        tensor = value.tensor if node.op == "Const" and key == "value" else None
        size = 0 if tensor is None else math.prod(dim.size for dim in tensor.tensor_shape.dim)
        if tensor is None or (tensor.dtype in _INTEGERS and size <= _MOST_INTEGERS):
            bare.attr[key].CopyFrom(value)
        else:
            bare.attr[key].tensor.dtype = tensor.dtype
            bare.attr[key].tensor.tensor_shape.CopyFrom(tensor.tensor_shape)
    data: bytes = bare.SerializeToString(deterministic=True)
    return data
