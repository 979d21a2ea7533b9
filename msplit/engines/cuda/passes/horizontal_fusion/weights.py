"""Constants of merged ops, stacked once. No large one is held twice.

Groups that use different parts of the same weights (every wavefront of an unrolled network reads those of the layers that
it is in) share one stack and read neighbouring positions of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from msplit.engines.cuda.ir.graph import Key, OpGraph
from msplit.opset.traits import GATHERS, MATMULS

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


class Weights:
    """The stacks that merges take their constants from. `finish` makes them."""

    def __init__(self, graph: OpGraph) -> None:
        self._source = graph
        self._stacks: dict[Key, _Stack] = {}
        self._at: dict[Key, tuple[Key, int]] = {}
        self._copies: dict[tuple[Key, ...], Key] = {}
        self._shaped: dict[tuple[Key, tuple[int, ...]], Key] = {}
        self._readers = graph.consumers()
        self._fetched = frozenset(graph.fetches.values())
        self._known: dict[tuple[Key, bool], bool] = {}

    def take(self, keys: Sequence[Key], *, wide: bool = False) -> tuple[Key, int] | None:
        """A stack in which these constants of one shape are neighbours, and where the first one is; None where there can be none.

        Args:
            keys: The constants.
            wide: Whether a new stack holds matrices side by side, as one wide matrix.
        """
        found = self._neighbours(keys, below=False, wide=wide)
        if found is not None:
            return found
        if all(self._source.constants[key].nbytes <= SMALL_BYTES for key in keys):
            return self.copy(keys), 0
        return None

    def take_rows(self, keys: Sequence[Key]) -> tuple[Key, list[int], list[int]] | None:
        """The same for tables of one width, below each other: the block, every first row and every number of rows."""
        found = self._neighbours(keys, below=True)
        if found is None:
            return None
        stack, first = found
        rows = self._stacks[stack].rows
        assert rows is not None
        return stack, rows[first : first + len(keys)], [len(self._source.constants[key]) for key in keys]

    def _neighbours(self, keys: Sequence[Key], *, below: bool, wide: bool = False) -> tuple[Key, int] | None:
        if len(set(keys)) != len(keys) or not all(self._movable(key, below) for key in keys):
            return None
        known = [self._at.get(key) for key in keys]
        first = known[0]
        if first is None:
            if any(known):
                return None
            stack = (self._source.fresh(), 0)
            self._stacks[stack] = _Stack(rows=[] if below else None, wide=wide)
            self._append(stack, keys)
            return stack, 0
        stack, start = first
        held = self._stacks[stack]
        if (held.rows is not None) != below:
            return None
        count = min(len(held.keys) - start, len(keys))
        if held.keys[start : start + count] != list(keys[:count]) or any(at is not None for at in known[count:]):
            return None
        self._append(stack, keys[count:])
        return stack, start

    def _movable(self, key: Key, below: bool) -> bool:
        """Whether everything that reads a constant can read it from a stack instead."""
        if (key, below) not in self._known:
            self._known[key, below] = self._find_movable(key, below)
        return self._known[key, below]

    def _find_movable(self, key: Key, below: bool) -> bool:
        wanted = GATHERS if below else MATMULS
        slot = 0 if below else 1
        value = self._source.constants[key]
        if value.nbytes <= SMALL_BYTES:
            return True
        for number in self._readers.get(key, ()):
            op = self._source.ops[number]
            if op.op not in wanted or op.inputs.index(key) != slot or op.inputs.count(key) != 1:
                return False
            if op.attrs.get("transpose_a") or op.attrs.get("batch_dims"):
                return False
            axis = self._source.constants.get(op.inputs[2]) if op.op == "GatherV2" else np.asarray(0)
            if axis is None or int(axis) != 0:
                return False
        return key not in self._fetched

    def _append(self, stack: Key, keys: Sequence[Key]) -> None:
        held = self._stacks[stack]
        for key in keys:
            self._at[key] = stack, len(held.keys)
            held.keys.append(key)
            if held.rows is not None:
                before = held.keys[-2] if len(held.keys) > 1 else None
                held.rows.append(held.rows[-1] + len(self._source.constants[before]) if before is not None else 0)

    def copy(self, keys: Sequence[Key]) -> Key:
        """Small constants side by side, in a constant of its own."""
        made = tuple(keys)
        if made not in self._copies:
            self._copies[made] = self._source.constant(np.stack([self._source.constants[key] for key in keys]))
        return self._copies[made]

    def shaped(self, key: Key, shape: tuple[int, ...]) -> Key:
        """A constant in another shape."""
        value = self._source.constants[key]
        if value.shape == shape:
            return key
        if (key, shape) not in self._shaped:
            self._shaped[key, shape] = self._source.constant(value.reshape(shape))
        return self._shaped[key, shape]

    def place(self, key: Key) -> tuple[Key, int] | None:
        """The stack that holds a constant, and where."""
        return self._at.get(key)

    def is_wide(self, stack: Key) -> bool:
        """Whether a stack holds matrices side by side."""
        return stack in self._stacks and self._stacks[stack].wide

    def first_row(self, key: Key) -> int:
        """First row of a table in its block."""
        stack, index = self._at[key]
        rows = self._stacks[stack].rows
        assert rows is not None
        return rows[index]

    def finish(self) -> None:
        """Makes the stacks."""
        constants = self._source.constants
        for stack, held in self._stacks.items():
            values = [constants[key] for key in held.keys]
            constants[stack] = np.stack(values, int(held.wide)) if held.rows is None else np.concatenate(values)
            self._source.shapes[stack] = constants[stack].shape
