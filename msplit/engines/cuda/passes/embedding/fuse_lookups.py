"""All lookups of one stage as one op, with what feeds only them in front and the concatenation behind.

A stage is what can run at once: lookups with equally many lookups on the way to them, so that none depends on another. Each becomes a
segment of an output (`embedding`). Then ops are visited in topological order: a reshape keeps the segment, a sum or mean over
the ids of a row makes its combiner, a Concat, Pack or AddN lays segments side by side or makes one of them, and takes along what else
it reads as copied rows. What is still read by others in the end are the outputs of one `_Columns` op per stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, gpus_of, known, proved, require
from msplit.engines.cuda.kernels.embedding import Columns, Segment, Term
from msplit.engines.cuda.passes.embedding.intervals import Chain
from msplit.engines.cuda.passes.pattern import FLOATS, constant_slot, takes_rows, viewed
from msplit.opset.traits import ADD, GATHERS, RESHAPES, ops_with, traits

_SUMS = ADD | {"AddN"}
_COMBINES = ops_with("combines")
_VALUES = ("int32", "int64", "float32", "float64")
_MOST_ROWS = 1 << 30
_FEWEST = 2
"""Lookups that are worth an op of their own."""

_MOST_COPIED = 64
"""Computed tensors that are laid side by side with lookups. (The model's inputs lie together as they are.)"""

_PIECE = 128
"""Elements of a piece of a long copied row."""


@dataclass
class _Part:
    """A value as segments.

    Attributes:
        stage: Lookups on the way to its lookups.
        shape: The value's.
        dtype: Likewise.
        segments: Sources and tables of their terms are numbers in `inputs`.
        inputs: What the terms read.
        lookups: Ops that look up.
        nodes: Flat nodes that it does the work of.
        plain: For a lookup as it is, how many ids it has, and the width of a row.
    """

    stage: int
    shape: tuple[int, ...]
    dtype: str
    segments: list[Segment] = field(default_factory=list)
    inputs: list[Key] = field(default_factory=list)
    lookups: set[int] = field(default_factory=set)
    nodes: list[int] = field(default_factory=list)
    plain: tuple[int, int] | None = None

    def take(self, part: _Part, segments: list[Segment]) -> None:
        """Adds segments of another part."""
        numbers = range(len(self.inputs), len(self.inputs) + len(part.inputs))
        self.segments += [_renumbered(segment, numbers) for segment in segments]
        self.inputs += part.inputs
        self.lookups |= part.lookups
        self.nodes += part.nodes

    def take_copied(self, key: Key, segments: list[Segment]) -> None:
        """Adds segments that copy a value."""
        self.take(_Part(0, (), "", inputs=[key]), segments)


def _renumbered(segment: Segment, numbers: Sequence[int]) -> Segment:
    """A segment whose inputs have these numbers now."""

    def moved(term: Term) -> Term:
        return replace(term, source=numbers[term.source], table=numbers[term.table] if term.table >= 0 else -1)

    return replace(segment, terms=tuple(map(moved, segment.terms)))


def fuse_lookups(graph: OpGraph, *, together: bool = True) -> bool:
    """Lays the lookups of each stage together; or makes each an op of its own, where tables may lie in the host's memory: rows of those
    have a cache where they are looked up in this way alone."""
    if not together and graph.table_memory is None:
        return False
    parts = _Parts(graph)
    for op in list(graph.ops.values()):
        if together or op.op in GATHERS:
            parts.visit(op)
    wanted = parts.wanted()
    names: dict[Key, Key] = {}
    gpus = gpus_of(graph)
    fewest = _FEWEST if graph.table_memory is None else 1
    places = {key: (parts.of[key].stage, gpus.get(key[0], 0), 0 if together else at) for at, key in enumerate(wanted)}
    for place in sorted(set(places.values())):
        for dtype in sorted(FLOATS):
            keys = [key for key in wanted if (places[key], parts.of[key].dtype) == (place, dtype)]
            if len(set().union(*(parts.of[key].lookups for key in keys))) >= fewest:
                names |= _emit(graph, [(key, parts.of[key]) for key in keys], dtype)
    graph.rename(names)
    return bool(names)


def _emit(graph: OpGraph, wanted: list[tuple[Key, _Part]], dtype: str) -> dict[Key, Key]:
    slots: dict[Key, int] = {}
    contents: dict[tuple[Segment, ...], tuple[int, ...]] = {}  # with the shape that it is read in first
    nodes: dict[int, None] = {}
    of: list[tuple[Segment, ...]] = []
    for _, part in wanted:
        at = [slots.setdefault(key, len(slots)) for key in part.inputs]
        nodes |= dict.fromkeys(part.nodes)
        # What is read in two shapes (by a product, and as one vector per column) is filled once.
        of.append(tuple(replace(_renumbered(segment, at), output=0) for segment in part.segments))
        contents.setdefault(of[-1], part.shape)
    # Outputs of one shape are one output: branches that go on alike from there find their operands stacked.
    stacks: dict[tuple[int, ...], list[tuple[Segment, ...]]] = {}
    for content, shape in contents.items():
        stacks.setdefault(shape, []).append(content)
    segments: list[Segment] = []
    for port, (shape, members) in enumerate(stacks.items()):
        for place, content in enumerate(members):
            begin = place * math.prod(shape)
            segments += [replace(segment, output=port, start=begin + segment.start) for segment in content]
    outputs = tuple(shape if len(members) == 1 else (len(members), *shape) for shape, members in stacks.items())
    first = graph.ops[min(wanted[0][1].lookups)]
    spec = Columns(tuple(segments), outputs, dtype)
    op = graph.add("_Columns", first, {"T": dtype, "columns": spec}, list(slots))
    op.source_nodes = list(nodes)
    where: dict[tuple[Segment, ...], Key] = {}
    for port, (shape, members) in enumerate(stacks.items()):
        made = (op.node, port)
        graph.describe(made, outputs[port], dtype)
        parts = [made]
        if len(members) > 1:
            views = graph.add("Unpack", first, {"T": dtype, "num": len(members), "axis": 0}, [made]).node
            parts = [(views, place) for place in range(len(members))]
        for content, key in zip(members, parts, strict=True):
            where[content] = key
            graph.describe(key, shape, dtype)
    names: dict[Key, Key] = {}
    for (key, part), content in zip(wanted, of, strict=True):
        names[key] = where[content]
        if part.shape != contents[content]:
            inputs = [where[content], graph.sizes(part.shape)]
            names[key] = graph.add("Reshape", first, {"T": dtype}, inputs, part.shape).out
    return names


class _Parts:
    """Values of a graph that can be segments.

    Attributes:
        of: Values that are parts.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self.of: dict[Key, _Part] = {}
        self._stage: dict[int, int] = {}  # op -> lookups on the way to its result
        self._fed = frozenset(graph.feeds.values())

    def visit(self, op: Op) -> None:
        """Takes an op, all of whose inputs were visited."""
        stage = max((self._stage.get(key[0], 0) for key in op.inputs), default=0)
        part = proved(self._part, op, stage)
        self._stage[op.node] = stage
        if part is not None:
            part.nodes = list(dict.fromkeys([*part.nodes, *op.source_nodes]))
            self.of[op.node, 0] = part
            self._stage[op.node] = max(stage, part.stage + 1)

    def wanted(self) -> list[Key]:
        """Parts that something else reads, be it a part of a later stage."""
        made = {key[0] for key in self.of}
        read = [key for op in self._graph.ops.values() if op.node not in made for key in op.inputs]
        found = [key for key in dict.fromkeys([*read, *self._graph.kept()]) if key in self.of]
        known = set(found)
        for key in found:  # grows
            more = [inner for inner in self.of[key].inputs if inner in self.of and inner not in known]
            found += more
            known |= set(more)
        return found

    def _part(self, op: Op, stage: int) -> _Part:
        """The part that an op's result is, if it is one."""
        graph = self._graph
        shape = known(graph.shapes.get(op.out))
        require(math.prod(shape))
        # What begins a part, then what changes one, then what lays several together.
        if op.op in GATHERS:
            return self._lookup(op, stage, shape)
        if op.op == "_Columns":
            return self._joined_before(op, stage)
        first = self.of.get(op.inputs[0]) if op.inputs else None
        if op.op in RESHAPES and first is not None:
            return replace(first, shape=shape)
        if op.op in _COMBINES and first is not None:
            return self._combined(op, first, shape)
        if op.op == "RealDiv" and first is not None:
            return self._divided(op, first, shape)
        if op.op == "Mul":
            return self._scaled(op, shape)
        if (slot := traits(op.op).axis) is not None:
            slot %= len(op.inputs)
            axis = int(known(graph.constants.get(op.inputs[slot])))
            keys = [key for number, key in enumerate(op.inputs) if number != slot]
            return self._beside(keys, axis % len(shape), shape, packed=False)
        if op.op == "Pack":
            return self._beside(op.inputs, int(op.attrs.get("axis", 0)) % len(shape), shape, packed=True)
        if op.op == "AddN":
            proved(self._split, op, shape)
        require(op.op in _SUMS)
        return self._added(op.inputs, shape)

    def _split(self, op: Op, shape: tuple[int, ...]) -> None:
        """Lets a sum of lookups and of computed values add the lookups apart, so that they need not wait for the others."""
        graph = self._graph
        computed = [key for key in op.inputs if key not in self.of and viewed(graph, key) not in self._fed]
        rest = [key for key in op.inputs if key not in computed]
        require(computed and len(rest) >= _FEWEST)
        part = self._added(rest, shape)
        inner = graph.add("AddN", op, {"T": part.dtype, "N": len(rest)}, rest, shape, part.dtype)
        self.of[inner.out] = part
        self._stage[inner.node] = part.stage + 1
        op.inputs = [inner.out, *computed]
        op.attrs = {**op.attrs, "N": len(op.inputs)}

    def _lookup(self, op: Op, stage: int, shape: tuple[int, ...]) -> _Part:
        graph = self._graph
        key = op.inputs[0]
        # A variable is looked up in as it is when the step begins: what is written during it is there too late for the others.
        require(key in graph.constants or graph.variable(key) is not None)
        table, dtype, ids = known(graph.shape(key)), known(graph.dtype(key)), known(graph.shapes.get(op.inputs[1]))
        require(table and dtype in FLOATS and takes_rows(op, graph.constants.get) and 0 < table[0] < _MOST_ROWS)
        rows, width = math.prod(ids), math.prod(table[1:])
        part = _Part(stage, shape, dtype, [], [op.inputs[1], key], {op.node}, list(op.source_nodes))
        return replace(self._in_front(part, rows, width, per_row=1), plain=(rows, width))

    def _joined_before(self, op: Op, stage: int) -> _Part:
        """Values that a proof, or an earlier visit, made a column of."""
        spec: Columns = op.attrs["columns"]
        require(len(spec.outputs) == 1)
        return _Part(stage, spec.outputs[0], spec.dtype, list(spec.segments), list(op.inputs), {op.node})

    def _in_front(self, part: _Part, rows: int, width: int, per_row: int, combiner: str = "sum") -> _Part:
        """Takes what is in front of a lookup."""
        chain = Chain(self._graph, self._graph.ops[next(iter(part.lookups))].inputs[1], per_row)
        require(self._graph.dtype(chain.key) in _VALUES and self._graph.shapes.get(chain.key) is not None)
        terms = tuple(replace(term, source=0, table=1) for term in chain.terms)
        segment = Segment(0, 0, width, rows // per_row, width, terms, combiner)
        nodes = [*part.nodes, *chain.nodes]
        return replace(part, segments=[segment], inputs=[chain.key, part.inputs[1]], nodes=nodes)

    def _combined(self, op: Op, part: _Part, shape: tuple[int, ...]) -> _Part:
        """The sum or mean over the ids of a row."""
        axes, (rows, width) = known(self._graph.constants.get(op.inputs[1])), known(part.plain)
        require(axes.size)
        rank = len(part.shape)
        reduced = sorted({int(axis) % rank for axis in axes.reshape(-1)})
        per_row = math.prod(part.shape[axis] for axis in reduced)
        behind = math.prod(part.shape[reduced[-1] + 1 :])
        require(reduced == list(range(reduced[0], reduced[-1] + 1)) and behind == width and per_row)
        plain = replace(part, shape=shape, plain=None)
        return self._in_front(plain, rows, width, per_row, op.op.lower())

    def _divided(self, op: Op, part: _Part, shape: tuple[int, ...]) -> _Part:
        """The sum over the root of how many ids there are."""
        divisor = known(self._graph.constants.get(op.inputs[1]))
        require(divisor.size == 1 and part.shape == shape and len(part.segments) == 1)
        segment = part.segments[0]
        count = sum(term.count for term in segment.terms)
        require(segment.combiner == "sum" and segment.scale is None and all(term.table >= 0 for term in segment.terms))
        require(float(divisor.reshape(-1)[0]) == float(np.array(math.sqrt(count), divisor.dtype)))
        return replace(part, segments=[replace(segment, combiner="sqrtn")], plain=None)

    def _scaled(self, op: Op, shape: tuple[int, ...]) -> _Part:
        """A part times a number."""
        slot = known(constant_slot(self._graph, op))
        part, number = known(self.of.get(op.inputs[1 - slot])), self._graph.constants[op.inputs[slot]]
        require(part.shape == shape and number.size == 1 and number.dtype.name == part.dtype)
        require(all(segment.scale is None for segment in part.segments))
        scale = float(number.reshape(-1)[0])
        return replace(part, segments=[replace(segment, scale=scale) for segment in part.segments], plain=None)

    def _beside(self, keys: list[Key], axis: int, shape: tuple[int, ...], *, packed: bool) -> _Part:
        """Values side by side along an axis, which is a new one where they are packed."""
        stage, dtype = self._together(keys)
        lead, total = math.prod(shape[:axis]), math.prod(shape[axis:])
        joined = _Part(stage, shape, dtype)
        left = 0
        for key in keys:
            size = math.prod(self._graph.shapes[key][axis:])
            if self._is_of(key, stage):
                joined.take(self.of[key], [_within(segment, size, total, left) for segment in self.of[key].segments])
            elif size:
                self._lay(joined, viewed(self._graph, key), lead, size, left, total)
            left += size
        require(left == total or packed)
        return joined

    def _lay(self, joined: _Part, key: Key, lead: int, size: int, left: int, total: int) -> None:
        """Lays a value that is no part beside others: copied or, where it is rows of a constant times values, made there."""
        found = proved(self._products, key, lead, size)
        if found is None:
            joined.take_copied(key, _copied(lead, size, left, total))
            return
        op, values, rows = found
        count, width = self._graph.constants[rows].shape[-2:]
        terms = [Term(0, 1, row, count, low=row, high=row, weighted=True) for row in range(count)]
        segments = [Segment(0, left + row * width, total, lead, width, (term,)) for row, term in enumerate(terms)]
        joined.take(_Part(0, (), "", inputs=[values, rows], nodes=list(op.source_nodes)), segments)

    def _products(self, key: Key, lead: int, size: int) -> tuple[Op, Key, Key]:
        """The values and the rows whose products a value is: one value per lookup by row number, as fields of numbers are embedded."""
        op = known(self._graph.ops.get(key[0]))
        require(op.op == "Mul")
        slot = known(constant_slot(self._graph, op))
        values, rows = op.inputs[1 - slot], op.inputs[slot]
        table, shape = self._graph.constants[rows], self._graph.shapes[key]
        require(table.dtype.name == "float32" and table.ndim >= 2 and 0 < table.shape[-2] <= _MOST_COPIED)
        require(table.size == table.shape[-2] * table.shape[-1] == size and math.prod(shape) == lead * size)
        require(shape[-2:] == table.shape[-2:] and self._graph.shapes.get(values) == (*shape[:-1], 1))
        return op, viewed(self._graph, values), rows

    def _added(self, keys: list[Key], shape: tuple[int, ...]) -> _Part:
        """The sum of values of one shape."""
        stage, dtype = self._together(keys)
        require(all(self._graph.shapes[key] == shape for key in keys))
        parts = [self.of[key] for key in keys if self._is_of(key, stage)]
        require(len(parts) >= _FEWEST and all(len(part.segments) == 1 for part in parts))
        rows, width = parts[0].segments[0].rows, parts[0].segments[0].width
        whole = Segment(0, 0, width, rows, width, ())
        joined = _Part(stage, shape, dtype)
        for key in keys:
            if self._is_of(key, stage):
                part = self.of[key]
                require(replace(part.segments[0], output=0, terms=()) == whole)
                joined.take(part, part.segments)
            else:
                joined.take_copied(viewed(self._graph, key), [replace(whole, terms=(Term(0, -1, step=width),))])
        joined.segments = [replace(whole, terms=tuple(term for each in joined.segments for term in each.terms))]
        return joined

    def _together(self, keys: list[Key]) -> tuple[int, str]:
        """Stage and type of what can be laid together: parts of that stage, and others that do not wait for it."""
        parts = [self.of[key] for key in keys if key in self.of]
        require(parts)
        stage = max(part.stage for part in parts)
        dtype = next(part.dtype for part in parts if part.stage == stage)
        copied = 0
        for key in keys:
            if self._is_of(key, stage):
                require(self.of[key].dtype == dtype)
                continue
            copied += viewed(self._graph, key) not in self._fed
            require(self._stage.get(key[0], 0) <= stage and key not in self._graph.constants)
            require(self._graph.dtype(key) == dtype and key in self._graph.shapes)
        require(copied <= _MOST_COPIED)
        return stage, dtype

    def _is_of(self, key: Key, stage: int) -> bool:
        return key in self.of and self.of[key].stage == stage


def _within(segment: Segment, size: int, total: int, left: int) -> Segment:
    """A segment of a value of which every `size` elements become a part, from `left` on, of `total` elements."""
    row, column = divmod(segment.start, size)
    last = segment.start + (segment.rows - 1) * segment.step + segment.width - 1
    if last // size == row:
        return segment.moved(row * total + left + column, segment.step)
    require(segment.step % size == 0 and column + segment.width <= size)
    return segment.moved(row * total + left + column, segment.step // size * total)


def _copied(rows: int, size: int, left: int, total: int) -> list[Segment]:
    """The rows of a value, as a segment; a single long one in pieces, which many can copy at once."""
    if rows == 1:
        width = math.gcd(size, _PIECE)
        rows, size, total = size // width, width, width
    return [Segment(0, left, total, rows, size, (Term(0, -1, step=size),))]
