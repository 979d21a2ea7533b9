"""Names of variables and seeds of random ops: all engines agree on both, so that their values can be compared."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from msplit.flatten.flat import FlatGraph, original
from msplit.opset.traits import DRAWN_ON_DEVICE, VARIABLES

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
