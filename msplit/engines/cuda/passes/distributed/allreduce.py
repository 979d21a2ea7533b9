"""Collectives of processes that train together: which values they exchange, and in which messages.

Exchange between processes that train together: the graph of a whole batch, of which each has some rows.

All of them run the same ops on the same variables, and each on rows of its own. So a value is the *same* everywhere (variables, and what
is made of them alone), *local* (rows, and what is made of them), or a *part*: the whole batch's is the mean of those of all, as with
sums over rows of a mean loss, and with what is linear in such sums. Which one it is follows op by op. Where a part goes into anything
that is not linear, into an update or out of the step, its mean is put in its place, so that what follows is what the whole batch gives:
gradients that are clipped by their norm, a loss that is divided by a sum of weights, a normalization that is written out. Rows that go
into an update of rows are gathered from all. In the end every update takes the same everywhere, and so variables stay the same.

A value of fixed size that is made of rows is a part. To find these, the shapes are looked at that another size of the batch gives. Where
the graph fixes the batch there are none: then what an update takes is averaged there, gradients that were clipped after that.

Collectives of a step: what processes exchange, side by side in as few messages as can be, in an order that all of them share.

Of the last message, beside which nothing is left to compute, no means are made where two GPUs read each other's memory: updates read the
gradients of both where they lie, which takes no longer than to bring the means, and what moves variables moves meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, groupby
from typing import Any

import numpy as np

from msplit.core.dag import reached
from msplit.engines.base import HANDED, STEPS
from msplit.engines.cuda.device.ranks import uses_symmetric_memory
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, Shape, mutated
from msplit.engines.cuda.kernels.optimizer_formulas import OPTIMIZERS, ROW_OPTIMIZERS, Optimizer
from msplit.engines.cuda.ops.embedding import IN_ORDER
from msplit.engines.cuda.options import Shards
from msplit.engines.cuda.passes.updates.merge_updates import average_gradients
from msplit.errors import EngineError
from msplit.opset.traits import SPARSE_SEGMENTS, ops_with

BUCKET = 16 << 20
"""Bytes after which an all-reduce takes no more along: it begins while the rest is computed. Two H200 take 73 µs for 15 MB in one, 92 in
two, 135 in four: smaller ones take longer than what they begin earlier."""


READERS = 2
"""Ranks of which updates read the gradients. As many bytes cross as for means, with more ranks more."""


@dataclass(frozen=True)
class Said:
    """A value that is exchanged.

    Attributes:
        wave: How many exchanges what it is made of has behind it.
        place: Where it is made in the graph.
        gathered: Its rows are gathered; otherwise it is averaged.
        scaled: See `all_gather`.
    """

    key: Key
    wave: int
    place: int
    gathered: bool = False
    scaled: bool = False


def insert(
    graph: OpGraph,
    every: Sequence[Said],
    reads: dict[tuple[int, int], tuple[Key, bool]],
    ranks: int,
    summed: Set[Key] = frozenset(),
    ready: Sequence[Key] = (),
) -> tuple[dict[tuple[Key, bool], Key], dict[Key, list[Key]]]:
    """Adds the collectives, each behind the one before.

    Args:
        every: What is exchanged.
        reads: By op and slot what it reads instead: a value, and whether its rows are gathered.
        ranks: How many there are.
        summed: Values that updates may take of each rank.
        ready: An input, which is there when a step begins.

    Returns:
        What stands for each value, averaged or gathered; and what stands for those that are taken of each rank.
    """
    made: dict[tuple[Key, bool], Key] = {}
    of_ranks: dict[Key, list[Key]] = {}
    token: list[Key] = []
    readers = {what: number for (number, _), what in reversed(reads.items())}
    buckets = _buckets(graph, every)
    late = [number for number, bucket in enumerate(buckets) if _is_summed(graph, bucket, summed)][-1:]
    for message, bucket in enumerate(buckets):
        first = bucket[0]
        near = graph.ops[first.key[0] if first.key[0] in graph.ops else readers[first.key, first.gathered]]
        if late and not message:  # beside the first ops of a step
            token = [graph.add("_AllWait", near, {}, [*ready], (1,), "uint8").out]
        attrs: dict[str, Any] = {"count": len(bucket), "message": message}
        if first.gathered:
            attrs |= {"ranks": ranks, "scaled": tuple(one.scaled for one in bucket)}
        elif message in late:
            attrs["ranks"] = ranks
        name = "_AllGather" if first.gathered else "_AllReduce"
        number = graph.add(name, near, attrs, [*(one.key for one in bucket), *token]).node
        given, token = _outputs(graph, number, bucket, ranks, by_rank=message in late)
        if message in late:
            of_ranks = {key: keys for (key, _), keys in given.items() if key in summed}
            given = _means(graph, near, {what: keys for what, keys in given.items() if what[0] not in summed})
        made |= {what: keys[0] for what, keys in given.items()}
    return made, of_ranks


def _is_summed(graph: OpGraph, bucket: Sequence[Said], summed: Set[Key]) -> bool:
    """True if updates may take most of a message of each rank."""
    sizes = {one.key: math.prod(_shape(graph, one.key)) for one in bucket}
    return 2 * sum(size for key, size in sizes.items() if key in summed) > sum(sizes.values())


_Given = dict[tuple[Key, bool], list[Key]]
"""What a message gives for each value, averaged or gathered: one value, or that of each rank."""


def _outputs(
    graph: OpGraph, number: int, bucket: Sequence[Said], ranks: int, *, by_rank: bool
) -> tuple[_Given, list[Key]]:
    """Describes the outputs of a message. These, and its token."""
    given: _Given = {}
    for port, one in enumerate([*bucket] * (ranks if by_rank else 1)):
        shape = _shape(graph, one.key)
        gathered = (shape[0] * ranks, *shape[1:]) if one.gathered else shape
        graph.describe((number, port), gathered, graph.dtype(one.key))
        given.setdefault((one.key, one.gathered), []).append((number, port))
    token = number, sum(map(len, given.values()))
    graph.describe(token, (0,), "uint8")
    return given, [token]


def _means(graph: OpGraph, near: Op, given: _Given) -> _Given:
    """Adds an op that makes the means of values of each rank, if there are any."""
    if not given:
        return {}
    number = graph.add("_AllMean", near, {"count": len(given)}, [*chain(*zip(*given.values(), strict=True))]).node
    for port, (key, _) in enumerate(given):
        graph.describe((number, port), graph.shape(key), graph.dtype(key))
    return {what: [(number, port)] for port, what in enumerate(given)}


def _buckets(graph: OpGraph, every: Iterable[Said]) -> list[list[Said]]:
    """Buckets that go into one collective each, in the order in which they can run."""
    found: list[list[Said]] = []
    for _, wave in groupby(sorted(every, key=lambda one: (one.wave, one.place, one.key)), lambda one: one.wave):
        open_: dict[tuple[bool, str], list[Said]] = {}
        sizes: Counter[tuple[bool, str]] = Counter()
        for one in wave:
            kind = one.gathered, "" if one.gathered else str(graph.dtype(one.key))
            open_.setdefault(kind, []).append(one)
            sizes[kind] += math.prod(_shape(graph, one.key)) * (2 if "16" in str(graph.dtype(one.key)) else 4)
            if sizes[kind] >= BUCKET:
                found.append(open_.pop(kind))
                del sizes[kind]
        found += open_.values()
    return found


def _shape(graph: OpGraph, key: Key) -> Shape:
    shape = graph.shape(key)
    assert shape is not None  # what is exchanged is a number of the model's, or rows of it
    return shape


_DISTINCT, _SUM, _DRAWN = "_UniquePadded", "UnsortedSegmentSum", "_StatefulRandom"
_LINEAR, _MULTIPLY, _DIVIDE = (ops_with(word) for word in ("linear", "multiply", "divide"))
_PICKS, _CHANGES_ROWS = ops_with("reduction") & ops_with("exact"), ops_with("changes rows")
_SUMS = {_SUM, *(f"{op}Grad" for op in SPARSE_SEGMENTS)}


class Kind(Enum):
    """Relation of a value of this process to that of the whole batch."""

    SAME = "the same"
    PART = "the mean of all is the whole batch's"
    LOCAL = "of the rows of this process"


@dataclass
class _Walk:
    """Facts about the values of a graph, found op by op."""

    graph: OpGraph
    shards: Shards
    resized: OpGraph | None
    kinds: dict[Key, Kind] = field(default_factory=dict)
    waves: dict[Key, int] = field(default_factory=dict)
    longer: set[Key] = field(default_factory=set)  # made of gathered rows: the same, whatever the size of the batch
    again: frozenset[int] = frozenset()  # ops that find the distinct ids of all processes, and sum up their rows
    slices: frozenset[Key] = frozenset()  # rows of sparse gradients
    said: dict[tuple[Key, bool], Said] = field(default_factory=dict)  # by value, and whether its rows are gathered
    reads: dict[tuple[int, int], tuple[Key, bool]] = field(default_factory=dict)  # by op and slot what it reads instead
    place: int = 0

    def kind(self, key: Key) -> Kind:
        """Kind of a value."""
        if key in self.kinds:
            return self.kinds[key]
        return Kind.LOCAL if key in self.graph.constants and self.resizes(key) else Kind.SAME

    def resizes(self, key: Key) -> bool:
        """Returns whether the size of the batch is one of its sizes, as far as that is known."""
        other = None if self.resized is None else self.resized.shapes.get(key)
        return other is not None and self.graph.shapes.get(key) != other

    def counts(self, key: Key) -> bool:
        """Returns whether rows are constants that are no shares of a mean: of another number of rows each is the same."""
        own, other = self.graph.constants.get(key), None if self.resized is None else self.resized.constants.get(key)
        return own is not None and other is not None and all(map(np.array_equal, own, other))

    def is_number(self, key: Key) -> bool:
        """Returns whether it is made of numbers that have a mean."""
        return (self.graph.dtype(key) or "").startswith(("float", "bfloat"))

    def say(self, op: Op, slot: int, *, gathered: bool = False, scaled: bool = False) -> None:
        """Lets an op read what is exchanged in the place of what it reads."""
        key = op.inputs[slot]
        wave = self.waves.get(key, 0)
        self.said.setdefault((key, gathered), Said(key, wave, self.place, gathered, scaled))
        self.reads[op.node, slot] = key, gathered

    def outputs(self, op: Op) -> Iterator[Key]:
        """The values that an op makes."""
        return ((op.node, port) for port in range(self.graph.ports(op.node)))

    def visit(self, op: Op) -> None:
        """Finds out about what an op makes, from what it reads."""
        self.place += 1
        slots = mutated(op)
        if slots:
            self._update(op, slots)
        elif op.node in self.again and not (op.inputs[0] in self.longer and self.kind(op.inputs[0]) is Kind.SAME):
            self.say(op, 0, gathered=True, scaled=op.op == _SUM and not self.counts(op.inputs[0]))
        elif op.op == _DRAWN and (self.resized is None or self.resizes((op.node, 0))):
            self.kinds[op.node, 0] = Kind.LOCAL
        else:
            self._compute(op)
        wave, longer = 0, False
        for slot, key in enumerate(op.inputs):
            gathered = self.reads.get((op.node, slot), (key, None))[1]
            wave = max(wave, self.waves.get(key, 0) + (gathered is not None))
            longer = longer or key in self.longer or bool(gathered)
        self.waves |= dict.fromkeys(self.outputs(op), wave)
        self.longer.update(self.outputs(op) if longer else ())

    def _compute(self, op: Op) -> None:
        """Finds out of what kind the results of an op are that writes nothing, and has it read means where it is not linear in parts."""
        # Of rows of sparse gradients something that is not linear is computed of those of all.
        kinds = [self.kind(key) for key in op.inputs]
        if set(kinds) == {Kind.LOCAL} and {*op.inputs} <= self.slices and op.op not in _LINEAR:  # as for their norm
            for slot in range(len(kinds)):
                self.say(op, slot, gathered=True, scaled=True)
            return
        if op.op == _SUM and op.inputs[0] in self.longer and kinds[:2] == [Kind.SAME, Kind.LOCAL]:
            self.say(op, 1, gathered=True)
            return
        # A part whose mean is there already is the same everywhere.
        for slot, key in enumerate(op.inputs):
            if kinds[slot] is Kind.PART and (key, False) in self.said:  # its mean is there already
                self.say(op, slot)
                kinds[slot] = Kind.SAME
        parts = [slot for slot, kind in enumerate(kinds) if kind is Kind.PART]
        # Without rows: of what is the same everywhere comes the same, of parts, where the op is linear in them, a part.
        if Kind.LOCAL not in kinds:
            if not parts:
                longer = any(key in self.longer for key in op.inputs)
                self._are(op, Kind.SAME, Kind.SAME if longer else Kind.LOCAL)
                return
            if self._is_linear(op, parts):
                self._are(op, Kind.PART, Kind.LOCAL)
                return
        # What normalized by moments of its own rows has a gradient that does.
        elif op.op.startswith("FusedBatchNormGrad"):
            parts = []
        for slot in parts:
            self.say(op, slot)
        # A result of fixed size made of rows is a part where it may be a sum or a mean of theirs.
        if Kind.LOCAL not in kinds:
            self._are(op, Kind.SAME, Kind.LOCAL)
        elif self.resized is None or op.op in _PICKS or op.op == "Prod":
            self._are(op, Kind.LOCAL, Kind.LOCAL)
        else:
            self._are(op, Kind.PART, Kind.LOCAL)

    def _is_linear(self, op: Op, parts: Sequence[int]) -> bool:
        if not all(map(self.is_number, self.outputs(op))):
            return False
        if op.op in _MULTIPLY or op.op == "DivNoNan":
            return parts == [0] or (len(parts) == 1 and op.op not in _DIVIDE and op.op != "DivNoNan")
        return op.op in _LINEAR

    def _are(self, op: Op, fixed: Kind, rows: Kind) -> None:
        """Says of what kind the outputs of an op are that have a fixed size, and those that the batch has a part in."""
        for key in self.outputs(op):
            kind = rows if self.resizes(key) else fixed
            is_known = self.resized is not None and key in self.resized.shapes
            if kind is Kind.PART and not (is_known and self.is_number(key)):
                kind = Kind.LOCAL
            if kind is not Kind.SAME:
                self.kinds[key] = kind

    def _update(self, op: Op, slots: tuple[int, ...]) -> None:
        rows = ROW_OPTIMIZERS.get(op.op)
        for slot, key in enumerate(op.inputs):
            kind = self.kind(key)
            if slot in slots:
                continue
            if rows is not None and slot in (rows.gradient, rows.indices) and self._gathers(op, rows):
                if slot == rows.gradient and key in self.longer and kind is Kind.SAME:
                    continue  # they are of all processes already
                scaled = slot == rows.gradient and self.is_number(key) and not self.counts(key)
                self.say(op, slot, gathered=True, scaled=scaled and kind is not Kind.SAME)
                continue
            if kind is Kind.SAME:
                continue
            of_rows = self.resizes(key) or op.op in _CHANGES_ROWS
            if self.is_number(key) and (slot == rows.gradient if rows is not None else not of_rows):
                self.say(op, slot)
            else:
                what = "rows of the batch" if of_rows else "what is no mean"
                raise EngineError(
                    f"{op.op}: a variable takes {what}, which each of {self.shards.count} processes has others of",
                    where=f"node {op.name}",
                    fix="train on one GPU, or leave that update out: --target",
                )

    def _gathers(self, op: Op, rows: Optimizer) -> bool:
        """Returns whether each process has rows of its own to update, and a gradient for each of them."""
        indices, gradient = op.inputs[rows.indices], op.inputs[rows.gradient]
        return self.kind(indices) is Kind.LOCAL and self.graph.shape(gradient) != ()


def insert_allreduce(graph: OpGraph, shards: Shards, resized: OpGraph | None) -> bool:
    """Inserts the collectives that processes need. True if rows are gathered, so that some shapes are others afterwards.

    Args:
        graph: Specialized, for the rows of one process.
        shards: How many there are, and which inputs each has rows of its own of.
        resized: The graph as another size of the batch specializes it; None where the graph fixes that.

    Raises:
        EngineError: A variable would not be the same everywhere.
    """
    again = _sum_again(graph, shards)
    walk = _Walk(graph, shards, resized, again=again, slices=_slices(graph, again))
    for name, key in graph.feeds.items():
        # What the host makes of inputs is local unless it is known to have a fixed size.
        if name in shards.inputs or (name.endswith(HANDED) and (resized is None or walk.resizes(key))):
            walk.kinds[key] = Kind.LOCAL
    local = [*walk.kinds]
    for op in list(graph.ops.values()):
        walk.visit(op)
    fetched = [key for key in graph.fetches.values() if walk.kind(key) is Kind.PART or _is_loss(walk, key)]
    for key in fetched:
        walk.said.setdefault((key, False), Said(key, walk.waves.get(key, 0), walk.place))
    _draw_apart(graph, walk)
    made, of_ranks = insert(
        graph, [*walk.said.values()], walk.reads, shards.count, _summed(walk, fetched), [*local][:1]
    )
    _read_instead(graph, walk, made, of_ranks)
    graph.fetches = {name: made[key, False] if key in fetched else key for name, key in graph.fetches.items()}
    graph.sort()
    return any(gathered for _, gathered in walk.said)


def _read_instead(
    graph: OpGraph, walk: _Walk, made: Mapping[tuple[Key, bool], Key], of_ranks: Mapping[Key, Sequence[Key]]
) -> None:
    """Lets ops read what is exchanged. Updates that make a mean themselves read that of each rank."""
    for (number, slot), what in walk.reads.items():
        op = graph.ops[number]
        op.inputs[slot] = made[what] if what in made else of_ranks[what[0]][0]
        if what[1] and op.op == _SUM:
            op.attrs[IN_ORDER] = True  # each process sums up the rows of all
    for (number, _), (key, _) in walk.reads.items():  # behind the others: places of inputs become others
        if key in of_ranks:
            average_gradients(graph.ops[number], of_ranks[key])


def _summed(walk: _Walk, fetched: Sequence[Key]) -> frozenset[Key]:
    """Gradients that updates alone take, whose kernel sums up those of all ranks itself. None where it is not to."""
    if walk.shards.count != READERS or not uses_symmetric_memory():
        return frozenset()
    alone = {
        key: walk.graph.dtype(key) == "float32" and key not in fetched for key, gathered in walk.said if not gathered
    }
    for (number, slot), (key, gathered) in walk.reads.items():
        op = walk.graph.ops[number]
        row = OPTIMIZERS.get(op.op)
        takes = row is not None and row.kernel and slot == row.gradient and not op.attrs.get("guarded", False)
        alone[key] = alone.get(key, False) and takes and not gathered
    return frozenset(key for key, holds in alone.items() if holds)


def _is_loss(walk: _Walk, key: Key) -> bool:
    """Returns whether a local value is a scalar that has a mean."""
    return walk.kind(key) is Kind.LOCAL and walk.graph.shapes.get(key) == () and walk.is_number(key)


def _sum_again(graph: OpGraph, shards: Shards) -> frozenset[int]:
    """Lets the distinct ids of sparse gradients and the sums of their rows be those of all processes. Gives the ops that find them, whose
    inputs are to be gathered.

    Ids and rows are gathered as they are: each process's own distinct ids take as many places, and so nothing is gained by finding them
    first. Rows that are put together by segment become one for each place first: these are summed up a second time, those of all.
    """
    reached = {graph.feeds[name] for name in graph.feeds if name in shards.inputs or name.endswith(HANDED)}
    readers, kept = graph.consumers(), graph.kept()
    again: set[int] = set()
    added: dict[int, Op] = {}
    names: dict[Key, Key] = {}
    for number, op in graph.ops.items():
        if reached.isdisjoint(op.inputs):
            continue
        reached |= {(number, port) for port in range(graph.ports(number) + 1)}
        sums = [graph.ops[reader] for reader in readers.get((number, 1), ())]
        if not _is_distinct(graph, op) or (number, 1) in kept or not all(_sums(one, (number, 1)) for one in sums):
            continue
        count = graph.constant(np.array(graph.shapes[number, 0][0] * shards.count, np.int32))
        if all(_sums_each(graph, one) for one in sums):
            for one in sums:
                one.inputs[2] = count
            again |= {number, *(one.node for one in sums)}
            continue
        distinct = _like(graph, op, op.op, [(number, 0)])
        every = [_like(graph, one, _SUM, [(one.node, 0), (distinct.node, 1), count]) for one in sums]
        added |= {one.node: one for one in (distinct, *every)}
        names[number, 0] = distinct.node, 0
        names |= {(old.node, 0): (new.node, 0) for old, new in zip(sums, every, strict=True)}
    graph.rename(names)
    graph.ops |= added
    graph.sort()
    return frozenset(again | added.keys())


def _slices(graph: OpGraph, again: frozenset[int]) -> frozenset[Key]:
    """The rows of sparse gradients, back to where they come from. Those of one process are as many times larger as the batch is."""
    sums = [graph.ops[number].inputs[0] for number in again if graph.ops[number].op == _SUM]
    first = {key: graph.ops[key[0]] for key in sums if key[0] in graph.ops}
    sums = [first[key].inputs[0] if key in first and first[key].op in _SUMS else key for key in sums]
    return _linear_in(graph, [*_gradients(graph), *sums]) | _squared(graph)


def _gradients(graph: OpGraph) -> list[Key]:
    """Gradients that rows of variables are updated by."""
    return [op.inputs[ROW_OPTIMIZERS[op.op].gradient] for op in graph.ops.values() if op.op in ROW_OPTIMIZERS]


def _squared(graph: OpGraph) -> frozenset[Key]:
    """Rows of sparse gradients of which a variable takes squares: one by one, as Keras' optimizers do, and not of their sums."""
    sums = [op.inputs[0] for op in graph.ops.values() if op.op == _SUM]
    rows = _linear_in(graph, [*_gradients(graph), *sums])
    squares = [made for key in rows if (made := graph.ops.get(key[0])) is not None and made.op == "Square"]
    return frozenset(op.inputs[0] for op in squares if rows & _linear_in(graph, op.inputs))


