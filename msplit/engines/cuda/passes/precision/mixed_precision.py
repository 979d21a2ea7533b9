"""Half precision where it gains: products and convolutions, and what lies between them.

Which ops, says `opset.traits`; how far it goes, say Grappler's four rules, which TensorFlow's own mixed precision goes by:

1. Products and convolutions are in half precision.
2. What loses too much stays in float32, and so does what reads it, up to the next product.
3. What only takes half precision is in it where it lies between two products.
4. What does not round is in it beside an op that is.

Constants are converted here, once. A value is converted where its readers want another type than it has, once for all of them; what
comes from small integers, directly; and a sum, a mean or a softmax reads half precision itself and computes in float32. Inputs,
outputs and variables keep their types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import reached
from msplit.engines.cuda.ir.dtypes import numpy_dtype
from msplit.engines.cuda.ir.graph import RESULT, Key, Op, OpGraph, gpus_of
from msplit.engines.cuda.ir.interpret import device_inputs, static_slots
from msplit.engines.cuda.kernels.optimizer_formulas import OPTIMIZERS
from msplit.engines.cuda.ops.variables import TOGETHER
from msplit.engines.cuda.passes.horizontal_fusion.batch_rules import value_types
from msplit.engines.cuda.passes.pattern import Readers
from msplit.engines.cuda.passes.updates.merge_updates import ASSIGNS, FLAT
from msplit.engines.cuda.passes.updates.merge_updates import LARGEST as LARGEST_JOINED
from msplit.opset import schema
from msplit.opset.traits import BATCH_MATMULS, CONVERTING, HALF, MASKING, MATMULS, VIEWS, WIDENING, Half

WIDE = "float32"
LARGEST = 65504.0
"""Largest number of float16."""

_HANDED_OUT = frozenset({*OPTIMIZERS, *TOGETHER, FLAT, ASSIGNS, "_Unscale"})
"""Ops that gradients of variables go to and that have a kernel of their own."""

_SMALL = ("bool", "uint8", "int8", "uint16", "int16", "float16", "bfloat16")
"""Types that float32 holds exactly: to go through it on the way to half precision rounds once."""


def compute_in_half(graph: OpGraph, half: str, wide: AbstractSet[int] = frozenset(), *, emulate: bool = False) -> bool:
    """Puts what gains into half precision, ``"bfloat16"`` or ``"float16"``. Whether anything is.

    Ops that do the work of a flat node in `wide` stay in float32, as if they were in no list. To `emulate` it is to convert what is
    converted otherwise, and to compute in float32 between.
    """
    types, chosen = _chosen(graph, half, wide)
    if chosen:
        _Casts(graph, types, half, chosen).put()
        if emulate:
            _emulate(graph, half, chosen)
        graph.forget_constants()
    return bool(chosen)


def _emulate(graph: OpGraph, half: str, chosen: AbstractSet[int]) -> None:
    """Lets ops in half precision that round compute in float32: what they read is converted back, and their results are rounded."""
    rounded: dict[Key, Key] = {}
    widened: dict[Key, Key] = {}
    for op in [op for number, op in graph.ops.items() if number in chosen and HALF[op.op] is not Half.CARRIES]:
        op.attrs |= _typed(op, WIDE, half)
        for slot, key in enumerate(op.inputs):
            if graph.dtype(key) == half:
                if key not in widened:
                    widened[key] = _cast(graph, op, key, half, WIDE)
                op.inputs[slot] = widened[key]
        made = [(op.node, port) for port in range(graph.ports(op.node))]
        rounded |= {key: _cast(graph, op, key, WIDE, half) for key in made if graph.dtypes.get(key) == half}
    makes = {number for number, _ in rounded.values()}
    for op in graph.ops.values():
        if op.node not in makes:
            op.inputs = [rounded.get(key, key) for key in op.inputs]
    graph.dtypes |= dict.fromkeys(rounded, WIDE)
    graph.fetches = {name: rounded.get(key, key) for name, key in graph.fetches.items()}


def _cast(graph: OpGraph, like: Op, key: Key, source: str, dtype: str, **attrs: Any) -> Key:
    """A new op that converts a value, and does work of the nodes of another one."""
    return graph.add("Cast", like, {"SrcT": source, "DstT": dtype, **attrs}, [key], graph.shape(key), dtype).out


def nodes_in_half(graph: OpGraph, half: str, wide: AbstractSet[int] = frozenset()) -> list[tuple[int, ...]]:
    """The flat nodes that each op does the work of which `compute_in_half` puts into half precision, in topological order."""
    chosen = _chosen(graph, half, wide)[1]
    return [tuple(op.source_nodes) for number, op in graph.ops.items() if number in chosen]


def _chosen(graph: OpGraph, half: str, wide: AbstractSet[int]) -> tuple[dict[Key, str], set[int]]:
    """Types of the graph's values, and the ops that half precision is for."""
    types = value_types(graph)
    types |= {key: graph.initial[names[0]].dtype.name for key, names in graph.stacks.items()}
    return types, _Rules(graph, types, half, wide).chosen()


