"""What a model file holds: graphs with their tags, signatures and functions. For people who have to choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msplit.errors import MsplitError
from msplit.formats import endpoints, meta
from msplit.formats.endpoints import Endpoints
from msplit.formats.functions import Library
from msplit.formats.graphdef import to_graph
from msplit.formats.model import Endpoint, Format, meta_graphs
from msplit.formats.reader import find_endpoints, parse
from msplit.formats.sniffer import main_file, sniff
from msplit.formats.tensors import dtype_name


@dataclass(frozen=True)
class Signature:
    """A way to run a graph.

    Attributes:
        name: As `--signature` takes it.
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
        name: As `--function` takes it.
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
        tags: Of a SavedModel's graph, as `--tag` takes them.
        tensorflow: Version that wrote it, "" where the file does not say.
        nodes: Nodes outside of functions.
        inputs: What would be fed where the file names no signature: guessed from the graph.
        outputs: What would be fetched, likewise.
        why_not: Why nothing could be guessed, "" where it could or need not.
    """

    tags: tuple[str, ...]
    tensorflow: str
    nodes: int
    signatures: tuple[Signature, ...]
    functions: tuple[FunctionHead, ...]
    inputs: tuple[Endpoint, ...] = ()
    outputs: tuple[Endpoint, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class Contents:
    """What a model file holds, under the path that was given: one graph, of a SavedModel perhaps several."""

    path: Path
    format: Format
    graphs: tuple[GraphContents, ...]


def contents(path: str | Path) -> Contents:
    """Lists what a model file holds, whether or not it can be run as it is. Never imports TensorFlow, never runs the model.

    Raises:
        LoadError: The file can not be read.
    """
    path = Path(path)
    kind = sniff(path)
    message, _ = parse(kind, main_file(path))
    graphs = (_graph(message, around, kind, str(path)) for around in meta_graphs(kind, message))
    return Contents(path, kind, tuple(graphs))


def _graph(message: Any, around: Any, kind: Format, where: str) -> GraphContents:
    graph_def = message if around is None else around.graph_def
    signatures = () if around is None else tuple(_signature(around, name) for name in meta.signature_names(around))
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


def _signature(around: Any, name: str) -> Signature:
    signature = around.signature_def[name]
    ends = endpoints.of_signature(signature)
    return Signature(name, signature.method_name, ends.inputs, ends.outputs)


def _function(function: Any) -> FunctionHead:
    head = function.signature
    return FunctionHead(head.name, len(function.node_def), _arguments(head.input_arg), _arguments(head.output_arg))


def _arguments(arguments: Any) -> tuple[tuple[str, str], ...]:
    return tuple(
        (argument.name, argument.type_attr or argument.type_list_attr or dtype_name(argument.type))
        for argument in arguments
    )
