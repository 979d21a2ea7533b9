"""From a flat graph to ops with their constants: keeps what the outputs need, evaluates what depends on constants only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.core.graph import TensorValue
from msplit.engines.cuda.frontend import partition
from msplit.engines.cuda.frontend.tensor_lists import LISTS
from msplit.engines.cuda.ir.functions import FUNCTIONAL, plain, reachable
from msplit.engines.cuda.ir.graph import STEPS, Key, Op, OpGraph, StandIn
from msplit.engines.cuda.ir.interpret import evaluate
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ops.shape import check_numerics, identity, identity_n
from msplit.engines.seeds import seeds_of
from msplit.errors import EngineError, LoadError
from msplit.flatten.flat import FlatGraph
from msplit.formats.tensors import numpy_dtype
from msplit.opset.traits import DRAWN_ON_DEVICE, VARIABLES

_HANDS_ON = (identity, identity_n, check_numerics)
"""Lowerings that give their inputs back: such ops vanish."""

LARGEST_READ = 1 << 16
"""Bytes: larger constants of floats, which decide no shapes, are not read where only shapes are asked for."""


def build(flat: FlatGraph, fed: Mapping[str, Key], stand_ins: dict[Key, StandIn] | None = None) -> OpGraph:
    """The ops that the outputs need.

    Args:
        fed: Values that come from outside: the model's inputs, and what the host part hands over. Every other node that the
            outputs need must have a lowering: see `partition.refuse`.
        stand_ins: Gets variables and large constants, of which shape and type are then all that is looked at; nothing is evaluated.

    Raises:
        EngineError: A constant expression can not be evaluated.
        LoadError: A constant or a variable can not be read.
    """
    graph = OpGraph(ops={}, constants={}, feeds={}, fetches={}, numbers=len(flat))
    names: dict[Key, Key] = {}
    for name, key in fed.items():
        # A number of its own: the node may be needed too, for another output or because it is fed with a default.
        graph.feeds[name] = names[key] = (graph.fresh(), 0)
    variables: list[int] = []
    for node in reachable(flat.graph, partition.wanted(flat), set(fed.values())):
        op = flat.graph.ops[node]
        inputs = [names.get(key, key) for key in flat.graph.inputs(node)]
        if stand_ins is not None and (found := _stand_in(op, flat.graph.attrs[node])):
            stand_ins[node, 0] = found
        elif op in VARIABLES:
            variables.append(node)
        elif op == "Const":
            graph.constants[node, 0] = _constant(flat, node)
        elif op in DRAWN_ON_DEVICE:
            dtype = flat.graph.attrs[node].get("dtype", "float32")
            attrs, inputs = {"seeds": seeds_of(flat, node), "draws": op, "dtype": dtype}, [*inputs, _steps(graph)]
            graph.ops[node] = Op(node, flat.graph.names[node], "_StatefulRandom", attrs, inputs, [node])
        elif hands_on(op, flat.graph.attrs[node]):
            for port, key in enumerate(inputs):
                names.setdefault((node, port), key)
        else:
            attrs = plain(flat.graph.attrs[node], functions=op in FUNCTIONAL)
            graph.ops[node] = Op(node, flat.graph.names[node], op, attrs, inputs, [node])
    for tensor in flat.outputs:
        graph.fetches[tensor.name] = names.get((tensor.node, tensor.port), (tensor.node, tensor.port))
    if variables:
        values = formats.variables(flat.model, [flat.graph.names[node] for node in variables])
        graph.constants |= {(node, 0): values[flat.graph.names[node]] for node in variables}
    if stand_ins is None:
        fold(graph)
    graph.prune()
    return graph


def _stand_in(op: str, attrs: Mapping[str, Any]) -> StandIn | None:
    """What is known of a variable or a large constant without reading it; None for all else."""
    if op in VARIABLES:
        shape, dtype = attrs.get("shape"), attrs.get("dtype")
        full = tuple(shape) if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape) else None
        return StandIn(full, dtype if isinstance(dtype, str) else "float32")
    value = attrs.get("value") if op == "Const" else None
    if isinstance(value, TensorValue) and value.dtype.startswith(("float", "bfloat", "complex", "half", "double")):
        try:
            size = math.prod(value.shape) * np.dtype(numpy_dtype(value.dtype)).itemsize
        except LoadError:  # of a type that no constant has: reading it says so
            return None
        if size > LARGEST_READ:
            return StandIn(value.shape, value.dtype)
    return None


def _steps(graph: OpGraph) -> Key:
    """The input that says how many steps were run before."""
    if STEPS not in graph.feeds:
        graph.feeds[STEPS] = (graph.fresh(), 0)
    return graph.feeds[STEPS]


def hands_on(op: str, attrs: Mapping[str, Any]) -> bool:
    """Whether an op gives its inputs back, so that it vanishes.

    Nothing assigns, so that a variable has one value, and reading it is the value.
    """
    if op in partition.READS_A_VARIABLE or (op == "Cast" and attrs.get("SrcT") == attrs.get("DstT")):
        return True
    found = table().get(op)
    return found is not None and found.function in _HANDS_ON


def _constant(flat: FlatGraph, node: int) -> NDArray[Any]:
    value, where = flat.graph.attrs[node].get("value"), f"node {flat.graph.names[node]}"
    if not isinstance(value, TensorValue):
        raise EngineError("a Const without a value", where=where, fix="export the model again")
    try:
        return value.load()
    except LoadError as problem:
        raise LoadError(problem.what, where=where, fix=problem.fix or "export the model again") from problem


def fold(graph: OpGraph) -> None:
    """Evaluates on the CPU, once, every op whose inputs are all constants."""
    for number, op in list(graph.ops.items()):
        if op.op not in FUNCTIONAL and op.op not in LISTS and all(key in graph.constants for key in op.inputs):
            results = evaluate(op, [graph.constants[key] for key in op.inputs])
            if results is not None:
                graph.constants |= {(number, port): result for port, result in enumerate(results)}
                del graph.ops[number]