class _Rules:
    """Choices that Grappler's rules make.

    Args:
        types: Of the graph's values, in float32 all of them that may be converted.
    """

    def __init__(self, graph: OpGraph, types: Mapping[Key, str], half: str, wide: AbstractSet[int]) -> None:
        self._graph, self._types = graph, types
        self._of: dict[int, Half] = {}
        self._makers: dict[int, list[int]] = {}
        self._readers: dict[int, list[int]] = {}
        for number, op in graph.ops.items():
            keys = device_inputs(op)
            made = [(number, port) for port in range(graph.ports(number))]
            read = [key for key in keys if types.get(key) == WIDE]
            for key in read:
                if key[0] in graph.ops:
                    self._makers.setdefault(number, []).append(key[0])
                    self._readers.setdefault(key[0], []).append(number)
            if WIDE not in map(types.get, (*keys, *made)) or None in map(types.get, (*keys, *made)):
                continue  # nothing to convert, or nobody knows
            overflows = half == "float16" and _overflows(graph, op)
            if op.op in HALF and not overflows and wide.isdisjoint(op.source_nodes):
                self._of[number] = HALF[op.op]

    def chosen(self) -> set[int]:
        """The ops that run in half precision."""
        gains, loses = self._all(Half.GAINS), self._all(Half.LOSES)
        carriers = self._all(Half.CARRIES)
        rounding = loses | self._all(Half.TAKES)
        before_rounding = self._reached(rounding, self._before, carriers)
        loses = self._reached(loses, self._after, before_rounding)
        free = (carriers | rounding) - loses
        sure = gains | (self._reached(gains, self._after, free) & self._reached(gains, self._before, free))
        return self._cheaper(self._reached(sure, self._beside, carriers - loses), sure)

    def _cheaper(self, chosen: set[int], sure: set[int]) -> set[int]:
        """Without what rule 4 adds where that makes more casts than it saves, as a join of many columns that were summed in float32 does:
        its result is converted instead, and lookups that it alone reads stay as they are, too."""
        graph = self._graph
        left = set(chosen)

        def size(keys: Iterable[Key]) -> int:
            return sum(math.prod(graph.shape(key) or ()) for key in keys)

        for number in graph.ops:
            if number in left and number not in sure:
                read = [key for key in device_inputs(graph.ops[number]) if self._types.get(key) == WIDE]
                wide = [key for key in read if key[0] not in left and key not in graph.constants]
                if len(wide) > 1 + sum(key[0] in left for key in read) or size(wide) > 2 * size(self._made(number)):
                    left.remove(number)
        fed = self._reached(sure & left, self._after, left)
        for number in reversed(graph.ops):
            if number in left - fed and left.isdisjoint(self._after(number)):
                left.remove(number)
        for number in reversed(graph.ops):
            parts = self._parts(number, left, sure) if number in left else set()
            if size(key for part in parts for key in self._made(part)) >= size(self._made(number)):
                left -= parts
        return left

    def _parts(self, number: int, left: set[int], sure: set[int]) -> set[int]:
        """The readers of an op if there are several, and all only carry what it makes, and nothing else, to others that want float32 and
        would have it converted. So do those that cut a product of many gradients into one for each variable: its result is converted
        once, and theirs need not be."""
        parts, ops = set(self._after(number)), self._graph.ops
        lone = parts <= left - sure and all(set(self._before(part)) == {number} for part in parts)
        readers = {reader for part in parts for reader in self._after(part)}
        wide = left.isdisjoint(readers) and not any(ops[reader].op in WIDENING for reader in readers)
        return parts if len(parts) > 1 and lone and wide else set()

    def _made(self, number: int) -> list[Key]:
        return [(number, port) for port in range(self._graph.ports(number))]

    def _all(self, what: Half) -> set[int]:
        return {number for number, one in self._of.items() if one is what}

    def _before(self, number: int) -> Sequence[int]:
        return self._makers.get(number, ())

    def _after(self, number: int) -> Sequence[int]:
        return self._readers.get(number, ())

    def _beside(self, number: int) -> Iterable[int]:
        return (*self._before(number), *self._after(number))

    @staticmethod
    def _reached(starts: set[int], step: Callable[[int], Iterable[int]], through: set[int]) -> set[int]:
        """All that are reached from some ops by way of others, those included."""
        return reached(starts, lambda number: through.intersection(step(number)))


