"""Import of a flat graph: ops, constants, and the loss scale of a training in float16.

From a flat graph to ops with their constants: keeps what the outputs need, evaluates what depends on constants only.

Loss scaling for training in float16, whose smallest numbers gradients would fall below.

The chain of gradients begins at a constant, what a loss changes by with itself, and every op of it is linear. So that constant is
multiplied by the scale, and wherever something that is not linear reads what is scaled (the update of a variable, the norm that gradients
are clipped by, a sum with what is not scaled) it reads it unscaled: the scale is a power of two, and nothing else changes. In a step in
which one of these is not finite no variable changes, and the scale is halved; see `ops.optimizers`. All of it runs on the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.core.graph import TensorValue
from msplit.engines.base import FIRST_SCALE, GOOD_STEPS, LOSS_SCALE, STEPS
from msplit.engines.cuda.frontend import partition
from msplit.engines.cuda.frontend.tensor_lists import LISTS
from msplit.engines.cuda.frontend.variables import Variables, effects_of, keep_overwritten, table_of
from msplit.engines.cuda.ir.functions import FUNCTIONAL, plain, reachable
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, StandIn, mutated
from msplit.engines.cuda.ir.interpret import evaluate
from msplit.engines.cuda.kernels.optimizer_formulas import OPTIMIZERS, ROW_OPTIMIZERS
from msplit.engines.cuda.ops.shape import hands_on
from msplit.engines.cuda.ops.variables import TOGETHER
from msplit.engines.table_rows import KeyedTable
from msplit.engines.variables import seeds_of, variable_names
from msplit.errors import EngineError, LoadError
from msplit.flatten.flat import FlatGraph
from msplit.formats.tensors import numpy_dtype
from msplit.opset import schema
from msplit.opset.traits import DRAWN_ON_DEVICE, DRAWS, HALF, LINEAR_IN_ONE, LINEAR_TOGETHER, VARIABLES, Half, ops_with

_SCALED_ALREADY = re.compile(r"(^|/)(current_loss_scale|dynamic_scale|loss_scale)(_\d+)?$")
"""Names of the variable that TensorFlow 1, Keras 2 and Keras 3 have of their own."""

_FIX = "train in bfloat16 (--precision bf16), which has the range of float32 and needs no scale"


def scale_loss(graph: OpGraph) -> None:
    """Scales the losses of a graph that trains, whose constants are not folded yet. One that does so itself is left alone.

    Raises:
        EngineError: Where gradients begin is not to be found, or a variable is written in a way that can not be left out.
    """
    if not graph.final or any(_SCALED_ALREADY.search(name) for name in graph.state):
        return
    seeds, scaled = _chain(graph)
    scale, steps = (graph.fresh(), 0), (graph.fresh(), 0)
    graph.state |= {LOSS_SCALE: scale, GOOD_STEPS: steps}
    graph.initial = {**graph.initial, **FIRST_SCALE}
    finite = _unscale(graph, scaled, scale)
    writes = [op for op in graph.ops.values() if mutated(op)]
    for op in writes:
        _guard(graph, op, finite)
    for seed in seeds:
        _scale(graph, seed, scaled, scale)
    like = writes[-1]
    update = graph.add("_UpdateLossScale", like, {"_mutates": (0, 1)}, [scale, steps, finite])
    graph.final |= {LOSS_SCALE: update.out, GOOD_STEPS: (update.node, 1)}


def _chain(graph: OpGraph) -> tuple[list[Key], set[Key]]:
    """The constants that chains of gradients begin with, and all values that are scaled with them.

    Of several that some gradients depend on linearly it is the one that most ops follow, one that is 1 before others: what a loss changes
    by with itself. A second loss may have one of its own.
    """
    readers = graph.consumers()
    updating = _before_writes(graph)
    found: list[tuple[bool, int, Key, set[Key]]] = []
    for key in graph.constants:
        if key in readers and _is_uniform(graph.constants[key]):
            scaled = _scaled(graph, {key})
            made = {graph.ops[one[0]].node for one in scaled if one[0] in graph.ops} & updating
            if any(HALF.get(graph.ops[number].op) is Half.GAINS for number in made):
                found.append((graph.constants[key].reshape(-1)[0] != 1, -len(made), key, scaled))
    if not found:
        raise EngineError(
            "in float16 small gradients become zero unless the loss is scaled, and where gradients begin in this graph is not to be found",
            fix=_FIX,
        )
    seeds, scaled = list[Key](), set[Key]()
    for _, _, key, own in sorted(found, key=lambda one: one[:3]):
        if own.isdisjoint(scaled):
            seeds.append(key)
            scaled |= own
    return seeds, scaled


def _is_uniform(value: NDArray[np.generic]) -> bool:
    """Checks that all elements are one number of float32, other than zero."""
    if value.dtype != np.float32 or not value.size:
        return False
    first = value.reshape(-1)[0]
    return bool(np.isfinite(first) and first != 0 and np.all(value == first))


def _before_writes(graph: OpGraph) -> set[int]:
    """Ops that something which writes variables needs."""
    found: set[int] = set()
    for number, op in reversed(graph.ops.items()):
        if mutated(op) or number in found:
            found |= {key[0] for key in op.inputs if key[0] in graph.ops}
    return found


def _scaled(graph: OpGraph, seeds: Set[Key]) -> set[Key]:
    """All values that are scaled where some constants are."""
    read: dict[int, set[Key]] = {}  # per op, which of its outputs something reads
    for key in (*graph.consumers(), *graph.fetches.values()):
        read.setdefault(key[0], set()).add(key)
    found = set(seeds)
    for number, op in graph.ops.items():
        if not found.isdisjoint(op.inputs) and not _reads_unscaled(graph, op, found):
            found |= {(number, 0)} | read.get(number, set())
    return found


def _reads_unscaled(graph: OpGraph, op: Op, scaled: Set[Key]) -> bool:
    """Checks for an op that reads scaled values and is not linear in them, so that its results would not be scaled."""
    there = [slot for slot, key in enumerate(op.inputs) if key in scaled]
    if op.op in LINEAR_TOGETHER:
        of_scale = LINEAR_TOGETHER[op.op] or tuple(range(op.attrs.get("N", len(op.inputs))))
        others = [slot for slot in of_scale if slot not in there]
        return not set(there) <= set(of_scale) or not all(_is_zero(graph, op.inputs[slot]) for slot in others)
    if op.op == "Cast" and op.attrs.get("DstT") not in ("float32", "float16", "bfloat16"):
        return True
    return len(there) != 1 or there[0] not in LINEAR_IN_ONE.get(op.op, ())


def _is_zero(graph: OpGraph, key: Key) -> bool:
    value, maker = graph.constants.get(key), graph.ops.get(key[0])
    if value is not None:
        return value.dtype.kind == "f" and not value.any()
    if maker is not None and maker.op == "Fill":
        return _is_zero(graph, maker.inputs[1])
    return maker is not None and maker.op == "ZerosLike"


def _unscale(graph: OpGraph, scaled: set[Key], scale: Key) -> Key:
    """Lets what is not linear, and who fetches, read unscaled values. Gives the one that tells whether all of these are finite.

    Values are unscaled together as far as one does not depend on another.
    """
    # Values that something reads which is not linear in them, by how many others on the way to them are unscaled.
    wanted: dict[Key, list[Op]] = {}
    level: dict[int, int] = {}  # per op, how many values on its longest way were unscaled
    levels: dict[int, list[Key]] = {}
    for number, op in graph.ops.items():
        unscaled = set() if op.out in scaled else scaled.intersection(op.inputs)
        level[number] = max((level.get(key[0], 0) + (key in unscaled) for key in op.inputs), default=0)
        for key in op.inputs:
            if key in unscaled and key[0] in graph.ops:
                wanted.setdefault(key, []).append(op)
    fetched = {name: key for name, key in graph.fetches.items() if key in scaled and key[0] in graph.ops}
    for key in dict.fromkeys([*wanted, *fetched.values()]):
        levels.setdefault(level[key[0]], []).append(key)
    # One op unscales all of a level, and tells if they are finite.
    flags, names = [], dict[Key, Key]()
    for keys in levels.values():
        like = graph.ops[keys[0][0]]
        number = graph.add("_Unscale", like, {}, [scale, *keys]).node
        names |= {key: (number, port) for port, key in enumerate(keys)}
        flags.append((number, len(keys)))
    for key, ops in wanted.items():
        for op in ops:
            op.inputs = [names[key] if one == key else one for one in op.inputs]
    graph.fetches |= {name: names[key] for name, key in fetched.items()}
    if len(flags) == 1:
        return flags[0]
    return graph.add("_AllTrue", graph.ops[flags[0][0]], {}, flags).out


def _scale(graph: OpGraph, seed: Key, scaled: Set[Key], scale: Key) -> None:
    """Lets the chain begin with the scaled constant."""
    readers = [graph.ops[number] for number in graph.consumers().get(seed, ()) if (number, 0) in scaled]
    made = graph.add("Mul", readers[0], {"T": "float32"}, [seed, scale]).out
    for op in readers:
        op.inputs = [made if key == seed else key for key in op.inputs]


def _guard(graph: OpGraph, op: Op, finite: Key) -> None:
    """Lets an op that writes variables leave them as they are where gradients are not finite.

    Raises:
        EngineError: Nobody knows how.
    """
    if op.op in OPTIMIZERS or op.op in ROW_OPTIMIZERS or op.op in ops_with("changes rows"):
        op.inputs.append(finite)
        op.attrs["guarded"] = True
    elif op.op in TOGETHER:
        variable, value = op.inputs
        zero = graph.constant(np.zeros((), _dtype_of(graph, variable)))
        other = variable if op.op == "Assign" else zero
        op.inputs[1] = graph.add("SelectV2", op, {"T": op.attrs.get("T")}, [finite, value, other]).out
    elif op.op not in DRAWS:
        raise EngineError(
            f"{op.op} writes a variable, and in float16 a step is left out where gradients overflow, which this op can not be",
            where=f"node {op.name}",
            fix=_FIX,
        )


def _dtype_of(graph: OpGraph, key: Key) -> np.dtype[np.generic]:
    """The type of a variable, as the step begins or as a write has left it."""
    while key[0] in graph.ops:
        op = graph.ops[key[0]]
        key = op.inputs[mutated(op)[key[1]]]
    return next(graph.initial[name].dtype for name, one in graph.state.items() if one == key)


LARGEST_READ = 1 << 16
"""Bytes: larger constants of floats, which decide no shapes, are not read where only shapes are asked for."""


def build(
    flat: FlatGraph,
    fed: Mapping[str, Key],
    stand_ins: dict[Key, StandIn] | None = None,
    state: Mapping[str, NDArray[Any]] | None = None,
    constants: Mapping[Key, NDArray[Any]] | None = None,
    keyed: Mapping[int, KeyedTable] | None = None,
) -> OpGraph:
    """The ops that the outputs need, and those that write variables.

    Args:
        fed: Values that come from outside: the model's inputs, and what the host part hands over. Every other node that the
            outputs need must have a lowering: see `partition.refuse`.
        stand_ins: Gets variables and large constants, of which shape and type are then all that is looked at; nothing is evaluated.
        state: Values of variables before the first step; those that are not there are the model's own. With a `LOSS_SCALE`, the loss is
            scaled.
        constants: Values that are constants whatever is fed.
        keyed: Tables of nodes that look keys up on the device.

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
    keyed = keyed or {}
    graph.constants |= {**(constants or {}), **_keys(flat, keyed)}
    needed = reachable(flat.graph, roots, {*fed.values(), *graph.constants})
    # Node by node, in order: variables are left to who knows what they are by then, constants are read, and all else becomes an op.
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
            own_value = (state or {}).get(flat.graph.names[node])  # of a frozen graph, whose values were rounded
            graph.constants[node, 0] = _constant(flat, node) if own_value is None else own_value
        elif op in DRAWN_ON_DEVICE:
            attrs = {"dtype": "float32", **plain(flat.graph.attrs[node]), "seeds": seeds_of(flat, node), "draws": op}
            name = "_SampleCandidates" if op in ops_with("draws classes") else "_StatefulRandom"
            graph.ops[node] = Op(node, flat.graph.names[node], name, attrs, [*inputs, _steps(graph)], [node])
        elif node in keyed:
            _look_keys_up(graph, flat, node, inputs, keyed[node])
        elif op in partition.READS_A_VARIABLE or hands_on(op, flat.graph.attrs[node]):
            for port, key in enumerate(inputs):
                names.setdefault((node, port), key)
        else:
            attrs = plain(flat.graph.attrs[node], functions=op in FUNCTIONAL)
            graph.ops[node] = Op(node, flat.graph.names[node], op, attrs, inputs, [node])
    # Outputs, and values of variables: as they are given, or the model's own.
    for tensor in flat.outputs:
        if schema.output_count(flat.graph.ops[tensor.node], flat.graph.attrs[tensor.node]) == 0:
            continue  # a train step: it runs, and gives nothing
        graph.fetches[tensor.name] = names.get((tensor.node, tensor.port), (tensor.node, tensor.port))
    graph.constants |= _frozen(flat, frozen, state or {})
    variables.finish()
    if stand_ins is None:
        graph.initial = initial_values(flat, graph.state, state or {})
        if LOSS_SCALE in (state or {}):
            scale_loss(graph)
        fold(graph)
    else:
        stand_ins |= _of_variables(flat, variables, graph)
    graph.prune()
    keep_overwritten(graph)
    return graph


