"""In which types outputs were computed on their way: what an output is rounded to says too little about a model of mixed precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import ops_with

_NARROW = ("float16", "bfloat16")
"""From the finer to the coarser."""

_TYPES = ("T", "DstT", "Tout")
"""Attributes that give the types that an op computes in. A loop has a list of them."""

_STORED = ops_with("stored")


def computed_in(flat: FlatGraph) -> Mapping[str, str]:
    """Per output the coarsest narrow type that something it depends on was computed in; outputs without one are left out."""
    graph = flat.graph
    nodes, kind_of = graph.per_kind()
    found: dict[str, str] = {}
    for dtype in _NARROW:
        of_kind = np.fromiter(
            (_computes(graph.ops[node], graph.attrs[node], dtype) for node in nodes), bool, len(nodes)
        )
        rounding: NDArray[np.intp] = np.flatnonzero(of_kind[kind_of])
        if len(rounding):
            reached = graph.descendants(rounding.tolist())
            found |= {output.name: dtype for output in flat.outputs if reached[output.node]}
    return found


def _computes(op: str, attrs: Mapping[str, Any], dtype: str) -> bool:
    if op in _STORED:
        return False
    values = [attrs.get(name) for name in _TYPES]
    return any(value == dtype or (isinstance(value, tuple) and dtype in value) for value in values)
