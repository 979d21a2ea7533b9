"""From a flat graph to ops with their constants: keeps what the outputs need, evaluates what depends on constants only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.core.graph import TensorValue
from msplit.engines.base import LOSS_SCALE, STEPS
from msplit.engines.cuda.frontend import partition
from msplit.engines.cuda.frontend.loss_scale import scale_loss
from msplit.engines.cuda.frontend.tensor_lists import LISTS
from msplit.engines.cuda.frontend.variables import Variables, effects_of, keep_overwritten
from msplit.engines.cuda.ir.functions import FUNCTIONAL, plain, reachable
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, StandIn
from msplit.engines.cuda.ir.interpret import evaluate
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ops.shape import identity, identity_n
from msplit.engines.random_seeds import seeds_of
from msplit.engines.variables import variable_names
from msplit.errors import EngineError, LoadError
from msplit.flatten.flat import FlatGraph
from msplit.formats.tensors import numpy_dtype
from msplit.opset import schema
from msplit.opset.traits import DRAWN_ON_DEVICE, VARIABLES, ops_with

_HANDS_ON = (identity, identity_n)
"""Lowerings that give their inputs back: such ops vanish."""

LARGEST_READ = 1 << 16
"""Bytes: larger constants of floats, which decide no shapes, are not read where only shapes are asked for."""


def build(
    flat: FlatGraph,
    fed: Mapping[str, Key],
    stand_ins: dict[Key, StandIn] | None = None,
    state: Mapping[str, NDArray[Any]] | None = None,
    constants: Mapping[Key, NDArray[Any]] | None = None,
) -> OpGraph:
    """The ops that the outputs need, and those that write variables.

    Args:
        fed: Values that come from outside: the model's inputs, and what the host part hands over. Every other node that the
            outputs need must have a lowering: see `partition.refuse`.
        stand_ins: Gets variables and large constants, of which shape and type are then all that is looked at; nothing is evaluated.
        state: Values of variables before the first step; those that are not there are the model's own. With a `LOSS_SCALE`, the loss is
            scaled.
        constants: Values that are constants whatever is fed.

    Raises:
        EngineError: A constant expression can not be evaluated.
        LoadError: A constant or a variable can not be read.
    """
    graph = OpGraph(ops={}, constants={}, feeds={}, fetches={}, numbers=len(flat))
    names: dict[Key, Key] = {}
    effects = effects_of(flat)
    variables = Variables(flat, graph, names, written=bool(effects.writes))
    for name, key in fed.items():
        # A number of its own: the node may be needed too, for another output or because it is fed with a default.
        graph.feeds[name] = names[key] = (graph.fresh(), 0)
    frozen: list[int] = []
    roots = [*partition.wanted(flat), *((node, 0) for node in effects.writes)]
    graph.constants |= constants or {}
    needed = reachable(flat.graph, roots, {*fed.values(), *graph.constants})
    among = set(needed)
    for node in effects.nodes if effects.writes else needed:
        op = flat.graph.ops[node]
        variables.visit(node)
        if node not in among or variables.takes(node):
            continue
        inputs = variables.inputs(node)
        if stand_ins is not None and (found := _stand_in(op, flat.graph.attrs[node])):
            stand_ins[node, 0] = found
        elif op in VARIABLES:
            frozen.append(node)
        elif op == "Const":
            graph.constants[node, 0] = _constant(flat, node)
        elif op in DRAWN_ON_DEVICE:
            attrs = {"dtype": "float32", **plain(flat.graph.attrs[node]), "seeds": seeds_of(flat, node), "draws": op}
            name = "_SampleCandidates" if op in ops_with("draws classes") else "_StatefulRandom"
            graph.ops[node] = Op(node, flat.graph.names[node], name, attrs, [*inputs, _steps(graph)], [node])
        elif hands_on(op, flat.graph.attrs[node]):
            for port, key in enumerate(inputs):
                names.setdefault((node, port), key)
        else:
            attrs = plain(flat.graph.attrs[node], functions=op in FUNCTIONAL)
            graph.ops[node] = Op(node, flat.graph.names[node], op, attrs, inputs, [node])
    for tensor in flat.outputs:
        if schema.output_count(flat.graph.ops[tensor.node], flat.graph.attrs[tensor.node]) == 0:
            continue  # a train step: it runs, and gives nothing
        graph.fetches[tensor.name] = names.get((tensor.node, tensor.port), (tensor.node, tensor.port))
    if frozen:
        own, known = variable_names(flat), state or {}
        given = {flat.graph.names[node]: known[own[node]] for node in frozen if own[node] in known}
        values = initial_values(flat, [flat.graph.names[node] for node in frozen], given)
        graph.constants |= {(node, 0): values[flat.graph.names[node]] for node in frozen}
    variables.finish()
    if stand_ins is None:
        graph.initial = initial_values(flat, graph.state, state or {})
        if LOSS_SCALE in (state or {}):
            scale_loss(graph)
        fold(graph)
    else:
        attrs = {name: flat.graph.attrs[node] for node, name in variables.nodes.items()}
        stand_ins |= {key: _of_variable(attrs[name]) for name, key in graph.state.items()}
    graph.prune()
    keep_overwritten(graph)
    return graph


def initial_values(flat: FlatGraph, names: Iterable[str], given: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What variables are before the first step: as given, or as the model's checkpoint has them.

    Raises:
        LoadError: A variable has no value.
    """
    missing = [name for name in names if name not in given]
    stored = formats.variables(flat.model, missing) if missing else {}
    return {name: np.asarray(given[name] if name in given else stored[name]) for name in names}


def _stand_in(op: str, attrs: Mapping[str, Any]) -> StandIn | None:
    """What is known of a variable or a large constant without reading it; None for all else."""
    if op in VARIABLES:
        return _of_variable(attrs)
    value = attrs.get("value") if op == "Const" else None
    if isinstance(value, TensorValue) and value.dtype.startswith(("float", "bfloat", "complex", "half", "double")):
        try:
            size = math.prod(value.shape) * np.dtype(numpy_dtype(value.dtype)).itemsize
        except LoadError:  # of a type that no constant has: reading it says so
            return None
        if size > LARGEST_READ:
            return StandIn(value.shape, value.dtype)
    return None


def _of_variable(attrs: Mapping[str, Any]) -> StandIn:
    shape, dtype = attrs.get("shape"), attrs.get("dtype")
    full = tuple(shape) if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape) else None
    return StandIn(full, dtype if isinstance(dtype, str) else "float32")


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
