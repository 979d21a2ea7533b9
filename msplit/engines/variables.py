"""Names the variable that a node refers to: every engine names state alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import VARIABLES

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
