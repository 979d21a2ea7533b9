"""Weights of merged ops, and steps that merged products take along.

Constants of merged ops, stacked once. No large one is held twice.

Groups that use different parts of the same weights (every wavefront of an unrolled network reads those of the layers that
it is in) share one stack and read neighbouring positions of it.

Steps that merged products take along: the sum of two of them, and the memory layout that their readers want.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from msplit.engines.cuda.ir.graph import Attrs, Key, Op, OpGraph, Shape, known, proved, require
from msplit.engines.cuda.passes.pattern import Readers, matches, takes_rows
from msplit.opset.traits import GATHERS, MATMULS, traits

SMALL_BYTES = 1 << 15
"""A constant up to this size (a bias) may be held more than once."""


@dataclass(eq=False)
class _Stack:
    """Constants in one block.

    Attributes:
        keys: In order.
        rows: First row of each, where they are below each other; None where each is a position of its own.
        wide: Whether they lie side by side: [inner, members, columns] instead of [members, inner, columns].
    """

    keys: list[Key] = field(default_factory=list)
    rows: list[int] | None = None
    wide: bool = False


def grouped_attrs(op: Op, steps: Sequence[str], layer: Mapping[str, int]) -> Attrs:
    """Attributes of the `_GroupedMatMul` that products like one become, with a layer and the steps that ride on them."""
    kept: Attrs = {name: op.attrs[name] for name in ("T", "leakyrelu_alpha") if name in op.attrs}
    return {**kept, "activation": "".join(steps[1:]), "count": layer["count"], "layers": (layer,)}


class StackedWeights:
    """The stacks that merges take their constants from. `finish` makes them."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._stacks: dict[Key, _Stack] = {}
        self._at: dict[Key, tuple[Key, int]] = {}
        self._readers = Readers(graph)
        self._movable = functools.cache(self._find_movable)
        self._copy = functools.cache(self._make_copy)
        self.shaped = functools.cache(self._reshaped)

    def take(self, keys: Sequence[Key], *, wide: bool = False) -> tuple[Key, int]:
        """A stack in which these constants of one shape are neighbours, and where the first one is, if there can be one.

        A new stack that is to be `wide` holds matrices side by side, as one wide matrix.
        """
        found = proved(self._neighbours, keys, False, wide)
        if found is None and all(self._graph.constants[key].nbytes <= SMALL_BYTES for key in keys):
            return self.copy(keys), 0
        return known(found)

    def take_rows(self, keys: Sequence[Key]) -> tuple[Key, list[int], list[int]]:
        """Stacks tables of one width, below each other: the block, every first row and every number of rows."""
        stack, first = self._neighbours(keys, True)
        rows = known(self._stacks[stack].rows)
        return stack, rows[first : first + len(keys)], [len(self._graph.constants[key]) for key in keys]

    def _neighbours(self, keys: Sequence[Key], below: bool, wide: bool = False) -> tuple[Key, int]:
        require(len(set(keys)) == len(keys) and all(self._movable(key, below) for key in keys))
        places = [self._at.get(key) for key in keys]
        first = places[0]
        if first is None:
            require(not any(places))
            stack = (self._graph.fresh(), 0)
            self._stacks[stack] = _Stack(rows=[] if below else None, wide=wide)
            self._append(stack, keys)
            return stack, 0
        stack, start = first
        held = self._stacks[stack]
        count = min(len(held.keys) - start, len(keys))
        require((held.rows is not None) == below and held.keys[start : start + count] == list(keys[:count]))
        require(all(at is None for at in places[count:]))
        self._append(stack, keys[count:])
        return stack, start

    def _find_movable(self, key: Key, below: bool) -> bool:
        """Returns whether everything that reads a constant can read it from a stack instead."""
        wanted, slot = (GATHERS, 0) if below else (MATMULS, 1)
        constants = self._graph.constants
        if constants[key].nbytes <= SMALL_BYTES:
            return True
        for number in self._readers.of.get(key, ()):
            op = self._graph.ops[number]
            if op.op not in wanted or op.inputs.index(key) != slot or op.inputs.count(key) != 1:
                return False
            if op.attrs.get("transpose_a") or not takes_rows(op, constants.get):
                return False
        return key not in self._readers.fetched

    def _append(self, stack: Key, keys: Sequence[Key]) -> None:
        held = self._stacks[stack]
        for key in keys:
            self._at[key] = stack, len(held.keys)
            if held.rows is not None:
                held.rows.append(held.rows[-1] + len(self._graph.constants[held.keys[-1]]) if held.keys else 0)
            held.keys.append(key)

    def copy(self, keys: Sequence[Key]) -> Key:
        """Small constants side by side, in a constant of its own."""
        return self._copy(tuple(keys))

    def _make_copy(self, keys: tuple[Key, ...]) -> Key:
        return self._graph.constant(np.stack([self._graph.constants[key] for key in keys]))

    def _reshaped(self, key: Key, shape: Shape) -> Key:
        """A constant in another shape."""
        value = self._graph.constants[key]
        return key if value.shape == shape else self._graph.constant(value.reshape(shape))

    def layer(self, op: Op, stack: Key, start: int, count: int) -> dict[str, int]:
        """StackedWeights of products like one as `_GroupedMatMul` wants them: so many neighbours in a stack, from the first one on."""
        wide = stack in self._stacks and self._stacks[stack].wide
        return {"start": start, "count": count, "transpose": int(bool(op.attrs.get("transpose_b"))), "wide": int(wide)}

    def read_from_stacks(self) -> None:
        """Lets products and lookups that were not merged read their part of a stack, as merged ones with one member."""
        for op in self._graph.ops.values():
            slot = traits(op.op).weights
            key = op.inputs[slot] if slot is not None else None
            if key in self._at and self._graph.constants[key].nbytes > SMALL_BYTES:
                (self._product if slot else self._lookup)(op, key)

    def _product(self, op: Op, key: Key) -> None:
        stack, start = self._at[key]
        steps = tuple(str(step) for step in op.attrs.get("fused_ops", ()))
        layer = self.layer(op, stack, start, 1) | ({"bias": -1} if steps else {})
        op.attrs = {**grouped_attrs(op, steps, layer), "single": True}
        op.op, op.inputs = "_GroupedMatMul", [op.inputs[0], stack, *op.inputs[2:]]

    def _lookup(self, op: Op, key: Key) -> None:
        stack, index = self._at[key]
        rows = self._stacks[stack].rows
        assert rows is not None
        place = rows[index], len(self._graph.constants[key])
        op.attrs = {"T": op.attrs.get("Tparams", op.attrs.get("dtype")), "count": 1, "single": True}
        op.op, op.inputs = "_GroupedLookup", [stack, op.inputs[1], *(self._graph.sizes((one,)) for one in place)]

    def finish(self) -> None:
        """Makes the stacks."""
        constants = self._graph.constants
        for stack, held in self._stacks.items():
            values = [constants[key] for key in held.keys]
            constants[stack] = np.stack(values, int(held.wide)) if held.rows is None else np.concatenate(values)
            self._graph.shapes[stack] = constants[stack].shape