def _overflows(graph: OpGraph, op: Op) -> bool:
    """Returns whether an op reads a constant that float16 can not hold, and that it does more with than to add or to choose it."""
    return op.op not in MASKING and any(_is_large(graph.constants.get(key)) for key in device_inputs(op))


def _is_large(value: NDArray[np.generic] | None) -> bool:
    if value is None or value.dtype != np.float32 or not value.size:
        return False
    with np.errstate(invalid="ignore"):
        return bool(np.any(np.isfinite(value) & (np.abs(value) > LARGEST)))


class _Casts:
    """Puts the casts in: `put` changes the graph."""

    def __init__(self, graph: OpGraph, types: dict[Key, str], half: str, chosen: set[int]) -> None:
        self._graph, self._types, self._half, self._chosen = graph, types, half, chosen
        self._made: dict[tuple[Key, str], Key] = {}
        self._readers = graph.consumers()
        self._large = self._may_be_large() if half == "float16" else set()

    def put(self) -> None:
        """Gives the chosen ops their type, and every reader what it wants."""
        graph, types, half = self._graph, self._types, self._half
        for number in self._chosen:
            op = graph.ops[number]
            op.attrs |= _typed(op, half)
            made = schema.output_dtypes(op.op, op.attrs, graph.ports(number)) or ()
            ports = [port for port in range(graph.ports(number)) if _in(made, port, half)]
            changed = {(number, port): half for port in ports if types.get((number, port)) == WIDE}
            types |= changed
            graph.dtypes |= changed
        for number, op in list(graph.ops.items()):
            self._convert(op, half if number in self._chosen else WIDE)
        graph.fetches = {name: self._wanted(key, WIDE) for name, key in graph.fetches.items()}
        self._let_makers_convert()
        self._convert_variables_together()

    def _convert(self, op: Op, wanted: str) -> None:
        """Lets an op read what it wants."""
        if op.op == "Cast" and wanted == WIDE:
            if self._types.get(op.inputs[0]) == self._half and op.attrs.get("SrcT") == WIDE:
                op.attrs["SrcT"] = self._half
            return
        if op.op in WIDENING and wanted == WIDE and self._is_half(op.inputs[0]):
            op.attrs |= {"T": self._half, RESULT: WIDE}
            self._graph.dtypes[op.node, 0] = WIDE
            return
        static, types = static_slots(op), schema.input_dtypes(op.op, op.attrs) or ()
        for slot, key in enumerate(op.inputs):
            if slot not in static and (wanted == WIDE or _in(types, slot, wanted)):
                op.inputs[slot] = self._wanted(key, wanted)

    def _let_makers_convert(self) -> None:
        """Lets ops convert what they make themselves where it is wanted in another type only: what computes in float32 in any case and is
        wanted in half precision, and products that make outputs or gradients of variables. What else reads a product may take the cast
        along."""
        graph, readers = self._graph, Readers(self._graph)
        names: dict[Key, Key] = {}
        for (key, dtype), made in self._made.items():
            maker = graph.ops.get(key[0])
            if maker is None or maker.op not in CONVERTING or readers.only(key) is None:
                continue
            if maker.op in WIDENING:
                takes = dtype != WIDE
            elif maker.op in MATMULS | BATCH_MATMULS:
                takes = dtype == WIDE and _is_handed_out(graph, readers, made, fetched=maker.op in MATMULS)
            else:  # which does not saturate, and gives all its results in one type
                takes = dtype != WIDE and key not in self._large and graph.ports(maker.node) == 1
            if takes:
                maker.attrs[RESULT] = graph.dtypes[key] = dtype
                names[made] = key
        graph.rename(names)

    def _convert_variables_together(self) -> None:
        """Lets one op convert all variables, which are there when a step begins: one kernel does for dozens of them what each has a launch
        for. Large ones gain nothing; and of those on several GPUs nobody can read all."""
        graph = self._graph
        there = {*graph.state.values(), *graph.stacks} if not gpus_of(graph) else set()
        casts = ((key, graph.ops.get(made[0])) for (key, dtype), made in self._made.items() if dtype == self._half)
        found = [op for key, op in casts if op is not None and key in there and _is_small(graph, key)]
        if len(found) < 2:
            return
        attrs = {"SrcT": WIDE, "DstT": self._half}
        made = graph.add("_CastAll", found[0], attrs, [op.inputs[0] for op in found])
        made.source_nodes = list(dict.fromkeys(node for op in found for node in op.source_nodes))
        made.batch = len(found)
        names = {op.out: (made.node, port) for port, op in enumerate(found)}
        for old, new in names.items():
            graph.describe(new, graph.shapes.pop(old), self._half)
        graph.drop(found)
        graph.rename(names)
        graph.sort()

    def _is_half(self, key: Key) -> bool:
        return key[0] in self._chosen and self._types.get(key) == self._half

    def _wanted(self, key: Key, dtype: str) -> Key:
        """A value in a type, where it is in the other one of the two; else the value itself."""
        if not (self._is_half(key) if dtype == WIDE else self._types.get(key) == WIDE):
            return key
        if (key, dtype) not in self._made:
            constant = self._graph.constants.get(key)
            made = self._from_source(key, dtype) if constant is None else self._graph.constant(self._narrow(constant))
            self._made[key, dtype] = made
            self._graph.dtypes[made] = dtype
        return self._made[key, dtype]

    def _narrow(self, constant: NDArray[np.generic]) -> NDArray[np.generic]:
        if self._half == "float16" and _is_large(constant):
            constant = np.where(np.isfinite(constant), np.clip(constant, -LARGEST, LARGEST), constant)
        with np.errstate(over="ignore"):
            return constant.astype(numpy_dtype(self._half))

    def _from_source(self, key: Key, dtype: str) -> Key:
        """A new op that converts a value; what comes from a small integer is converted from there."""
        graph, source = self._graph, self._types[key]
        maker = graph.ops.get(key[0])
        like = graph.ops[self._readers[key][0]] if maker is None else maker
        given, start = key, source
        if maker is not None and maker.op == "Cast" and maker.attrs.get("SrcT") in _SMALL and dtype != WIDE:
            given, start = maker.inputs[0], str(maker.attrs["SrcT"])
        saturates = {"saturate": True} if key in self._large and dtype != WIDE else {}
        return _cast(graph, like, given, start, dtype, **saturates)

    def _may_be_large(self) -> set[Key]:
        """Values that ops in float32 make of constants beyond the largest number of float16, such as those of a mask."""
        found: set[Key] = set()
        for number, op in self._graph.ops.items():
            if number in self._chosen:
                continue
            keys = device_inputs(op)
            if any(key in found or _is_large(self._graph.constants.get(key)) for key in keys):
                found |= {(number, port) for port in range(self._graph.ports(number))}
        return found


