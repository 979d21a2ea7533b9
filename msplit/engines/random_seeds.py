"""Seeds of random ops that the model gives none, so that every engine draws the same numbers and outputs can be compared."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from msplit.flatten.flat import FlatGraph, original
from msplit.opset.traits import DRAWN_ON_DEVICE


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