@dataclass(frozen=True)
class _Term:
    """One side of a sum: a merged product of the members from `first` on, and what the members before have in its place."""

    product: Op
    first: int = 0
    before: Key | None = None
    copy: Op | None = None


def add_products(graph: OpGraph) -> None:
    """Makes one op of the sum of two merged products: what a recurrent cell computes of its input and of its state, for all layers at once.

    A layer whose input is known beforehand (the first one's: the whole sequence) has been multiplied before; then the sum reads a copy of
    that product beside those of the others. The op adds it where it lies, and the copy goes.
    """
    readers = Readers(graph)
    for op in list(graph.ops.values()):
        shape = graph.shapes.get(op.out)
        alike = shape is not None and all(graph.shapes.get(key) == shape for key in op.inputs)
        if op.op != "AddV2" or not alike or len(set(op.inputs)) != 2:
            continue
        terms = matches(_term, graph, readers, op.inputs)
        whole = [term for term in terms if not term.first]
        if len(terms) == 2 and whole:
            one = whole[0]
            _add(graph, op, one.product, terms[1] if terms[0] is one else terms[0])


def _term(graph: OpGraph, readers: Readers, key: Key) -> _Term:
    op = known(readers.maker(key))
    if _is_product(op):
        return _Term(op)
    require(op.op == "ConcatV2" and len(op.inputs) == 3 and int(graph.constants[op.inputs[2]]) == 0)
    product = known(readers.maker(op.inputs[1]))
    require(_is_product(product))
    return _Term(product, graph.shapes[op.inputs[0]][0], op.inputs[0], op)


def _is_product(op: Op) -> bool:
    merged = op.op == "_GroupedMatMul" and not op.attrs.get("single")
    return merged and not op.attrs["activation"] and len(op.attrs["layers"]) == 1


def _add(graph: OpGraph, op: Op, one: Op, other: _Term) -> None:
    op.inputs = [*one.inputs, *other.product.inputs, *([] if other.before is None else [other.before])]
    layers = (*one.attrs["layers"], *other.product.attrs["layers"])
    op.attrs = {**one.attrs, "layers": layers, "first": other.first}
    op.op = "_GroupedMatMul"
    op.source_nodes = [*one.source_nodes, *other.product.source_nodes, *op.source_nodes]
    graph.drop(gone for gone in (one, other.product, other.copy) if gone is not None)


def put_rows_first(graph: OpGraph) -> None:
    """Lets products whose members are laid side by side next write each row of all members together: turning them then takes no copy."""
    readers = Readers(graph)
    for op in graph.ops.values():
        key = (op.node, 0)
        if op.op != "_GroupedMatMul" or op.attrs.get("single") or len(op.attrs["layers"]) > 1 or key in readers.fetched:
            continue
        found = [graph.ops[number] for number in readers.of.get(key, ())]
        if found and all(_swaps_first_axes(graph, reader) for reader in found):
            op.attrs["rows_first"] = True


def _swaps_first_axes(graph: OpGraph, op: Op) -> bool:
    order = graph.constants.get(op.inputs[1]) if op.op == "Transpose" else None
    return order is not None and order.tolist() == [1, 0, 2]
