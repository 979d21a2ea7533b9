"""Masks of attention: all that a model does with scores in front of the softmax, as an addend that does the same.

A model replaces scores that do not count by a very small number, where a kernel adds one. The weight is zero both ways, as long as
another score of the row counts. Where none does, the model's weights are all the same; so they are with `NOTHING` added, which is so
small that it leaves no bit of the score. Where it was minus infinity they are not a number, and where the model sets such weights to
zero, so is the result: both are put in afterwards.

One mask can be added so. Several may leave no key of a row: one that replaces scores by -1e9 and one that adds as much give weights by what
that leaves of some scores and not of others, and the sum of two that are added leaves other bits than one after the other. So of several
it must be known that in each row a key counts (`_Masks.counts`); what is not known stays as the model has it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.ir.dtypes import numpy_dtype, torch_dtype
from msplit.engines.cuda.ir.graph import Attrs, Key, Op, OpGraph, Shape, proved, require
from msplit.engines.cuda.passes.attention.match import Added, Axes, Axis, Match, Replaced
from msplit.engines.cuda.passes.pattern import FLOATS, value_key
from msplit.opset.traits import ADD, RESHAPES, SELECT, VIEWS

NOTHING = -(2.0**100)
"""Added to a score: nothing is left of it. (float16 has no such number.)"""

SMALL = -1e4
"""Scores from here downwards do not count beside others. BERT and GPT-2 add that much or put it there."""

PLAIN = 1024.0
"""Largest addends that may be added in any order: the last bits alone differ."""

SWALLOWED = 16.0
"""Numbers up to here leave no bit in one that hides scores."""

Term = Key | NDArray[Any]
"""A value of the graph, or one that is known."""


@dataclass(frozen=True)
class AttentionMask:
    """Changes of scores in front of the softmax.

    Attributes:
        bias: Is added to them, laid as `Match.order` says, of size one where it is the same for all; None: nothing is.
        causal: Whether instead each query counts no key behind its own place.
        kept: What counts, laid likewise, where rows in which nothing does need their own result; None: they do not.
        lost: That result.
    """

    bias: Key | None = None
    causal: bool = False
    kept: Key | None = None
    lost: float = 0.0


@dataclass
class Maker:
    """Makes the ops of masks, each once for all attentions of a graph.

    Attributes:
        made: Ops by what they are, constants by what they are and the GPU of what reads them.
        gpus: Of a split graph, where its ops run.
    """

    graph: OpGraph
    made: dict[Any, Key] = field(default_factory=dict)
    gpus: Mapping[int, int] = field(default_factory=dict)

    def key(self, like: Op, term: Term) -> Key:
        """A term as a value of the graph, to be read where an op runs."""
        if isinstance(term, tuple):
            return term
        name = self.gpus.get(like.node, 0), value_key(term)
        if name not in self.made:
            self.made[name] = self.graph.constant(term)
        return self.made[name]

    def shape(self, term: Term) -> Shape:
        """The shape of a term."""
        return self.graph.shape(term) or () if isinstance(term, tuple) else term.shape

    def op(self, like: Op, op: str, attrs: Attrs, inputs: Sequence[Term], shape: Shape, dtype: str) -> Key:
        """An op's result."""
        keys = [self.key(like, term) for term in inputs]
        name = (op, tuple(sorted(attrs.items())), tuple(keys), shape)
        if name not in self.made:
            self.made[name] = self.graph.add(op, like, attrs, keys, shape, dtype).out
        return self.made[name]

    def forget(self, first: int) -> None:
        """Takes back what was made from a number on."""
        for number in range(first, self.graph.numbers):
            self.graph.ops.pop(number, None)
            self.graph.constants.pop((number, 0), None)
        self.made = {name: key for name, key in self.made.items() if key[0] < first}

    def laid(self, like: Op, term: Term, axes: Axes, order: Axis, sizes: Sequence[int], dtype: str) -> Term:
        """A term with its atoms in some order, of size one where it has none of them."""
        atoms = [atom for axis in axes for atom in axis]
        place = sorted(range(len(atoms)), key=lambda number: order.index(atoms[number]))
        shape = tuple(sizes[atom] if atom in atoms else 1 for atom in order)
        flat = tuple(sizes[atom] for atom in atoms)
        if not isinstance(term, tuple):
            return term.reshape(flat).transpose(place).reshape(shape)
        if place != sorted(place):
            term = self._reshaped(like, term, flat, dtype)
            permuted = tuple(flat[number] for number in place)
            term = self.op(like, "Transpose", {"T": dtype}, [term, np.asarray(place, np.int32)], permuted, dtype)
        return self._reshaped(like, term, shape, dtype)

    def _reshaped(self, like: Op, key: Key, shape: Shape, dtype: str) -> Key:
        if self.shape(key) == shape:
            return key
        return self.op(like, "Reshape", {"T": dtype}, [key, np.asarray(shape, np.int64)], shape, dtype)