def _frozen(flat: FlatGraph, nodes: list[int], known: Mapping[str, NDArray[Any]]) -> dict[Key, NDArray[Any]]:
    """Values of variables that nothing writes."""
    own, names = variable_names(flat), {node: flat.graph.names[node] for node in nodes}
    given = {name: known[own[node]] for node, name in names.items() if own[node] in known}
    values = initial_values(flat, [*names.values()], given)
    return {(node, 0): values[name] for node, name in names.items()}


def _keys(flat: FlatGraph, keyed: Mapping[int, KeyedTable]) -> dict[Key, NDArray[Any]]:
    return {(table_of(flat, node), 0): table.keys for node, table in keyed.items()}


def _look_keys_up(graph: OpGraph, flat: FlatGraph, node: int, inputs: list[Key], table: KeyedTable) -> None:
    """Finds the number of each key's row, and gathers the rows. Behind the rows there is one for keys that the table does not have: the
    default, where that is known and one for all keys; else defaults take its place afterwards."""
    name, types = flat.graph.names[node], {"Tindices": "int64", "Taxis": "int32"}
    default, numbers = graph.constants.get(inputs[2]), graph.fresh()
    is_known = default is not None and default.shape == table.rows.shape[1:]
    rows, axis = (
        graph.constant(table.with_default(default if is_known else None)),
        graph.constant(np.array(0, np.int32)),
    )
    gather = node if is_known else graph.fresh()
    graph.ops[numbers] = Op(numbers, name, "_RowsOfKeys", {}, [inputs[0], inputs[1]], [node])
    attrs = {"Tparams": str(flat.graph.attrs[node].get("Tout")), **types, "batch_dims": 0}
    graph.ops[gather] = Op(gather, name, "GatherV2", attrs, [rows, (numbers, 0), axis], [node])
    if not is_known:
        count = {"count": len(table.keys)}
        graph.ops[node] = Op(node, name, "_OrDefaults", count, [(gather, 0), (numbers, 0), inputs[2]], [node])


