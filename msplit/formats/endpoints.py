"""Feeds and fetches of a model, and what its MetaGraphDef says of them.

Feeds and fetches of a model: from a signature, or from names that the user gives.

What a MetaGraphDef says beside its graph: tags, signatures, initializers and train ops.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msplit.core.graph import Graph
from msplit.errors import LoadError
from msplit.formats.model import Endpoint
from msplit.formats.tensors import dtype_name, shape_tuple
from msplit.opset import schema
from msplit.opset.traits import PLACEHOLDERS


@dataclass(frozen=True)
class Endpoints:
    """Tensors that are fed and fetched, and nodes that run without being fetched; see `msplit.formats.model.Model`.

    Attributes:
        left_out: Tensors that nothing consumes and that were not taken for outputs; None where nothing was guessed.
    """

    inputs: tuple[Endpoint, ...]
    outputs: tuple[Endpoint, ...]
    targets: tuple[str, ...] = ()
    left_out: tuple[str, ...] | None = None


def of_signature(signature: Any) -> Endpoints:
    """The endpoints of a SignatureDef, in the order of their names."""
    return Endpoints(tuple(_of_tensor_infos(signature.inputs)), tuple(_of_tensor_infos(signature.outputs)))


def _of_tensor_infos(infos: Mapping[str, Any]) -> Iterator[Endpoint]:
    for key in sorted(infos):
        info = infos[key]
        encoding = info.WhichOneof("encoding")
        if encoding == "coo_sparse":
            sparse = info.coo_sparse
            dtypes = {"indices": "int64", "values": dtype_name(info.dtype), "dense_shape": "int64"}
            for part, dtype in dtypes.items():
                yield Endpoint(f"{key}/{part}", *split_tensor(getattr(sparse, f"{part}_tensor_name")), dtype, None)
        elif encoding == "composite_tensor":
            for number, component in enumerate(info.composite_tensor.components):
                yield _endpoint_of_info(f"{key}/{number}", component)
        elif info.name:
            yield _endpoint_of_info(key, info)


def _endpoint_of_info(name: str, info: Any) -> Endpoint:
    return Endpoint(name, *split_tensor(info.name), dtype_name(info.dtype), shape_tuple(info.tensor_shape))


def split_tensor(name: str) -> tuple[str, int]:
    """``"a:1"`` as ``("a", 1)``; without a port it is 0."""
    node, colon, port = name.rpartition(":")
    return (node, int(port)) if colon and port.isascii() and port.isdecimal() and len(port) < 10 else (name, 0)


def behind(graph: Graph, tensor: tuple[int, int], ops: Container[str], most: int = sys.maxsize) -> tuple[int, int]:
    """The tensor that another one is, through nodes of some ops, `most` at most, that hand on their first input."""
    while most and graph.ops[tensor[0]] in ops and (inputs := graph.inputs(tensor[0])):
        tensor, most = inputs[0], most - 1
    return tensor


def check(endpoints: Endpoints, graph: Graph, where: str) -> None:
    """Raises a LoadError where an endpoint names a node that the graph has not."""
    missing = [e for e in (*endpoints.inputs, *endpoints.outputs) if e.node not in graph.index]
    if missing:
        listed = ", ".join(f"{e.name} ({e.tensor})" for e in missing[:5])
        raise LoadError(
            f"the signature names tensors that the graph does not have: {listed}",
            where=where,
            fix="choose another signature with --part signature=, or name the tensors with --part inputs= and outputs=",
        )


def named(names: Sequence[str], known: Sequence[Endpoint], graph: Graph, option: str, where: str) -> list[Endpoint]:
    """Endpoints for names that the user gave: names of the signature, or ``node`` or ``node:1``.

    `known` are the endpoints that the file itself names. Messages name the option that the names were given with, and the file.

    Raises:
        LoadError: A name is not in the graph; names the nearest.
    """
    by_name = {endpoint.name: endpoint for endpoint in known}
    result = []
    for name in names:
        if name in by_name:
            result.append(by_name[name])
            continue
        node, port = (name, 0) if name in graph.index else split_tensor(name)
        index = graph.index.get(node)
        if index is None:
            # Bounded: comparing takes time quadratic in the length of names and linear in their number.
            candidates = dict.fromkeys(n for n in (*by_name, *graph.names[:20_000]) if len(n) < 300)
            near = difflib.get_close_matches(node[:300], candidates, n=3)
            raise LoadError(
                f"{option} names {name!r}, which the graph does not have",
                where=where,
                fix=f"did you mean {', '.join(near)}?" if near else "list the nodes with: msplit analyze --show nodes",
            )
        count = schema.output_count(graph.ops[index], graph.attrs[index])
        if count is not None and port >= max(count, 1):
            raise LoadError(
                f"{option} names {name!r}, but {node!r} ({graph.ops[index]}) has {count} output{'s' * (count != 1)}",
                where=where,
            )
        result.append(endpoint(graph, index, port, name))
    return result


def endpoint(graph: Graph, node: int, port: int, name: str | None = None) -> Endpoint:
    """An endpoint for a port of a node, with what its attributes say about type and shape."""
    return endpoints_of(graph, node, range(port, port + 1), name)[0]


def endpoints_of(graph: Graph, node: int, ports: range, name: str | None = None) -> list[Endpoint]:
    """Endpoints for some ports of a node: what its attributes say is looked up once for all."""
    attrs, op, node_name = graph.attrs[node], graph.ops[node], graph.names[node]
    dtypes = schema.output_dtypes(op, attrs, ports.stop) or ()
    own = attrs.get("dtype") or ""
    fed = attrs.get("shape") if op in PLACEHOLDERS else None
    inferred = attrs.get("_output_shapes") or attrs.get("output_shapes") or _from_queue(graph, node)
    result = []
    for port in ports:
        dtype = (dtypes[port] if 0 <= port < len(dtypes) else None) or own
        shape = inferred[port] if fed is None and isinstance(inferred, tuple) and port < len(inferred) else fed
        # Attributes of a damaged file may hold anything.
        dtype = dtype if isinstance(dtype, str) else ""
        shape = shape if isinstance(shape, tuple) and all(size is None or type(size) is int for size in shape) else None
        result.append(Endpoint(name or (f"{node_name}:{port}" if port else node_name), node_name, port, dtype, shape))
    return result


def _from_queue(graph: Graph, node: int) -> object:
    """The shapes of what an op takes from a queue, as the queue has them; None where the op is another or the queue says nothing."""
    op = graph.ops[node].removesuffix("V2")
    if not op.startswith("QueueDequeue") or not (inputs := graph.inputs(node)):
        return None
    shapes = graph.attrs[inputs[0][0]].get("shapes")
    if op == "QueueDequeue" or not isinstance(shapes, tuple):
        return shapes
    return tuple((None, *shape) if isinstance(shape, tuple) else None for shape in shapes)


def has_outputs(graph: Graph, node: int) -> bool:
    """True if a node gives a tensor, as far as its op is known."""
    return schema.output_count(graph.ops[node], graph.attrs[node]) != 0


DEFAULT_SIGNATURE = "serving_default"
MAIN_OP = "saved_model_main_op"
_INIT_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
_INIT_COLLECTIONS = (MAIN_OP, "legacy_init_op", "init_op", "local_init_op", "table_initializer")
_VARIABLE_COLLECTIONS = ("variables", "local_variables", "model_variables", "metric_variables")


def choose_meta_graph(saved_model: Any, tags: Sequence[str] | None, where: str) -> int:
    """Index of the MetaGraphDef with these tags; without tags the only one.

    Raises:
        LoadError: There is none, or more than one; lists them.
    """
    metas = [tuple(meta.meta_info_def.tags) for meta in saved_model.meta_graphs]
    if not metas:
        raise LoadError("the SavedModel holds no graph", where=where, fix="export the model again")
    listed = "; ".join(",".join(one) or "(no tags)" for one in metas)
    untagged = '; --part tag="" takes the one without tags' if () in metas else ""
    found = fitting(metas, tags)
    if len(found) == 1:
        return found[0]
    if tags is None:
        fix = f"choose one with --part tag=TAGS{untagged}"
        raise LoadError(f"the SavedModel holds {len(metas)} graphs: {listed}", where=where, fix=fix)
    how_many = "no graph" if not found else f"{len(found)} graphs"
    raise LoadError(
        f"the SavedModel holds {how_many} with the tags {','.join(tags) or '(none)'}",
        where=where,
        fix=f"choose with --part tag= one of: {listed}{untagged}",
    )


def fitting(graphs: Sequence[Sequence[str]], tags: Sequence[str] | None) -> list[int]:
    """Graphs, each given by its tags, that fit the tags which a user asks for: those with just these, else with others, too."""
    if tags is None:
        return [*range(len(graphs))]
    exact = [i for i, one in enumerate(graphs) if set(one) == set(tags)]
    return exact or [i for i, one in enumerate(graphs) if set(tags) <= set(one)]


def signature_names(meta: Any) -> tuple[str, ...]:
    """Names of the signatures that a user can run."""
    return tuple(sorted(name for name in meta.signature_def if name not in _INIT_SIGNATURES))


def choose_signature(names: Sequence[str], asked: str | None, where: str) -> str | None:
    """The signature asked for, else ``serving_default``, else the only one, else None where there is none.

    Raises:
        LoadError: It is not there, or there is a choice to make; lists them.
    """
    listed = ", ".join(names)
    if asked is not None:
        if asked not in names:
            fix = f"--part signature= is one of: {listed}" if names else "it has none: leave --part signature= out"
            raise LoadError(f"there is no signature {asked!r}", where=where, fix=fix)
        return asked
    if DEFAULT_SIGNATURE in names:
        return DEFAULT_SIGNATURE
    if len(names) > 1:
        raise LoadError(f"the model has several signatures: {listed}", where=where, fix="give --part signature=")
    return names[0] if names else None


def init_ops(meta: Any, *, with_variables: bool) -> tuple[str, ...]:
    """Nodes that initialize the model, in the order in which they are to run.

    Variables' initializers are among them only `with_variables`: not where a checkpoint holds the values.

    Raises:
        LoadError: A collection of variables is damaged.
    """
    from google.protobuf.message import DecodeError

    found: list[str] = []
    collections = meta.collection_def
    if with_variables:
        for key in _VARIABLE_COLLECTIONS:
            for data in collections[key].bytes_list.value if key in collections else ():
                try:
                    variable = schema.variable_pb2.VariableDef.FromString(data)
                except (DecodeError, RecursionError, UnicodeDecodeError) as error:
                    raise LoadError(f"collection {key!r} holds a damaged variable: {error}") from None
                found.append(variable.initializer_name)
    if _INIT_SIGNATURES[0] in meta.signature_def:
        outputs = meta.signature_def[_INIT_SIGNATURES[0]].outputs
        found += [outputs[key].name for key in sorted(outputs)]
    for key in _INIT_COLLECTIONS:
        found += collection_names(meta, key)
    return tuple(dict.fromkeys(split_tensor(name)[0] for name in found if name))


def collection_names(meta: Any, key: str) -> list[str]:
    """Names of the nodes or tensors of a collection."""
    if key not in meta.collection_def:
        return []
    collection = meta.collection_def[key]
    if collection.WhichOneof("kind") == "bytes_list":
        return [data.decode(errors="replace") for data in collection.bytes_list.value]
    return list(collection.node_list.value)
