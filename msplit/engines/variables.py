"""Names of variables and seeds of random ops: all engines agree on both, so that their values can be compared."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.core.graph import TensorValue
from msplit.engines.table_rows import RoundedTables, TableOptions, divided
from msplit.flatten.flat import FlatGraph, original
from msplit.formats.tensors import numpy_dtype
from msplit.opset.traits import DRAWN_ON_DEVICE, GATHERS, VARIABLES, ops_with, traits

_HANDS_ON = ops_with("hands on weights") | (ops_with("reads weights") & ops_with("reads by handle"))
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
"""The shared name by which TensorFlow marks a resource that nobody else can name."""


def storage(op: str, name: str, attrs: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Storage that a handle refers to: two handles with the same one are the same resource."""
    shared = attrs.get("shared_name")
    if not isinstance(shared, str) or shared == _ANONYMOUS:
        return None
    return (op, str(attrs.get("container") or ""), shared or name)


def variable_names(flat: FlatGraph) -> dict[int, str]:
    """The name of the variable of each node that refers to one: that of the first node that refers to its storage."""
    found: dict[Any, str] = {}
    names: dict[int, str] = {}
    for node, op in enumerate(flat.graph.ops):
        if op in VARIABLES:
            name = flat.graph.names[node]
            names[node] = found.setdefault(storage(op, name, flat.graph.attrs[node]) or name, name)
    return names


def table_value(flat: FlatGraph, state: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    """Value of a variable, or of a constant: that of a state, or of the model's files."""
    value = flat.graph.attrs[flat.graph.index[name]].get("value") if name in flat.graph.index else None
    if name in state or not isinstance(value, TensorValue):
        return state[name] if name in state else formats.variables(flat.model, [name])[name]
    return value.load()


def rounded_tables(flat: FlatGraph, tables: TableOptions | None) -> RoundedTables:
    """Tables of float32 that leave the GPU, where their rows are to be int8 or bf16: those of which rows are looked up and nothing
    else is read, variables and constants of frozen graphs."""
    if tables is None or not tables.rows:
        return RoundedTables()
    graph, nodes = flat.graph, dict[str, set[int]]()
    for node, name in variable_names(flat).items():
        nodes.setdefault(name, set()).add(node)
    looks = {
        name: (graph.attrs[min(own)].get("dtype"), graph.attrs[min(own)].get("shape")) for name, own in nodes.items()
    }
    for node, attrs in enumerate([] if flat.model.is_saved_model else graph.attrs):
        if isinstance(value := attrs.get("value"), TensorValue):
            nodes[graph.names[node]], looks[graph.names[node]] = {node}, (value.dtype, value.shape)
    sizes, needed = dict[str, int](), graph.ancestors([*(tensor.node for tensor in flat.outputs), *flat.targets])
    for name, (dtype, shape) in sorted(looks.items()):
        known = isinstance(shape, tuple) and len(shape) > 1 and None not in shape and math.prod(shape)
        if known and read_by_rows(flat, nodes[name], needed):
            sizes[name] = known * np.dtype(numpy_dtype(str(dtype))).itemsize
    names = [*sizes]
    hosted, _ = divided([*sizes.values()], tables.bytes)
    return RoundedTables([names[at] for at in hosted if looks[names[at]][0] == "float32"], tables.rows)


def read_by_rows(flat: FlatGraph, nodes: set[int], needed: NDArray[np.bool_]) -> tuple[set[int], set[int]] | None:
    """Nodes that hand a variable on, itself among them, and those that look its rows up; None where anything else reads it that a step
    needs."""
    graph, held, lookups = flat.graph, {*nodes}, set[int]()
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        for user, slot in graph.uses(node, 0):
            if graph.ops[user] in GATHERS and slot == traits(graph.ops[user]).table:
                lookups |= {user} if needed[user] else set()
            elif graph.ops[user] in _HANDS_ON and user not in held:
                held.add(user)
                waiting.append(user)
            elif needed[user] and user not in held:
                return None
    return None if held & {tensor.node for tensor in flat.outputs} or not lookups else (held, lookups)


def seeds(function: str, name: str, seed: int, seed2: int) -> tuple[int, int]:
    """Both seeds of a random op: its own, or, where both are zero, which asks TensorFlow for any, some that follow from its name.

    `function` is the one that it is in, "" for none, and `name` its name there.
    """
    if seed or seed2:
        return seed, seed2
    return zlib.crc32(f"{function}/{name}".encode()) % (1 << 31), 1


def seeds_of(flat: FlatGraph, node: int) -> tuple[int, int]:
    """Those of a node of a flat graph."""
    function, number = flat.origin(node)
    name = original(flat, int(flat.origin_function[node]), number)[1] if number >= 0 else flat.graph.names[node]
    attrs = flat.graph.attrs[node]
    return seeds(function or "", name, _number(attrs.get("seed")), _number(attrs.get("seed2")))


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def remark(flat: FlatGraph, nodes: Sequence[int]) -> str | None:
    """Note for the user about the random ops among some nodes: None where there are none, or all have a seed."""
    graph = flat.graph
    random = [node for node in nodes if graph.ops[node] in DRAWN_ON_DEVICE]
    unseeded = [graph.names[node] for node in random if not any(map(graph.attrs[node].get, ("seed", "seed2")))]
    if not unseeded:
        return None
    many = len(unseeded) > 1
    return (
        f"{len(unseeded)} random op{'s' * many} without a seed (such as {unseeded[0]}) {'get' if many else 'gets'} one that follows "
        f"from {'their names' if many else 'its name'}, here and in TensorFlow, so that outputs can be compared: "
        "dropout is rarely meant to be in a model that serves"
    )
