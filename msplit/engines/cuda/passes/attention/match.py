"""Search for attention in a graph, and for the axes that its values share.

Finds attention: a product, what happens to its scores, a softmax, and the product of its weights with the values.

The way goes forward from the first product, as long as one op alone reads what the one before made. In front of the softmax scores may be
scaled by numbers, get something added (a mask, a bias of positions), and be replaced by one number where a condition says so; on the
whole way they may be cast, reshaped and transposed. Anything else, a dropout that drops or weights that somebody wants, ends the search.

Axes of values that are the same axis, over products, transposes and reshapes.

Axes are made of *atoms*. A new axis is one atom; where a reshape cuts it, it becomes two, for every value that has it; where a reshape
joins axes, the joined one has the atoms of all. An axis of size one has none: so broadcasting needs no rule of its own, and neither do
reshapes that add such axes or drop them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from msplit.engines.cuda.ir.graph import RESULT, Key, Op, OpGraph, Shape, known, proved, require
from msplit.engines.cuda.passes.pattern import Readers, other_input
from msplit.opset.traits import ADD, BATCH_MATMULS, RESHAPES, SELECT, ops_with

Axis = tuple[int, ...]
"""Atoms, the outermost first."""

Axes = tuple[Axis, ...]
"""Those of a value."""

_EINSUM = "Einsum"
_PRODUCTS = BATCH_MATMULS | {_EINSUM, "MatMul"}


class Atoms:
    """The atoms of one match.

    Attributes:
        sizes: By atom.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._parts: dict[int, Axis] = {}  # of those that were cut

    def axis(self, size: int) -> Axis:
        """A new axis."""
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def whole(self, axis: Axis) -> Axis:
        """An axis as it is by now: atoms that were cut since are replaced by what they became."""
        found: list[int] = []
        waiting = list(reversed(axis))
        while waiting:
            atom = waiting.pop()
            if atom in self._parts:
                waiting += reversed(self._parts[atom])
            else:
                found.append(atom)
        return tuple(found)

    def flat(self, axes: Sequence[Axis]) -> Axis:
        """The atoms of several axes, in order."""
        return tuple(atom for axis in axes for atom in self.whole(axis))

    def size(self, axis: Axis) -> int:
        """Length of an axis."""
        return math.prod(self.sizes[atom] for atom in self.whole(axis))

    def shape(self, axes: Sequence[Axis]) -> tuple[int, ...]:
        """Length of each axis."""
        return tuple(self.size(axis) for axis in axes)

    def reshaped(self, axes: Sequence[Axis], shape: Sequence[int]) -> Axes:
        """The axes of a value once it has another shape, which must take whole parts of axes."""
        left = list(reversed(self.flat(axes)))
        found: list[Axis] = []
        for size in shape:
            axis: list[int] = []
            while size > 1:
                require(left)
                atom = left.pop()
                if self.sizes[atom] > size:
                    require(self.sizes[atom] % size == 0)
                    atom, rest = self._cut(atom, size)
                    left.append(rest)
                require(size % self.sizes[atom] == 0)
                axis.append(atom)
                size //= self.sizes[atom]
            found.append(tuple(axis))
        require(not left)
        return tuple(found)

    def _cut(self, atom: int, size: int) -> tuple[int, int]:
        (first,), (rest,) = self.axis(size), self.axis(self.sizes[atom] // size)
        self._parts[atom] = (first, rest)
        return first, rest

    def beside(self, axes: Sequence[Axis], shape: Sequence[int]) -> Axes:
        """The axes of a value of some shape that broadcasts against one with these axes, without making that larger."""
        require(len(shape) <= len(axes))
        near = axes[len(axes) - len(shape) :]
        require(all(size in (1, self.size(axis)) for axis, size in zip(near, shape, strict=True)))
        return tuple(() if size == 1 else self.whole(axis) for axis, size in zip(near, shape, strict=True))


def is_product(op: Op) -> bool:
    """Returns whether an op multiplies two tensors, summed along one axis or more."""
    return len(op.inputs) == 2 and RESULT not in op.attrs and op.op in _PRODUCTS


def product_axes(op: Op, shapes: Sequence[Shape], atoms: Atoms, given: Mapping[int, Axes]) -> tuple[Axes, ...]:
    """The axes of a product's operands and of its result, equal where one becomes the other.

    Args:
        op: See `is_product`.
        shapes: Of both operands.
        atoms: Takes what is new.
        given: Operand -> axes that it has already.

    Raises:
        Unproved: It is no plain product: an axis that is summed is in one operand only, or an operand's diagonal is taken.
    """
    labels = _labels(op, shapes)
    require(all(len(set(names)) == len(names) for names in labels))
    require(all(len(names) == len(shape) and 0 not in shape for names, shape in zip(labels, shapes, strict=False)))
    axis_of: dict[str, Axis] = {}
    for slot, axes in given.items():
        axis_of |= {label: axis for label, axis in zip(labels[slot], axes, strict=True) if atoms.size(axis) > 1}
    for names, shape in zip(labels, shapes, strict=False):
        for label, size in zip(names, shape, strict=True):
            if size > 1:
                axis_of[label] = axis_of.get(label) or atoms.axis(size)
                require(atoms.size(axis_of[label]) == size)
    left, right, result = labels
    require(((set(left) ^ set(right)) - set(result)).isdisjoint(axis_of))

    def axes_of(names: list[str], shape: Shape) -> Axes:
        return tuple(axis_of[label] if size > 1 else () for label, size in zip(names, shape, strict=True))

    return axes_of(left, shapes[0]), axes_of(right, shapes[1]), tuple(axis_of.get(label, ()) for label in result)


def _labels(op: Op, shapes: Sequence[Shape]) -> tuple[list[str], list[str], list[str]]:
    """A name for each axis of both operands and of the result."""
    left, right = (len(shape) for shape in shapes)
    if op.op == _EINSUM:
        return _einsum_labels(str(op.attrs.get("equation", "")), left, right)
    require(min(left, right) >= 2)
    turned = ("adj_x", "adj_y") if op.op in BATCH_MATMULS else ("transpose_a", "transpose_b")
    batch = _counted(max(left, right) - 2)
    first, second = ["row", "inner"], ["inner", "column"]
    if op.attrs.get(turned[0]):
        first.reverse()
    if op.attrs.get(turned[1]):
        second.reverse()
    start = len(batch) + 2
    return [*batch[start - left :], *first], [*batch[start - right :], *second], [*batch, "row", "column"]


def _counted(count: int) -> list[str]:
    """Names for axes that broadcast: counted from the last."""
    return [f"batch {number}" for number in range(count, 0, -1)]


def _einsum_labels(equation: str, left: int, right: int) -> tuple[list[str], list[str], list[str]]:
    operands, arrow, output = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    require(arrow and len(terms) == 2)
    ranks = zip(terms, (left, right), strict=True)
    hidden = [rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in ranks]
    require(min(hidden) >= 0)
    counts = (*hidden, max(hidden))
    found = []
    for term, count in zip((*terms, output), counts, strict=True):
        before, dots, after = term.partition("...")
        found.append([*before, *(_counted(count) if dots else []), *after])
    return found[0], found[1], found[2]


TYPES = ("float32", "bfloat16", "float16")
"""Those that GPUs have attention kernels of."""

_DIVISIONS = ops_with("divide")


@dataclass(frozen=True)
class Added:
    """An addend to scores: a value times a factor; or the factor where a condition has the truth value `where`, else nothing."""

    key: Key
    axes: Axes
    factor: float = 1.0
    where: bool | None = None


@dataclass(frozen=True)
class Replaced:
    """Scores that are replaced by a number, except where a condition has the truth value `kept`.

    Attributes:
        before: How many values had been added by then.
    """

    key: Key
    axes: Axes
    kept: bool
    number: float
    before: int


@dataclass(frozen=True)
class Operand:
    """A value and what its axes are."""

    key: Key
    axes: Axes


@dataclass(frozen=True)
class Match:
    """Attention, as a graph has it.

    Attributes:
        ops: What it is made of, in order: from the product of queries and keys to that with the values.
        atoms: What axes are made of.
        batch: Atoms along which everything is done side by side, in the order that scores have them.
        row: The axis of queries.
        column, inner, depth: The atoms of keys, of what queries and keys are summed along, and of the values' numbers.
        result: The axes of the last product.
        scale: What scores are multiplied by before anything is added.
        added, replaced: See there; in order.
        zeros: Whether weights are set to zero where scores were replaced. It matters where all of a row are.
        dtype: Of queries, keys, values and result.
        mask_type: Of what is added.
    """

    ops: tuple[Op, ...]
    atoms: Atoms
    query: Operand
    key: Operand
    value: Operand
    batch: Axis
    row: Axis
    column: int
    inner: int
    depth: int
    result: Axes
    scale: float
    added: tuple[Added, ...]
    replaced: tuple[Replaced, ...]
    zeros: bool
    dtype: str
    mask_type: str

    @property
    def order(self) -> Axis:
        """The atoms of scores, in the order in which masks are laid: a query's in front of the last, a key's, in which softmax sums."""
        return (*self.batch, *self.row, self.column)


def find(graph: OpGraph) -> Iterator[Match]:
    """Each attention of a graph. The one that was given out may be replaced before the next is asked for."""
    readers = Readers(graph)
    for op in list(graph.ops.values()):
        if graph.ops.get(op.node) is op and is_product(op) and op.attrs.get("T") in TYPES:
            found = proved(_follow, graph, readers, op)
            if found is not None:
                yield found


@dataclass
class _Way:
    """Progress of one search.

    Attributes:
        axes: Of the scores, or weights.
        dtype: Likewise.
        column: The axis that the softmax sums along; None before it.
        soft: The type in which it does.
    """

    graph: OpGraph
    atoms: Atoms
    axes: Axes
    dtype: str
    ops: list[Op]
    scale: float = 1.0
    added: list[Added] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)
    mask_types: set[str] = field(default_factory=set)
    zeros: bool = False
    column: Axis | None = None
    soft: str = ""

    def take(self, op: Op, key: Key) -> None:
        """Goes on over the op that reads a value, if that can be."""
        shape = known(self.graph.shapes.get(op.out))
        require(shape)
        self.ops.append(op)
        if op.op == "Cast":
            self.dtype = str(op.attrs.get("DstT"))
            require(self.dtype in TYPES)
        elif op.op in RESHAPES:
            require(op.inputs[0] == key)
            self.axes = self.atoms.reshaped(self.axes, shape)
        elif op.op == "Transpose":
            self.axes = tuple(
                self.axes[int(axis)] for axis in known(self.graph.constants.get(op.inputs[1])).reshape(-1)
            )
        else:
            require(shape == self.atoms.shape(self.axes))  # or something larger broadcasts
            if op.op == "Softmax":
                require(self.column is None)
                self.column, self.soft = self.axes[-1], self.dtype
            elif self.column is not None:
                self._weights(op, key)
            else:
                self._scores(op, key)

    def _scores(self, op: Op, key: Key) -> None:
        if op.op in SELECT:
            self._replace(op, key)
            return
        other = known(other_input(op, key))
        number, is_first = self._number(other), op.inputs[0] == key
        if op.op == "Mul":
            if number is None:
                self._keep(other)
            else:
                self._times(number)
        elif op.op in _DIVISIONS:
            require(is_first and number)
            self._times(1 / known(number))
        else:
            require(op.op in ADD or (op.op == "Sub" and is_first))
            self._add(other, 1.0 if op.op in ADD else -1.0)

    def _number(self, key: Key) -> float | None:
        """A constant that is the same number everywhere."""
        value = self.graph.constants.get(key)
        if value is None or not value.size or (value != value.reshape(-1)[0]).any():
            return None
        return float(value.reshape(-1)[0])

    def _times(self, number: float) -> None:
        require(np.isfinite(number) and (not self.replaced or number > 0))
        self.scale *= number
        self.added = [replace(one, factor=one.factor * number) for one in self.added]
        self.replaced = [replace(one, number=one.number * number) for one in self.replaced]

    def _beside(self, key: Key) -> Axes:
        return self.atoms.beside(self.axes, known(self.graph.shape(key)))

    def _keep(self, key: Key) -> None:
        """A product with ones and zeros, as GPT-2 has it: scores become 0 there, and what is added behind it makes that very small."""
        require(np.isin(known(self.graph.constants.get(key)), (0, 1)).all())
        self._hide(key, kept=True, number=0.0)

    def _hide(self, condition: Key, *, kept: bool, number: float) -> None:
        """Notes that scores are a number except where a condition, which must broadcast to them, is `kept`."""
        self.replaced.append(Replaced(condition, self._beside(condition), kept, number, len(self.added)))

    def _add(self, key: Key, factor: float, where: bool | None = None) -> None:
        if where is None and factor == 1.0 and self._lose(key):
            return
        self.added.append(Added(key, self._beside(key), factor, where))
        if where is None:
            self.mask_types.add(self.dtype)

    def _lose(self, key: Key) -> bool:
        """Scores plus ``where(condition, 0, -inf)`` are scores or minus infinity: of a row without keys it matters which."""
        op = self.graph.ops.get(key[0])
        if op is None or op.op not in SELECT:
            return False
        condition, first, second = op.inputs
        if op.op != "SelectV2" and self.graph.shape(condition) != self.graph.shape(key):
            return False
        numbers = self._number(first), self._number(second)
        loses = numbers in ((0.0, -math.inf), (-math.inf, 0.0))
        if loses:
            self._hide(condition, kept=numbers[0] == 0.0, number=-math.inf)
        return loses

    def _replace(self, op: Op, key: Key) -> None:
        """``where(condition, scores, number)``, or the other way round."""
        condition, first, second = op.inputs
        require(key != condition and (key == first) != (key == second) and self._chooses_elements(op))
        self._hide(condition, kept=key == first, number=known(self._number(second if key == first else first)))

    def _chooses_elements(self, op: Op) -> bool:
        """Select's condition may choose whole rows; SelectV2's never does."""
        return op.op == "SelectV2" or len(self.graph.shape(op.inputs[0]) or ()) == len(self.axes)

    def shift(self, key: Key, readers: Readers) -> Key:
        """``where(condition, scores - number, scores)``, as Keras's `Attention` has it: its result, scores with something added."""
        # Two ops read the scores: one moves them, the other chooses, and reads what was moved as well.
        users = readers.of.get(key, [])
        require(len(users) == 2 and key not in readers.fetched and self.column is None)
        moves, chooses = (known(self.graph.ops.get(user)) for user in users)
        require(chooses.op in SELECT and readers.only(moves.out) is chooses)
        number = known(self._number(known(other_input(moves, key))))
        require(moves.op in ADD or (moves.op == "Sub" and moves.inputs[0] == key))
        condition, first, second = chooses.inputs
        made, shape = moves.out, self.atoms.shape(self.axes)
        require({first, second} == {key, made} and condition not in (key, made) and self._chooses_elements(chooses))
        require(self.graph.shapes.get(made) == shape == self.graph.shapes.get(chooses.out))
        self.ops += [moves, chooses]
        self._add(condition, -number if moves.op == "Sub" else number, first == made)
        return chooses.out

    def _weights(self, op: Op, key: Key) -> None:
        """``where(condition, weights, 0)`` behind the softmax, as Keras's `Softmax` has it, by the condition that replaced scores."""
        require(op.op in SELECT and len(self.replaced) == 1 and not self.zeros)
        condition, first, second = op.inputs
        (one,) = self.replaced
        require(condition == one.key and self._beside(condition) == tuple(map(self.atoms.whole, one.axes)))
        require(self._chooses_elements(op) and key == (first if one.kept else second))
        self.zeros = self._number(second if one.kept else first) == 0
        require(self.zeros)


