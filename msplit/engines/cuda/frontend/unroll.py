"""Turns functional ops into the ops that they run, one after the other, while `specialize` finds every shape and constant.

A loop whose number of turns only the run knows is unrolled up to a bound that its condition proves. Turns go on from what the turn before
gave, as if the loop never ended, so that counters stay constants. Beside that, each value that the loop gives is chosen: that of the last
turn whose condition, and all before it, held. What later turns compute, NaN or whatever it is, is never chosen.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from msplit.engines.cuda.frontend.list_values import OPTIONAL, Result, TensorList, TooMany, Values, chosen
from msplit.engines.cuda.frontend.partition import READS_A_VARIABLE
from msplit.engines.cuda.frontend.row_union import below, row_union
from msplit.engines.cuda.frontend.tensor_lists import LISTS, OF_LISTS
from msplit.engines.cuda.ir.functions import FRAME, FUNCTIONAL, Bodies, Body, functions_of, taken
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, final, proved
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import MAY_NOT_RUN, Unsupported
from msplit.engines.cuda.ops.shape import hands_on
from msplit.errors import EngineError
from msplit.opset.traits import CALLS, CASE, CONDS, IF, LOOPS, SELECT, ops_with

MOST_OPS = 100_000
"""Ops and turns that all loops of a model may become."""

TURN = r"turn \d+/"
"""Part of the name of an op that says in which turn of a loop it runs."""

MOST_DEPTH = 50
"""Loops, conds and calls inside each other."""

_FIX = "use --engine tensorflow, or cut the model with --part inputs= and outputs= so that this node is outside"


Made = Generator[Op, None, list[Key]]

_FALSE, _TRUE = (0, 0), (1, 1)
_CONDITIONS = SELECT | ops_with("ordered") | ops_with("logic") | {"LogicalNot", "Cast"}
"""Ops that conditions are made of."""

_Found = TypeVar("_Found")


class Ranges(Protocol):
    """What an inference knows of integers and truth values."""

    def range(self, key: Key) -> tuple[int, int] | None:
        """The least and the greatest number that a value may have."""


@dataclass
class _Masked:
    """A loop whose condition only the run knows, from the first turn of which that is so.

    Attributes:
        results: What the loop gives, if it has ended.
        active: Whether it has not.
        first: That turn.
        count: Ops of all loops before it.
        margins: How far each comparison of the last condition was from being false: its name, and by how much.
        by: The comparison that is false first.
        total: Turns that the loop has at most, as far as the last two conditions say.
    """

    results: list[Key]
    active: Key
    first: int
    count: int
    margins: Sequence[tuple[str, int]]
    by: str
    total: int = 0


class Unroller(Values):
    """Goes along with one inference.

    Args:
        graph: Its constants and shapes are what is known; both grow while the inference goes on. Gets the constants of bodies.
        names: What is another value; the results of functional ops and of lists are put in.
        values: What the inference holds; loses what nothing reads any more.
        facts: What it knows of numbers.

    Attributes:
        bounds: Loop whose turns depend on values -> the most turns that it takes, and the name of the comparison that says so.
        masking: How many loops that may have ended are around what is handed on.
        kept: Values that may be read later, whoever was the last that the graph names.
        made: Values of the ops that ran since the outermost loop's turn began; the inference puts them in.
    """

    def __init__(
        self, graph: OpGraph, bodies: Bodies | None, names: dict[Key, Key], values: dict[Key, Any], facts: Ranges
    ) -> None:
        super().__init__(graph, MOST_OPS)
        self._facts = facts
        self._conditions: dict[int, Op] = {}
        self._under: dict[
            Key, Key
        ] = {}  # what the branch gives that is known to be taken -> the condition that says so
        self.bounds: dict[str, tuple[int, str]] = {}
        self.masking = 0
        self._bodies, self.names, self._values = bodies, names, values
        self.kept: set[Key] = set()
        self.made: list[Key] = []
        self._constants: dict[tuple[int, Key], Key] = {}
        # (condition, what it has chosen) -> if it is false, if it is true.
        self._choices: dict[tuple[Key, Key], tuple[Key, Key]] = {}
        self._equal: dict[tuple[Key, int], Key] = {}  # (what a Case looks at, number of a branch) -> whether it is that
        self._depth = self._branches = 0  # how deep in functions, and in conds of which all branches run

    # What the inference calls

    def pieces(self, op: Op) -> Iterator[Op]:
        """The ops that do an op's work, mostly itself. Each must have run when the next is asked for.

        Raises:
            EngineError: How a loop goes depends on values; the message names the node.
        """
        if op.op in LISTS or op.op in FUNCTIONAL or self._is_of_lists(op):
            op.inputs = [self._final(key) for key in op.inputs]
            try:
                yield from self._functional(op) if op.op in FUNCTIONAL else self._listed(op)
            except Unsupported as problem:
                raise EngineError(f"{op.op}: {problem}", where=f"node {op.name}", fix=_FIX) from problem
            except (KeyError, IndexError, TypeError, ValueError) as problem:
                what = f"attributes or inputs are not those of {op.op}, or of what it runs ({problem})"
                raise EngineError(what, where=f"node {op.name}", fix="export the model again") from problem
        else:
            yield self._on_tensors(op)

    def _on_tensors(self, op: Op) -> Op:
        """An op that is none of lists. An array's flow, or a list as a whole, has the shape of a scalar, and no value that it could read.

        Raises:
            EngineError: It asks for more than the shape.
        """
        self._remember(op)
        keys = [self._final(key) for key in op.inputs] if self._lists else []
        if self._lists.keys().isdisjoint(keys):
            return op
        if op.op not in table() or not table()[op.op].shape_only:
            raise EngineError(f"{op.op} reads a list of tensors as if it were one", where=f"node {op.name}", fix=_FIX)
        scalar = self.graph.constant(np.zeros((), np.float32))
        return replace(op, inputs=[scalar if key in self._lists else key for key in keys])

    def new(self, op: str, like: Op, attrs: Mapping[str, Any], inputs: Sequence[Key]) -> Op:
        """A new op that does a part of another's work."""
        made = super().new(op, like, attrs, inputs)
        self._remember(made)
        return made

    def _remember(self, op: Op) -> None:
        """Keeps what conditions are made of, that included which turns out to be a constant."""
        if op.op in _CONDITIONS:
            self._conditions[op.node] = op

    def _final(self, key: Key) -> Key:
        return final(self.names, key)

    def _is_of_lists(self, op: Op) -> bool:
        return op.op in OF_LISTS and any(self._final(key) in self._lists for key in op.inputs)

    def _listed(self, op: Op) -> Iterator[Op]:
        if self.masking and op.op.startswith(("Stack", "TensorArrayGrad")):
            raise Unsupported(
                "it is for the gradient of a loop whose number of turns only the run knows: train in TensorFlow, or give the loop a known "
                "number of turns"
            )
        found = (LISTS.get(op.op) or OF_LISTS[op.op])(self, op)
        self._give(op, found if isinstance(found, list) else (yield from self._keeping(found)))
        self.kept.update(op.inputs)

    def _keeping(self, made: Generator[Op, None, _Found]) -> Generator[Op, None, _Found]:
        """Ops that are handed on, and all of whose values are kept: a list may hold them."""
        while True:
            try:
                op = next(made)
            except StopIteration as end:
                found: _Found = end.value
                return found
            yield op
            self.kept.update((op.node, port) for port in range(op.attrs.get("num", 1)))

    def _give(self, op: Op, results: Sequence[Result]) -> None:
        """Lets the outputs of an op be what they were found to be."""
        for port, result in enumerate(results):
            if isinstance(result, TensorList):
                self._lists[op.node, port] = result
            else:
                final = self._final(result)
                self.names[op.node, port] = final
                self.kept.add(final)

    def _functional(self, op: Op) -> Iterator[Op]:
        bodies = [self._body(ref.name) for ref in functions_of(op.op, op.attrs)]
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise Unsupported(f"functions are nested more than {MOST_DEPTH} deep")
        if op.op in LOOPS:
            results = yield from self._loop(op, *bodies)
        elif op.op in CONDS:
            both = op.inputs[0] not in self.graph.constants
            self._branches += both
            try:
                results = yield from self._cond(op, bodies)
            finally:
                self._branches -= both
        else:
            assert op.op in CALLS
            results = yield from self._run(bodies[0], op.inputs, op, "")
        self._depth -= 1
        self._give(op, results)

    def _body(self, name: str) -> Body:
        found = None if self._bodies is None else self._bodies.of(name)
        if found is None:
            raise Unsupported(f"there is no function {name}")
        return found

    def _loop(self, op: Op, cond: Body, body: Body) -> Made:
        carried = list(op.inputs)
        outside, self.made = self.made, []
        mine: set[Key] = set()
        masked: _Masked | None = None
        turn, around = 0, self.masking
        try:
            while True:
                self.count(op)
                (goes_on,) = yield from self._run(cond, carried, op, f"turn {turn}/")
                predicate = self.graph.constants.get(goes_on)
                if predicate is not None and not taken("If", predicate, 2):
                    break
                if predicate is None:
                    masked = yield from self._masked(op, masked, goes_on, carried, turn)
                    self.masking = around + 1
                before, carried = carried, (yield from self._run(body, carried, op, f"turn {turn}/"))
                if masked is not None:
                    masked.results = yield from self._results(op, masked, before, carried)
                mine.update(self.made)
                self.made.clear()
                live = set(carried) if masked is None else {*carried, *masked.results, masked.active}
                dead = mine - self.kept - live
                for key in dead:
                    self._values.pop(key, None)
                mine -= dead
                turn += 1
        finally:
            self.masking = around
        self.made = [*outside, *mine]
        if masked is None:
            return carried
        name, by = (re.sub(TURN, "", one) for one in (op.name, masked.by))
        self.bounds[name] = max(self.bounds.get(name, (0, "")), (turn, by))
        return masked.results

    def _masked(
        self, op: Op, loop: _Masked | None, goes_on: Key, carried: Sequence[Key], turn: int
    ) -> Generator[Op, None, _Masked]:
        """A loop, one turn further, that goes on if only the run knows what.

        Raises:
            Unsupported: Nothing in its condition says when it has ended at the latest.
            TooMany: That is too late.
        """
        name = f"the loop {op.attrs[FRAME]}" if FRAME in op.attrs else "the loop"
        if self.graph.shape(goes_on) != ():
            raise Unsupported(f"the condition of {name} is no scalar, and depends on values that only the run knows")
        margins = self._margins(goes_on)
        if loop is not None:
            _foresee(loop, margins, turn)
        if not margins or (loop is not None and not loop.total):
            told = f"how many turns {name} takes depends on values that only the run knows"
            raise Unsupported(
                f"{told} (after {turn} of them), and no part of its condition compares a counter, which begins at a known number, with a "
                "known bound: give it one (maximum_iterations= of tf.while_loop, or tf.minimum with a number)"
            )
        if loop is not None and turn == loop.first + 1:
            each = self._count - loop.count
            ops = self._count + each * (loop.total - turn)
            if ops > self.most:
                most, by = max(self.most, MOST_OPS), re.sub(TURN, "", loop.by)
                raise (EngineError if ops > MOST_OPS else TooMany)(
                    f"{name} takes up to {loop.total:,} turns of {each:,} ops, as {by} bounds it: more than {most:,} ops when "
                    "it is unrolled",
                    where=f"node {op.name}",
                    fix="use --engine tensorflow, or lower the bound: shorter sequences (--shape), or a smaller maximum_iterations",
                )
        if self.dtype(goes_on) != "bool":
            is_set = self.new("NotEqual", op, {}, [goes_on, self.graph.constant(np.zeros((), self.dtype(goes_on)))])
            yield is_set
            goes_on = self._final((is_set.node, 0))
        if loop is None:
            by, _ = min(margins, key=lambda margin: margin[1])
            return _Masked(list(carried), goes_on, turn, self._count, margins, by)
        both = self.new("LogicalAnd", op, {}, [loop.active, goes_on])
        yield both
        loop.active, loop.margins = self._final((both.node, 0)), margins
        return loop

    def _margins(self, condition: Key) -> list[tuple[str, int]]:
        """Comparisons of numbers that have to hold where a condition does: by how much each can do so at most.

        No more than a forecast: a loop ends where its condition is false whatever is fed.
        """
        found: list[tuple[str, int]] = []
        waiting, seen = [(condition, True)], set[Key]()
        while waiting:
            key, wanted = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            if key in self._under:
                waiting.append((self._under[key], self._facts.range(self._under[key]) != _FALSE))
            op = self._conditions.get(key[0])
            if op is not None and op.op not in ops_with("ordered"):
                waiting += self._parts(op, wanted)
            elif op is not None:
                # That one number is less than another, or no more than it.
                turned, equal = op.op.startswith("Greater") == wanted, op.op.endswith("Equal") == wanted
                less, more = (self._facts.range(self._final(one)) for one in (op.inputs[::-1] if turned else op.inputs))
                if less is not None and more is not None:
                    found.append((op.name, more[1] - less[0] + equal))
        return found

    def _parts(self, op: Op, wanted: bool) -> list[tuple[Key, bool]]:
        """Values that have to be true, or false, where that of an op is what is wanted."""
        keys, contrary = [self._final(one) for one in op.inputs], _FALSE if wanted else _TRUE
        if op.op in ops_with("logic"):
            possible = [(one, wanted) for one in keys if self._facts.range(one) != contrary]
            return possible if len(possible) == 1 or (op.op == "LogicalAnd") == wanted else []
        if op.op in SELECT:
            no, yes = [(keys[0], False), (keys[2], wanted)], [(keys[0], True), (keys[1], wanted)]
            return (
                yes if self._facts.range(keys[2]) == contrary else no if self._facts.range(keys[1]) == contrary else []
            )
        if op.op == "Cast":
            return [(keys[0], wanted)] if op.attrs.get("SrcT") == "bool" else []
        return [(keys[0], not wanted)]

    def _results(self, op: Op, loop: _Masked, before: Sequence[Key], after: Sequence[Key]) -> Made:
        """What a loop gives, if it ends behind this turn: what the turn changes is chosen where it has not ended before."""
        results = []
        for was, now, given in zip(before, after, loop.results, strict=True):
            if was == now:
                results.append(given)
            elif was in self._lists and now in self._lists:
                key = (self.graph.fresh(), 0)
                self._lists[key] = _changed(self.list(was), self.list(now), self.list(given))
                results.append((yield from self._choice(op, loop.active, key, given)))
            elif self.graph.shape(now) is None or self.graph.shape(now) != self.graph.shape(given):
                raise Unsupported(
                    "how many turns the loop takes depends on values that only the run knows, and a turn changes the shape of what it "
                    f"carries ({self.graph.shape(given)}, then {self.graph.shape(now)}): keep it at one size in the model"
                )
            else:
                results.append((yield from self._choice(op, loop.active, now, given)))
        return [self._final(key) for key in results]  # it may have been proved to be another value

    def _cond(self, op: Op, bodies: Sequence[Body]) -> Made:
        arguments = op.inputs[1:]
        predicate = self.graph.constants.get(op.inputs[0])
        if predicate is not None:
            results = yield from self._run(bodies[taken(op.op, predicate, len(bodies))], arguments, op, "")
            self._under.update(
                {key: op.inputs[0] for key in results if predicate.dtype == bool and key != op.inputs[0]}
            )
            return results
        if op.op in CASE and self.graph.shape(op.inputs[0]) == () and self.dtype(op.inputs[0]) != "bool":
            return (yield from self._case(op, bodies, arguments))
        if op.op not in IF or self.graph.shape(op.inputs[0]) != ():
            raise Unsupported("which branch is taken depends on values that only the run knows")
        condition = op.inputs[0]
        if self.dtype(condition) != "bool":
            zero = self.graph.constant(np.zeros((), self.dtype(condition)))
            is_set = self.new("NotEqual", op, {}, [condition, zero])
            yield is_set
            condition = (is_set.node, 0)
        self.kept.update([condition, *arguments])
        otherwise = yield from self._run(bodies[0], self._in_branch(condition, 0, arguments), op, "else/")
        self.kept.update(otherwise)
        divided = None if self._bodies is None else proved(row_union, self._bodies, *bodies)
        if divided is not None:
            return (yield from self._keeping(below(self, op, divided, condition, arguments, otherwise)))
        then = yield from self._run(bodies[1], self._in_branch(condition, 1, arguments), op, "then/")
        self.kept.update(then)
        return (yield from self._either(op, condition, then, otherwise))

    def _case(self, op: Op, bodies: Sequence[Body], arguments: Sequence[Key]) -> Made:
        """All branches run, and each but the last is chosen where the number is its own: the last one for any other number."""
        index, is_number = op.inputs[0], list[Key]()
        for number in range(len(bodies) - 1):
            if (index, number) not in self._equal:
                equal = self.new("Equal", op, {}, [index, self.graph.constant(np.array(number, self.dtype(index)))])
                yield equal
                self._equal[index, number] = equal.node, 0
            is_number.append(self._equal[index, number])
        self.kept.update([*is_number, *arguments])
        every: list[list[Key]] = []
        for number, body in enumerate(bodies):
            if number:  # none of those before
                arguments = self._in_branch(is_number[number - 1], 0, arguments)
            own = arguments if number == len(is_number) else self._in_branch(is_number[number], 1, arguments)
            every.append((yield from self._run(body, own, op, f"branch {number}/")))
            self.kept.update(every[-1])
        results = every.pop()
        for condition, found in zip(reversed(is_number), reversed(every), strict=True):
            results = yield from self._either(op, condition, found, results)
            self.kept.update(results)
        return results

    def _either(self, op: Op, condition: Key, then: Sequence[Key], otherwise: Sequence[Key]) -> Made:
        """Results of one branch where a condition holds, else those of another."""
        results = []
        for one, other in zip(then, otherwise, strict=True):
            results.append(one if one == other else (yield from self._choice(op, condition, one, other)))
        return results

    def _in_branch(self, condition: Key, branch: int, arguments: Sequence[Key]) -> Sequence[Key]:
        """The arguments of a branch. What the same condition has chosen, as it does in front of a gradient's cond, is known there."""
        known = self.graph.constant(np.asarray(bool(branch))) if condition in arguments else condition
        return [
            known if key == condition else self._choices.get((condition, key), (key, key))[branch] for key in arguments
        ]

    def _choice(self, op: Op, condition: Key, one: Key, other: Key) -> Generator[Op, None, Key]:
        """The one value or the other. Both branches have run: neither changes anything but what it gives."""
        if one in self._lists or other in self._lists:
            key = (self.graph.fresh(), 0)
            self._lists[key] = yield from self._keeping(chosen(self, op, condition, one, other))
        elif self.graph.shape(one) is None or self.graph.shape(one) != self.graph.shape(other):
            raise Unsupported("which branch is taken depends on values that only the run knows, and so do shapes")
        else:
            select = self.new("SelectV2", op, {}, [condition, one, other])
            yield select
            key = (select.node, 0)
        self._choices[condition, key] = other, one
        return key

    def _run(self, body: Body, arguments: Sequence[Key], like: Op, label: str) -> Made:
        """Runs a body in an op's place, and gives its results."""
        values = {key: self._final(value) for key, value in zip(body.parameters, arguments, strict=True)}
        numbers: dict[int, int] = {}
        for key, value in body.constants.items():
            place = id(body), key
            if place not in self._constants:
                self._constants[place] = self.graph.constant(value)
            values[key] = self._constants[place]

        def find(key: Key) -> Key:
            return self._final(values[key] if key in values else (numbers[key[0]], key[1]))

        for piece in body.ops:
            inputs = [find(key) for key in piece.inputs]
            if piece.op in READS_A_VARIABLE or hands_on(piece.op, piece.attrs):
                values.update({(piece.node, port): key for port, key in enumerate(inputs)})
                continue
            op = self.new(
                piece.op,
                like,
                {**piece.attrs, MAY_NOT_RUN: True} if self.masking or self._branches else piece.attrs,
                inputs,
            )
            op.name = f"{like.name}/{label}{piece.name}"
            numbers[piece.node] = op.node
            yield from self.pieces(op)
        return [find(key) for key in body.results]


def _foresee(loop: _Masked, margins: Sequence[tuple[str, int]], turn: int) -> None:
    """Reckons how many turns a loop has at most, if what its conditions compare comes as much closer in every turn as in the last one."""
    loop.total = 0
    if len(margins) == len(loop.margins):
        closer = [
            (now, was - now, name) for (name, now), (_, was) in zip(margins, loop.margins, strict=True) if was > now
        ]
        ends = [(turn - -now // step, name) for now, step, name in closer]
        if ends:
            loop.total, loop.by = min(ends)


def _changed(before: TensorList, after: TensorList, given: TensorList) -> TensorList:
    """A list as the turn leaves it, but for elements that it left alone: there is what the loop gives so far.

    Raises:
        Unsupported: The turn makes it longer.
    """
    if len({len(held.elements) for held in (before, after, given)}) > 1 or OPTIONAL in (before.dtype, after.dtype):
        raise Unsupported(
            "how many turns the loop takes depends on values that only the run knows, and so does how long a list becomes: give the list a "
            "size (tf.TensorArray(size=), not dynamic_size=True), and set its elements"
        )
    rows = zip(before.elements, after.elements, given.elements, strict=True)
    return replace(after, elements=tuple(so_far if was == now else now for was, now, so_far in rows))