@dataclass(frozen=True)
class _Masks:
    """Works the masks of one match out."""

    maker: Maker
    match: Match

    @property
    def like(self) -> Op:
        return self.match.ops[0]

    @property
    def dtype(self) -> str:
        return self.match.mask_type

    def laid(self, key: Key, axes: Axes, dtype: str) -> Term:
        """A value as masks are laid; float64 or truth values where it is known."""
        known = self.maker.graph.constants.get(key)
        term: Term = key if known is None else known.astype(bool if dtype == "bool" else np.float64)
        return self.maker.laid(self.like, term, axes, self.match.order, self.match.atoms.sizes, dtype)

    def typed(self, term: Term, dtype: str = "") -> Term:
        """A number, or many, in the type of what is added, or in another."""
        if isinstance(term, tuple):
            return term
        dtype = dtype or self.dtype
        return np.where(np.isneginf(term), term, np.maximum(term, _least(dtype))).astype(numpy_dtype(dtype))

    def finished(self, bias: Term) -> Key:
        """The addend as the kernel takes it: in the type of queries, and finite as far as it was."""
        wanted = self.match.dtype
        if isinstance(bias, tuple) and self.dtype != wanted:
            if _least(wanted) > _least(self.dtype):
                bias = self._op("Maximum", self.dtype, bias, self.typed(self._scalar(_least(wanted))))
            bias = self._op("Cast", wanted, bias, attrs={"SrcT": self.dtype, "DstT": wanted})
        return self.maker.key(self.like, self.typed(bias, wanted))

    def _op(self, op: str, dtype: str, *inputs: Term, attrs: Attrs | None = None) -> Key:
        """The result, of a type, of an op on terms that broadcast. Its attributes are that type, or those given."""
        shape = np.broadcast_shapes(*map(self.maker.shape, inputs))
        attrs = ({} if dtype == "bool" else {"T": dtype}) if attrs is None else attrs
        return self.maker.op(self.like, op, attrs, inputs, shape, dtype)

    def binary(self, op: str, first: Term, second: Term, dtype: str) -> Term:
        """A function of two terms: known where both are."""
        if not isinstance(first, tuple) and not isinstance(second, tuple):
            return np.asarray(_KNOWN[op](first, second))
        if dtype != "bool":
            first, second = self.typed(first), self.typed(second)
        return self._op(op, dtype, first, second)

    def chosen(self, condition: Term, first: Term, second: Term) -> Term:
        """The first where the condition holds, else the second."""
        if not any(isinstance(term, tuple) for term in (condition, first, second)):
            return np.where(condition, first, second)
        return self._op("SelectV2", self.dtype, condition, self.typed(first), self.typed(second))

    def added(self, one: Added) -> Term:
        """The addend, laid."""
        if one.where is None:
            term = self.laid(one.key, one.axes, self.dtype)
            return term if one.factor == 1 else self.binary("Mul", term, self._scalar(one.factor), self.dtype)
        condition = self.laid(one.key, one.axes, "bool")
        numbers = self._scalar(one.factor), self._scalar(0.0)
        return self.chosen(condition, *(numbers if one.where else numbers[::-1]))

    def _scalar(self, number: float) -> NDArray[Any]:
        return np.full((1,) * len(self.match.order), number)

    def conditions(self, one: Replaced) -> Iterator[Term]:
        """Conditions under which scores count: the parts of a conjunction, laid, without those that always hold."""
        graph = self.maker.graph
        waiting = [(one.key, one.axes, one.kept)]
        while waiting:
            key, axes, kept = waiting.pop()
            op = graph.ops.get(key[0])
            shapes = [] if op is None else [graph.shape(name) for name in op.inputs]
            if op is not None and op.op in ("LogicalNot", "LogicalAnd" if kept else "LogicalOr") and None not in shapes:
                turned = kept != (op.op == "LogicalNot")
                parts = zip(op.inputs, shapes, strict=True)
                waiting += [(name, _part(axes, shape or ()), turned) for name, shape in parts]
                continue
            term = self.laid(key, axes, "bool")
            if isinstance(term, tuple):
                yield term if kept else self._op("LogicalNot", "bool", term)
            elif not (term == kept).all():
                yield term == kept

    def replaced(self, one: Replaced, bias: Term, conditions: list[Term]) -> Term:
        """Sum of the masks that are added once scores have been replaced by a number."""
        last = one.before == len(self.match.added) and one.number > -math.inf
        return self.chosen(self.both(conditions), bias, self._scalar(NOTHING if last else one.number))

    def counts(self, conditions: Mapping[Replaced, list[Term]], terms: Sequence[Term]) -> None:
        """Makes sure that in every row a key counts that no mask hides, unless there is one mask only.

        Args:
            conditions: By what replaces scores: what must hold for them to count.
            terms: What is added.

        Raises:
            Unproved: There may be a row without.
        """
        # One mask alone is added with the same result, whatever it leaves.
        replaces = any(one.number > -math.inf for one in conditions)  # minus infinity stays that, whatever is added
        known = not any(isinstance(term, tuple) for found in conditions.values() for term in found)
        require((known and terms) or all(one.number <= SMALL for one in conditions))
        if len(terms) + replaces < 2:
            return
        unknown = [place for place, term in enumerate(terms) if isinstance(term, tuple)]
        if known and not unknown:
            self._known_counts(conditions, terms)
            return
        # Of masks that are not known: one value that is added first, or a condition that comes last, beside known numbers that are small.
        most = PLAIN if not known else SWALLOWED
        small = all(isinstance(term, tuple) or (np.abs(term) <= most).all() for term in terms)
        last = all(one.before == len(terms) or one.number == -math.inf for one in conditions)
        require(small and last and (not unknown or (unknown == [0] and not replaces and known)))

    def _known_counts(self, conditions: Mapping[Replaced, list[Term]], terms: Sequence[Term]) -> None:
        value, plain = self._scalar(0.0), np.full((1,) * len(self.match.order), True)
        for step in _in_order(conditions, terms):
            if isinstance(step, Replaced):
                kept = np.asarray(self.both(conditions[step]))
                value, plain = np.where(kept, value, step.number), plain & kept
            else:
                value, plain = value + np.asarray(step), plain & (np.abs(np.asarray(step)) <= PLAIN)
        best = np.where(plain, value, -np.inf).max(-1, keepdims=True)
        require((plain | (value <= best + SMALL / 2)).all())

    def both(self, conditions: Sequence[Term]) -> Term:
        """Returns whether all of them hold."""
        return functools.reduce(lambda first, second: self.binary("LogicalAnd", first, second, "bool"), conditions)

    def mask(self) -> AttentionMask:
        """Implements `mask_of`."""
        match = self.match
        bias: Term = self._scalar(0.0)
        kept: list[Term] = []
        lost: float | None = 0.0 if match.zeros else None
        # Where something else makes all scores as small that count, weights of others are not zero before they are set to it.
        require(len({one.number for one in match.replaced}) <= 1 and not (match.zeros and match.added))
        conditions = {one: found for one in match.replaced if (found := list(self.conditions(one)))}
        terms = [self.added(one) for one in match.added]
        self.counts(conditions, terms)
        if lost is None and any(one.number == -math.inf for one in conditions):
            lost = math.nan
        # All masks as one addend, in the order in which the model applies them.
        for step in _in_order(conditions, terms):
            if isinstance(step, Replaced):
                bias = self.replaced(step, bias, conditions[step])
                kept += conditions[step]
            else:
                bias = self.binary("AddV2", bias, step, self.dtype) if _says(bias) else step
        if any(isinstance(term, tuple) for term in terms):
            self._fit_float16()
            if any(map(self._may_hide, match.added)):
                # Of a row of minus infinity the model's weights are not a number, where kernels give zeros.
                kept.append(self._is_above(bias))
                lost = math.nan
        # Rows in which nothing counts: they get their own result where that is not known before the run, and are refused where it is.
        counts = self.both(kept) if kept else None
        if isinstance(counts, tuple):
            require(lost is not None or "float16" not in (match.dtype, self.dtype))
            return AttentionMask(self.finished(bias), kept=None if lost is None else counts, lost=lost or 0.0)
        require(counts is None or counts.any(-1).all())
        return AttentionMask(self.finished(bias)) if isinstance(bias, tuple) else self._known(bias)

    def _known(self, bias: NDArray[Any]) -> AttentionMask:
        require(self.match.dtype != "float16" or not (bias <= _least("float16")).all(-1).any())
        require(not np.isnan(bias).any() and not np.isneginf(bias).all(-1).any())
        if not bias.any():
            return AttentionMask()
        return AttentionMask(causal=True) if self._is_causal(bias) else AttentionMask(self.finished(bias))

    def _fit_float16(self) -> None:
        """Makes sure that what is added, and not known, is as large in the type of queries."""
        match = self.match
        cut = self.dtype == "float32" or any(self._was_cut(one.key) for one in match.added)
        require(match.dtype != "float16" or not cut)

    def _is_above(self, bias: Term) -> Key:
        """Tell whether what is added is more than minus infinity."""
        return self._op("Greater", "bool", bias, self.typed(self._scalar(-math.inf)), attrs={"T": self.dtype})

    def _may_hide(self, one: Added) -> bool:
        """Tell whether minus infinity may be added: it is chosen, moved or summed of what is fed, of logarithms, or of known numbers."""
        graph, waiting, seen = self.maker.graph, [one.key] if one.where is None else [], {one.key}
        fed = set(graph.feeds.values())
        while waiting:
            key = waiting.pop()
            op, known = graph.ops.get(key[0]), graph.constants.get(key)
            if key in fed or (known is not None and (known == -np.inf).any()) or (op is not None and op.op == "Log"):
                return True
            if op is not None and (op.op == "Cast" or op.op in VIEWS | RESHAPES | SELECT | ADD):
                fresh = [name for name in op.inputs if name not in seen and graph.dtypes.get(name, "float32") in FLOATS]
                waiting += fresh
                seen.update(fresh)
        return False

    def _was_cut(self, key: Key) -> bool:
        """Checks if a value had numbers beyond float16. What is left of them does not swallow scores, which the kernel adds in float32: of
        rows in which nothing counts, weights would be others than the model's."""
        graph = self.maker.graph
        while (op := graph.ops.get(key[0])) is not None and op.op in VIEWS | RESHAPES:
            key = op.inputs[0]
        return op is not None and op.op == "Cast" and bool(op.attrs.get("saturate"))

    def _is_causal(self, bias: NDArray[Any]) -> bool:
        sizes = self.match.atoms.sizes
        rows, columns = self.match.atoms.size(self.match.row), sizes[self.match.column]
        if rows != columns or bias.shape[-2:] != (rows, columns) or math.prod(bias.shape[:-2]) != 1:
            return False
        table = bias.reshape(rows, columns)
        behind = np.triu(np.ones_like(table, bool), 1)
        return bool((table[behind] <= SMALL).all() and not table[~behind].any())


_KNOWN = {"AddV2": np.add, "Mul": np.multiply, "LogicalAnd": np.logical_and}


def _in_order(conditions: Mapping[Replaced, Any], terms: Sequence[Term]) -> Iterator[Replaced | Term]:
    """Changes of scores in the order in which a model makes them: what replaces some of them, and what is added."""
    for before in range(len(terms) + 1):
        yield from (one for one in conditions if one.before == before)
        yield from terms[before : before + 1]


def _least(dtype: str) -> float:
    return float(torch.finfo(torch_dtype(dtype)).min)


def _says(term: Term) -> bool:
    return isinstance(term, tuple) or bool(term.any())


def _part(axes: Axes, shape: Sequence[int]) -> Axes:
    """The axes of an operand that broadcasts to a value with these."""
    return tuple(() if size == 1 else axis for size, axis in zip(shape, axes[len(axes) - len(shape) :], strict=True))


def mask_of(maker: Maker, match: Match) -> AttentionMask | None:
    """The addend to the scores of a match, made of ops where it is not known; None where adding can not do the same."""
    return proved(_Masks(maker, match).mask)
