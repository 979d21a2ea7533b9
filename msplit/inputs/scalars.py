"""Inputs that are one number: what keeps dropout, whether this is training, how fast to learn.

TensorFlow 1 programs leave their rank open. One element for each of a batch would broadcast against the wrong axis, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.flatten.flat import FlatGraph
from msplit.inputs.lookups import is_constant_array
from msplit.opset.traits import ops_with, traits

_UNARY, _BINARY, _LOOKS = ops_with("keeps one value"), ops_with("keeps two values"), ops_with("asks for shapes")
_KEPT = re.compile(r"keep(ing)?_?(prob|rate)", re.IGNORECASE)
_DROPPED = re.compile(r"drop(out|ped)?(_?(rate|prob))?(_\d+)?$|(^|[/_])rate(_\d+)?$", re.IGNORECASE)
_LEARNS = re.compile(r"learn(ing)?_?rate|(^|[/_])lr(_\d+)?$", re.IGNORECASE)
_TRAINS = re.compile(r"train|learning_phase|(^|[/_])phase(_\d+)?$", re.IGNORECASE)
_RATE = 0.001


def scalars(flat: FlatGraph, unknown: Iterable[tuple[str, int, int]], known: Iterable[int]) -> frozenset[str]:
    """Which inputs of unknown rank, each (name, node, port), are scalars; `known` are the nodes of inputs that have dimensions."""
    unknown = list(unknown)
    if not unknown:
        return frozenset()
    none = np.zeros(len(flat), np.bool_)
    data = [node for _, node, port in unknown if _judge(flat, node, port, none) is False]
    reached = flat.graph.descendants([*known, *data])
    judged = {name: _judge(flat, node, port, reached) for name, node, port in unknown}
    return frozenset(name for name, one in judged.items() if one or (one is None and setting(name) is not None))


def setting(name: str, dtype: str = "float32") -> NDArray[Any] | None:
    """The value that inference gives a scalar of this name: keep everything, drop nothing, do not train; None for other names."""
    if dtype == "bool":
        return np.asarray(False) if _TRAINS.search(name) else None
    for pattern, value in ((_KEPT, 1.0), (_LEARNS, _RATE), (_DROPPED, 0.0)):
        if pattern.search(name):
            return np.asarray(value)
    return np.asarray(0.0) if _TRAINS.search(name) else None


def _judge(flat: FlatGraph, node: int, port: int, data: NDArray[np.bool_]) -> bool | None:
    """True for what scales, decides or bounds; False for what is worked on; None where neither can be told."""
    graph = flat.graph
    scalar: bool | None = True if graph.attrs[node].get("dtype") == "bool" else None
    seen = {node}
    waiting = [(node, port)]
    while waiting:
        source, at = waiting.pop()
        for user, slot in graph.uses(source, at):
            op = graph.ops[user]
            if slot in traits(op).scalars or (slot and "Apply" in op):
                scalar = True
                continue
            if op in _BINARY:
                if data[graph.inputs(user)[1 - slot][0]]:
                    scalar = True
                    continue
                if is_constant_array(flat, user, 1 - slot):
                    return False
            elif op not in _UNARY:
                if op in _LOOKS or op == "Switch":  # the pivots of a cond switch the predicate itself
                    continue
                return False
            if user not in seen:
                seen.add(user)
                waiting.append((user, 0))
    return scalar