def initial_values(flat: FlatGraph, names: Iterable[str], given: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Values of variables before the first step: as given, or as the model's checkpoint has them.

    Raises:
        LoadError: A variable has no value.
    """
    missing = [name for name in names if name not in given]
    stored = formats.variables(flat.model, missing) if missing else {}
    return {name: np.asarray(given[name] if name in given else stored[name]) for name in names}


def _stand_in(op: str, attrs: Mapping[str, Any]) -> StandIn | None:
    """Shape and type of a variable or a large constant, which is not read for them; None for all else."""
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


def _of_variables(flat: FlatGraph, variables: Variables, graph: OpGraph) -> dict[Key, StandIn]:
    attrs = {name: flat.graph.attrs[node] for node, name in variables.nodes.items()}
    return {key: _of_variable(attrs[name]) for name, key in graph.state.items()}


def _of_variable(attrs: Mapping[str, Any]) -> StandIn:
    shape, dtype = attrs.get("shape"), attrs.get("dtype")
    full = tuple(shape) if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape) else None
    return StandIn(full, dtype if isinstance(dtype, str) else "float32")


def _steps(graph: OpGraph) -> Key:
    """The input that says how many steps were run before."""
    if STEPS not in graph.feeds:
        graph.feeds[STEPS] = (graph.fresh(), 0)
    return graph.feeds[STEPS]


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