def _linear_in(graph: OpGraph, keys: Sequence[Key]) -> frozenset[Key]:
    """Values, and those that they are multiples of."""

    def behind(key: Key) -> list[Key]:
        made = graph.ops[key[0]]
        scaled = [one for one in made.inputs if math.prod(graph.shape(one) or (1,)) != 1]
        if len(scaled) != 1 or not (made.op in _MULTIPLY or made.op == "Neg"):  # such as by the learning rate
            scaled = made.inputs[:1] if made.op in _DIVIDE else []
        return [one for one in scaled if one[0] in graph.ops]

    return frozenset(reached((key for key in keys if key[0] in graph.ops), behind))


def _sums(op: Op, places: Key) -> bool:
    return op.op in _SUMS and op.inputs[1] == places


def _sums_each(graph: OpGraph, op: Op) -> bool:
    """Returns whether a sum has a row and a place for each id."""
    rows, count = graph.shape(op.inputs[0]), graph.constants.get(op.inputs[2])
    return (
        op.op == _SUM
        and rows is not None
        and count is not None
        and rows[:1] == graph.shape(op.inputs[1]) == (int(count),)
    )


def _is_distinct(graph: OpGraph, op: Op) -> bool:
    """Returns whether an op finds distinct ids, and not those of ids that are distinct already."""
    before = graph.ops.get(op.inputs[0][0]) if op.op == _DISTINCT else None
    return op.op == _DISTINCT and (before is None or before.op != _DISTINCT)


def _like(graph: OpGraph, op: Op, name: str, inputs: list[Key]) -> Op:
    """An op that makes what another makes, of other inputs."""
    number = graph.fresh()
    for port in range(graph.ports(op.node)):
        old = op.node, port
        graph.describe((number, port), graph.shapes.get(old), graph.dtypes[old])
    return Op(number, op.name, name, dict(op.attrs), inputs, op.source_nodes[:1])


def _draw_apart(graph: OpGraph, walk: _Walk) -> None:
    """Lets each process draw other random numbers for its rows."""
    drawn = [op for op in graph.ops.values() if op.op == _DRAWN and walk.kind((op.node, 0)) is Kind.LOCAL]
    if not drawn:
        return
    steps = graph.feeds[STEPS]
    own = graph.add("_OwnSteps", drawn[0], {"ranks": walk.shards.count}, [steps], (), "int64").out
    for op in drawn:
        op.inputs = [own if key == steps else key for key in op.inputs]
