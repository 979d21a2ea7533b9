"""What a MetaGraphDef says beside its graph: tags, signatures, initializers and train ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.errors import LoadError
from msplit.formats.endpoints import split_tensor

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
    untagged = '; --tag "" takes the one without tags' if () in metas else ""
    found = fitting(metas, tags)
    if len(found) == 1:
        return found[0]
    if tags is None:
        fix = f"choose one with --tag{untagged}"
        raise LoadError(f"the SavedModel holds {len(metas)} graphs: {listed}", where=where, fix=fix)
    how_many = "no graph" if not found else f"{len(found)} graphs"
    raise LoadError(
        f"the SavedModel holds {how_many} with the tags {','.join(tags) or '(none)'}",
        where=where,
        fix=f"choose with --tag one of: {listed}{untagged}",
    )


def fitting(graphs: Sequence[Sequence[str]], tags: Sequence[str] | None) -> list[int]:
    """Which graphs, each given by its tags, somebody means who asks for some: those with just these, else with others, too."""
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
            fix = f"choose with --signature one of: {listed}" if names else "the model has none: leave --signature out"
            raise LoadError(f"there is no signature {asked!r}", where=where, fix=fix)
        return asked
    if DEFAULT_SIGNATURE in names:
        return DEFAULT_SIGNATURE
    if len(names) > 1:
        raise LoadError(f"the model has several signatures: {listed}", where=where, fix="choose one with --signature")
    return names[0] if names else None


def init_ops(meta: Any, *, with_variables: bool) -> tuple[str, ...]:
    """Nodes that initialize the model, in the order in which they are to run.

    Variables' initializers are among them only `with_variables`: not where a checkpoint holds the values.

    Raises:
        LoadError: A collection of variables is damaged.
    """
    from google.protobuf.message import DecodeError

    from msplit.opset import proto

    found: list[str] = []
    collections = meta.collection_def
    if with_variables:
        for key in _VARIABLE_COLLECTIONS:
            for data in collections[key].bytes_list.value if key in collections else ():
                try:
                    variable = proto.variable_pb2.VariableDef.FromString(data)
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
