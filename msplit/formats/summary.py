"""Summaries of model files, and hashes that tell if two hold the same graph.

Summary of a model file: graphs with their tags, signatures and functions. For people who have to choose.

A hash that tells whether two files hold the same graph, whatever streams their nodes are on.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msplit.errors import MsplitError
from msplit.formats import endpoints
from msplit.formats.decode import to_graph
from msplit.formats.endpoints import Endpoints
from msplit.formats.functions import Library
from msplit.formats.model import STREAM_ID, Endpoint, Format, Model, meta_graphs, source_of
from msplit.formats.reader import exported, find_endpoints, main_file, parse, sniff
from msplit.formats.tensors import dtype_name


@dataclass(frozen=True)
class SignatureSummary:
    """A way to run a graph.

    Attributes:
        name: As `--part signature=` takes it.
        method: What TensorFlow Serving offers it as, "" where the file does not say.
    """

    name: str
    method: str
    inputs: tuple[Endpoint, ...]
    outputs: tuple[Endpoint, ...]


@dataclass(frozen=True)
class FunctionHead:
    """A function of the library, without its body.

    Attributes:
        name: As `--part function=` takes it.
        nodes: How many its body has.
        inputs: (name, dtype) of each argument; a dtype that the caller decides goes by its attribute's name.
        outputs: Likewise, of the results.
    """

    name: str
    nodes: int
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class GraphContents:
    """One graph of a file.

    Attributes:
        tags: Of a SavedModel's graph, as `--part tag=` takes them.
        tensorflow: Version that wrote it, "" where the file does not say.
        nodes: Nodes outside of functions.
        inputs: What would be fed where the file names no signature: guessed from the graph.
        outputs: What would be fetched, likewise.
        why_not: Why nothing could be guessed, "" where it could or need not.
    """

    tags: tuple[str, ...]
    tensorflow: str
    nodes: int
    signatures: tuple[SignatureSummary, ...]
    functions: tuple[FunctionHead, ...]
    inputs: tuple[Endpoint, ...] = ()
    outputs: tuple[Endpoint, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class Contents:
    """Contents of a model file, under the path that was given: one graph, of a SavedModel perhaps several."""

    path: Path
    format: Format
    graphs: tuple[GraphContents, ...]


def contents(path: str | Path) -> Contents:
    """Lists what a model file holds, whether or not it can be run as it is. Never imports TensorFlow, never runs the model.

    Raises:
        LoadError: The file can not be read.
    """
    path = exported(Path(path))
    kind = sniff(path)
    message, _ = parse(kind, main_file(path))
    graphs = (_graph(message, around, kind, str(path)) for around in meta_graphs(kind, message))
    return Contents(source_of(path), kind, tuple(graphs))


def _graph(message: Any, around: Any, kind: Format, where: str) -> GraphContents:
    graph_def = message if around is None else around.graph_def
    signatures = () if around is None else tuple(_signature(around, name) for name in endpoints.signature_names(around))
    guessed = Endpoints((), ())
    why_not = ""
    if not signatures:
        try:
            guessed = find_endpoints(to_graph(graph_def, Library(graph_def.library)), around, None, kind, where)
        except MsplitError as problem:
            why_not = problem.what
    return GraphContents(
        tags=() if around is None else tuple(around.meta_info_def.tags),
        tensorflow="" if around is None else around.meta_info_def.tensorflow_version,
        nodes=len(graph_def.node),
        signatures=signatures,
        functions=tuple(_function(function) for function in graph_def.library.function),
        inputs=guessed.inputs,
        outputs=guessed.outputs,
        why_not=why_not,
    )


def _signature(around: Any, name: str) -> SignatureSummary:
    signature = around.signature_def[name]
    ends = endpoints.of_signature(signature)
    return SignatureSummary(name, signature.method_name, ends.inputs, ends.outputs)


def _function(function: Any) -> FunctionHead:
    head = function.signature
    return FunctionHead(head.name, len(function.node_def), _arguments(head.input_arg), _arguments(head.output_arg))


def _arguments(arguments: Any) -> tuple[tuple[str, str], ...]:
    return tuple(
        (argument.name, argument.type_attr or argument.type_list_attr or dtype_name(argument.type))
        for argument in arguments
    )


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
        node = copy.deepcopy(node)
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
    return _digest(model, _structure, _function_signature)


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
    header = copy.deepcopy(function)
    del header.node_def[:]
    yield header.SerializeToString(deterministic=True)


def _function_signature(function: Any) -> Iterable[bytes]:
    """Inputs and outputs of a function, for its digest."""
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
