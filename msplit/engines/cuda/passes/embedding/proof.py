"""Parts that the rules of the densifier share: values that are known, and what an op turned out to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.dtypes import numpy_dtype
from msplit.engines.cuda.ir.graph import Attrs, Key, Op, OpGraph, Shape, known
from msplit.engines.cuda.ir.interpret import LARGEST_FOLDED
from msplit.engines.cuda.passes.embedding import intervals


@dataclass
class Proof:
    """A simpler form that an op turned out to have.

    Attributes:
        outputs: Per output port the value that takes its place, or the array that it is in every run.
        ops: New ops in topological order, which `prove` fills in. They read inputs of the op, values of earlier proofs, and one another.
        stays: Whether the op stays, because not every output is proved. It does if none is.
        later: Values that later proofs may read, whatever else reads them.
    """

    outputs: dict[int, Key | NDArray[Any]] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    stays: bool = False
    later: tuple[Key, ...] = ()


class Mixed(Exception):
    """An op would read all rows of one value, and of another those that are there."""


def is_grid(indices: NDArray[Any], sizes: tuple[int, ...]) -> bool:
    """Returns whether a matrix of coordinates names every position of a tensor of these sizes once, in row-major order."""
    if indices.ndim != 2 or indices.shape != (math.prod(sizes), len(sizes)):
        return False
    return bool(np.array_equal(indices, np.indices(sizes).reshape(len(sizes), -1).T))


def run_length(ids: NDArray[Any]) -> int:
    """k where ids are 0 k times, 1 k times, and so on; 0 where they are anything else."""
    if ids.ndim != 1 or not ids.size:
        return 0
    rows = int(ids[-1]) + 1
    if rows < 1 or ids.size % rows:
        return 0
    length = ids.size // rows
    return length if np.array_equal(ids, np.repeat(np.arange(rows), length)) else 0


@dataclass(frozen=True, eq=False)
class Mask:
    """A choice of rows: those that are there.

    Attributes:
        key: A vector of truth values, one per row.
        base: Integers of which it is known what they are where the mask holds; None if nothing is.
        apart: The mask does not hold where one of these numbers stands in the base.
        floor: Nor where the base is below this; with `base` and both, that is all there is to the mask.
        occupied: Of how many groups of rows each has one that is there; 0 where that is not known.
    """

    key: Key
    base: Key | None = None
    apart: frozenset[int] = frozenset()
    floor: int | None = None
    occupied: int = 0


Absent = int | Literal["any"] | None
"""Number that stands in rows that are not there; None and "any" as in `Kept`."""


@dataclass(frozen=True, eq=False)
class Kept:
    """The rows of a dense value that a mask keeps. The elements mean what they mean in the value that TensorFlow has.

    Attributes:
        dense: All rows.
        mask: Which of them are there.
        absent: The number that stands in all others; None where anything may; "any" where, of padded values (see `padding`), there
            are rows without an id among those that are there, too, so that nothing looks at what stands in them.
    """

    dense: Key
    mask: Mask
    absent: Absent = None


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions in a list of kept rows: TensorFlow counts those that are there, and the dense value counts all, so that elements differ.

    Attributes:
        mask: Which positions are there.
        into: The mask of the list that they are positions in: only rows that this very mask keeps may be read by them.
        dense: All positions, -1 for none; None for each place's own.
        absent: See `Kept`.
    """

    mask: Mask
    into: Mask
    dense: Key | None = None
    absent: Absent = None


@dataclass(frozen=True)
class Sizes:
    """The shape of kept rows: as many as a mask keeps, of these sizes; how many there are, too."""

    mask: Mask
    inner: tuple[int, ...] = ()


@dataclass(frozen=True)
class Filled:
    """Rows none of which is empty any more, each with one place more for a default.

    Attributes:
        mask: Which places are there.
        grid: Coordinates of all places.
        rows: How many rows.
        length: Places of each before that.
        empty: Which rows had none.
    """

    mask: Mask
    grid: Key
    rows: int
    length: int
    empty: Key