def _follow(graph: OpGraph, readers: Readers, first: Op) -> Match:
    """The attention that begins with a product.

    Raises:
        Unproved: There is none.
    """
    atoms = Atoms()
    shapes = [known(graph.shapes.get(key)) for key in (*first.inputs, first.out)]
    left, right, scores = product_axes(first, shapes[:2], atoms, {})
    way = _Way(graph, atoms, scores, str(first.attrs["T"]), [first])
    key = first.out
    while (op := readers.only(key)) is None or not is_product(op):
        if op is None:
            key = way.shift(key, readers)
        else:
            way.take(op, key)
            key = op.out
    return _finish(way, op, key, (left, right))


def _finish(way: _Way, last: Op, weights: Key, operands: tuple[Axes, Axes]) -> Match:
    """The match, if the axes are those of attention.

    Raises:
        Unproved: They are not.
    """
    graph, atoms, first = way.graph, way.atoms, way.ops[0]
    softened, slot = known(way.column), 1 - last.inputs.index(weights)
    value = last.inputs[slot]
    shapes = [known(graph.shapes.get(key)) for key in last.inputs]
    require(last.attrs.get("T") == first.attrs.get("T") == way.dtype)
    made = product_axes(last, shapes, atoms, {1 - slot: way.axes})
    require(graph.shapes.get(last.out) == atoms.shape(made[2]))
    # The axis of the softmax is one of the keys: the operand that has it is the keys, the other one the queries.
    sides = [atoms.flat(axes) for axes in operands]
    scores, values, result = (atoms.flat(axes) for axes in (way.axes, made[slot], made[2]))
    column = atoms.whole(softened)
    require(len(column) == 1 and sum(column[0] in side for side in sides) == 1)
    turned = column[0] in sides[0]
    of_query, of_key = (1, 0) if turned else (0, 1)
    queries, keys = sides[of_query], sides[of_key]
    # Queries and keys are summed along one axis, weights and values along that of the softmax; every other axis goes through all.
    rows = [atom for atom in scores if atom in queries and atom not in keys and atom not in values]
    inner = (set(queries) & set(keys)) - set(scores)
    depth = set(values) - set(scores)
    summed = (set(scores) & set(values)) - set(result)
    require(len(inner) == len(depth) == 1 and summed == set(column) and len(way.mask_types) <= 1)
    row = tuple(rows[-1:])
    batch = tuple(atom for atom in scores if atom not in (*row, *column))
    require(set(result) == {*batch, *row, *depth})
    axes = tuple(tuple(map(atoms.whole, one)) for one in (*operands, made[slot], made[2]))
    return Match(
        (*way.ops, last),
        atoms,
        Operand(first.inputs[of_query], axes[of_query]),
        Operand(first.inputs[of_key], axes[of_key]),
        Operand(value, axes[2]),
        batch,
        row,
        column[0],
        inner.pop(),
        depth.pop(),
        axes[3],
        way.scale,
        tuple(replace(one, axes=tuple(map(atoms.whole, one.axes))) for one in way.added),
        tuple(replace(one, axes=tuple(map(atoms.whole, one.axes))) for one in way.replaced),
        way.zeros,
        str(last.attrs["T"]),
        next(iter(way.mask_types), way.soft),
    )