def _is_small(graph: OpGraph, key: Key) -> bool:
    shape = graph.shape(key)
    return shape is not None and math.prod(shape) <= LARGEST_JOINED


def _is_handed_out(graph: OpGraph, readers: Readers, key: Key, *, fetched: bool) -> bool:
    """Checks if a value goes to updates of variables, or is an output where that counts, and to nothing that could compute anything else in
    the same kernel: an attention takes products along whose result is an output.
    """

    def users(key: Key) -> list[Op]:
        return [graph.ops[number] for number in readers.of.get(key, ())]

    def views(key: Key) -> list[Key]:
        return [(op.node, port) for op in users(key) if op.op in VIEWS for port in range(graph.ports(op.node))]

    keys = reached([key], views)
    goes_to = {op.op for one in keys for op in users(one)} - VIEWS
    is_output = not keys.isdisjoint(readers.fetched)
    return goes_to <= _HANDED_OUT and (fetched if is_output else bool(goes_to))


def _typed(op: Op, half: str, before: str = WIDE) -> dict[str, Any]:
    """The attributes that name the type that an op computes in, changed. A norm's parameters have another one, and keep it."""
    found: dict[str, Any] = {name: half for name in ("T", "Tparams", "dtype") if op.attrs.get(name) == before}
    if "TArgs" in op.attrs and "FusedBatchNorm" not in op.attrs.get("fused_ops", ()):
        found["TArgs"] = tuple(half if one == before else one for one in op.attrs["TArgs"])
    return found


def _in(types: Sequence[str | None], number: int, half: str) -> bool:
    """Checks if one of an op's inputs or outputs is of the type that it computes in, where the table of ops does not say otherwise."""
    return number >= len(types) or types[number] in (None, half)
