"""Axes of values that are the same axis, over products, transposes and reshapes.

Axes are made of *atoms*. A new axis is one atom; where a reshape cuts it, it becomes two, for every value that has it; where a reshape
joins axes, the joined one has the atoms of all. An axis of size one has none: so broadcasting needs no rule of its own, and neither do
reshapes that add such axes or drop them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msplit.engines.cuda.ir.graph import RESULT, Op, Shape
from msplit.opset.traits import BATCH_MATMULS

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

    def reshaped(self, axes: Sequence[Axis], shape: Sequence[int]) -> Axes | None:
        """The axes of a value once it has another shape; None where that takes no whole parts of axes."""
        left = list(reversed(self.flat(axes)))
        found: list[Axis] = []
        for size in shape:
            axis: list[int] = []
            while size > 1:
                if not left:
                    return None
                atom = left.pop()
                if self.sizes[atom] > size:
                    if self.sizes[atom] % size:
                        return None
                    atom, rest = self._cut(atom, size)
                    left.append(rest)
                if size % self.sizes[atom]:
                    return None
                axis.append(atom)
                size //= self.sizes[atom]
            found.append(tuple(axis))
        return None if left else tuple(found)

    def _cut(self, atom: int, size: int) -> tuple[int, int]:
        (first,), (rest,) = self.axis(size), self.axis(self.sizes[atom] // size)
        self._parts[atom] = (first, rest)
        return first, rest

    def beside(self, axes: Sequence[Axis], shape: Sequence[int]) -> Axes | None:
        """The axes of a value of some shape that broadcasts against one with these axes; None where it makes that larger."""
        if len(shape) > len(axes):
            return None
        near = axes[len(axes) - len(shape) :]
        if any(size not in (1, self.size(axis)) for axis, size in zip(near, shape, strict=True)):
            return None
        return tuple(() if size == 1 else self.whole(axis) for axis, size in zip(near, shape, strict=True))


def is_product(op: Op) -> bool:
    """Returns whether an op multiplies two tensors, summed along one axis or more."""
    return len(op.inputs) == 2 and RESULT not in op.attrs and op.op in _PRODUCTS


def product_axes(op: Op, shapes: Sequence[Shape], atoms: Atoms, known: Mapping[int, Axes]) -> tuple[Axes, ...] | None:
    """The axes of a product's operands and of its result, equal where one becomes the other.

    Args:
        op: See `is_product`.
        shapes: Of both operands.
        atoms: Takes what is new.
        known: Operand -> axes that it has already.

    Returns:
        None where it is no plain product: an axis that is summed is in one operand only, or an operand's diagonal is taken.
    """
    labels = _labels(op, shapes)
    if labels is None or any(len(set(names)) != len(names) for names in labels):
        return None
    if any(len(names) != len(shape) or 0 in shape for names, shape in zip(labels, shapes, strict=False)):
        return None
    axis_of: dict[str, Axis] = {}
    for slot, axes in known.items():
        axis_of |= {label: axis for label, axis in zip(labels[slot], axes, strict=True) if atoms.size(axis) > 1}
    for names, shape in zip(labels, shapes, strict=False):
        for label, size in zip(names, shape, strict=True):
            if size > 1:
                axis_of[label] = axis_of.get(label) or atoms.axis(size)
                if atoms.size(axis_of[label]) != size:
                    return None
    left, right, result = labels
    alone = (set(left) ^ set(right)) - set(result)
    if not alone.isdisjoint(axis_of):
        return None

    def axes_of(names: list[str], shape: Shape) -> Axes:
        return tuple(axis_of[label] if size > 1 else () for label, size in zip(names, shape, strict=True))

    return axes_of(left, shapes[0]), axes_of(right, shapes[1]), tuple(axis_of.get(label, ()) for label in result)


def _labels(op: Op, shapes: Sequence[Shape]) -> tuple[list[str], list[str], list[str]] | None:
    """A name for each axis of both operands and of the result."""
    left, right = (len(shape) for shape in shapes)
    if op.op == _EINSUM:
        return _einsum_labels(str(op.attrs.get("equation", "")), left, right)
    if min(left, right) < 2:
        return None
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


def _einsum_labels(equation: str, left: int, right: int) -> tuple[list[str], list[str], list[str]] | None:
    operands, arrow, output = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    if not arrow or len(terms) != 2:
        return None
    ranks = zip(terms, (left, right), strict=True)
    hidden = [rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in ranks]
    if min(hidden) < 0:
        return None
    counts = (*hidden, max(hidden))
    found = []
    for term, count in zip((*terms, output), counts, strict=True):
        before, dots, after = term.partition("...")
        found.append([*before, *(_counted(count) if dots else []), *after])
    return found[0], found[1], found[2]