class KnownValues:
    """Values that one inference of shapes knows so far, and new ops and constants beside them.

    Args:
        graph: Its constants are what is the same in every run, its shapes those of all other values; both grow while the inference goes on.

    Attributes:
        ops: New ops of the proof that is being made, in topological order.
        made: The ops that ran, by number.
        kept: Values whose shapes depend on values: the rows that a mask keeps.
        positions: Positions in kept rows.
        masks: A mask before, and a condition -> the mask after.
        joined: Masks of rows one below the other -> that of all.
        sizes: Shapes of kept rows.
        axes: Axes along which a gradient of kept rows is summed up; where there is one row, it may be the first axis, too.
        elements: Values that have the elements of kept rows, in a shape that is not known.
        completed: A mask, and coordinates of its rows -> the same without empty rows.
        returned: Where what was there before rows were filled is now -> the mask before, and what it was filled up to.
        filled: Ids without empty rows -> the ids before, and what they were filled up to.
        lookups: Lookups by such ids -> likewise, and the op.
        flags: Values that repeat a truth value per row.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.ops: list[Op] = []
        self.made: dict[int, Op] = {}
        self.kept: dict[Key, Kept] = {}
        self.positions: dict[Key, Positions] = {}
        self._gaps: set[Key] = set()
        self._made_of_gaps: set[int] = set()
        self.masks: dict[tuple[Mask | None, Key], Mask] = {}
        self.joined: dict[tuple[Mask, ...], Mask] = {}
        self.sizes: dict[Key, Sizes] = {}
        self.axes: dict[Key, tuple[int, ...]] = {}
        self.elements: dict[Key, Kept] = {}
        self.completed: dict[tuple[Mask, Key], Filled] = {}
        self.returned: dict[Key, tuple[Mask, Filled]] = {}
        self.filled: dict[Key, tuple[Kept, Filled]] = {}
        self.lookups: dict[Key, tuple[Kept, Filled, Op]] = {}
        self.flags: dict[Key, Key] = {}
        self._ranges: dict[Key, intervals.Range | None] = {}

    # Facts, see `intervals.Facts`

    def array(self, key: Key) -> NDArray[Any] | None:
        """The value itself, where it is the same in every run."""
        return self.graph.constants.get(key)

    def range(self, key: Key) -> intervals.Range | None:
        """Interval of a value."""
        if key not in self._ranges and key in self.graph.constants:
            self._ranges[key] = intervals.of_array(self.graph.constants[key])
        return self._ranges.get(key)

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """Shape of a value, where that is the same in every run."""
        return self.graph.shape(key)

    def dtype(self, key: Key) -> str | None:
        """Name of a value's type."""
        return self.graph.dtype(key)

    def is_zero(self, key: Key) -> bool:
        """Returns whether it is known to hold zeros and nothing else."""
        op, value = self.made.get(key[0]), self.array(key)
        return (op is not None and op.op == "ZerosLike") or (value is not None and not np.any(value))

    def learn(self, op: Op, dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """After an op ran: keeps the interval of its first output. If that can have one value only, the array that it always is."""
        key = (op.node, 0)
        self.made[op.node] = op
        found = intervals.within(intervals.of(self, op), dtype) if dtype.kind in "iub" else None
        if found is None:
            return None
        self._ranges[key] = found
        shape = self.shape(key)
        if found[0] != found[1] or shape is None or math.prod(shape) * dtype.itemsize > LARGEST_FOLDED:
            return None
        return np.full(shape, found[0], dtype)

    def is_followed(self, key: Key) -> bool:
        """Returns whether something is known of a value whose shape depends on values, or of what it was made of."""
        tables = (self.kept, self.positions, self.sizes, self.axes, self.elements, self.flags)
        return any(key in table for table in tables)

    def keep(self, op: Op, dense: Key, mask: Mask, *, port: int = 0, absent: Absent = None) -> Proof:
        """Note that the output of an op is the rows of a dense value that a mask keeps."""
        self.kept[op.node, port] = Kept(dense, mask, absent)
        self._gaps.add(dense)
        return Proof()

    def point(self, op: Op, found: Positions, *, port: int = 0) -> Proof:
        """Note that the output of an op is positions in kept rows."""
        self.positions[op.node, port] = found
        return Proof()

    def new(self, op: str, like: Op, inputs: list[Key], attrs: Attrs | None = None, *, closes: bool = False) -> Key:
        """The first output of a new op of the proof that is being made, which does the work of another op.

        What it makes of rows that may not be there has gaps, too, unless it `closes` them: whatever stands in them, TensorFlow's own
        value comes out.

        Raises:
            Mixed: It would read such rows beside what has TensorFlow's number of rows only.
        """
        number = self.graph.fresh()
        if any(map(self.has_gaps, inputs)):
            if any(key[0] in self.made and self.shape(key) is None for key in inputs):
                raise Mixed
            if not closes:
                self._made_of_gaps.add(number)
        self.ops.append(Op(number, like.name, op, attrs or {}, inputs, list(like.source_nodes)))
        return number, 0

    def has_gaps(self, key: Key) -> bool:
        """Tell whether some rows of a value may not be there, or of what it is made of: it lies beside TensorFlow's, never in its place."""
        return key in self._gaps or key[0] in self._made_of_gaps

    def constant(self, value: NDArray[Any]) -> Key:
        """A new constant."""
        return self.graph.constant(value)

    def integers(self, value: int | Sequence[int]) -> Key:
        """A new constant of int32: sizes, axes, bounds."""
        return self.constant(np.asarray(value, np.int32))

    def rows(self, key: Key) -> Kept | Positions:
        """Kept rows, or positions in such, that a value is.

        Raises:
            Unproved: It is neither.
        """
        return self.positions[key] if key in self.positions else known(self.kept.get(key))

    def length(self, mask: Mask) -> int:
        """Number of rows that it covers."""
        return (self.shape(mask.key) or (0,))[0]

    def all_of(self, kept: Kept | Positions) -> Key:
        """The dense value."""
        if kept.dense is None:
            return self.constant(np.arange(self.length(kept.mask), dtype=np.int32))
        return kept.dense

    def chosen(self, like: Op, kept: Kept | Positions, other: Key | int) -> Key:
        """The rows that are there, and a number in the place of all others."""
        dense, mask = self.all_of(kept), kept.mask.key
        if kept.absent is not None and kept.absent == other:
            return dense
        shape, dtype = self.shape(dense) or (), str(self.dtype(dense))
        number = other if isinstance(other, tuple) else self.constant(np.array(other, numpy_dtype(dtype)))
        if len(shape) > 1:
            mask = self.reshape(like, mask, (shape[0], *(1 for _ in shape[1:])))
        return self.new("SelectV2", like, [mask, dense, number], {"T": dtype})

    def gather(self, like: Op, params: Key, indices: NDArray[np.int64] | Key) -> Key:
        """Rows of a value."""
        rows = indices if isinstance(indices, tuple) else self.constant(indices)
        return self.new("GatherV2", like, [params, rows, self.integers(0)], {"batch_dims": 0})

    def reshape(self, like: Op, key: Key, sizes: Shape, *, closes: bool = False) -> Key:
        """A value in another shape."""
        return self.new("Reshape", like, [key, self.constant(np.asarray(sizes, np.int64))], closes=closes)
