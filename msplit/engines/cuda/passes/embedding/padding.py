"""Values with more rows than TensorFlow's, followed through a graph: what reads them, and whether what is too much can be told.

A Unique with a fixed number of places gives ids of which some are -1, a row belongs to each, and so on (`_Kind`). `Walk` goes over the ops
in order, gives the results of those that it knows a kind of their own, and is stuck with the rest: see `pad_unique`, which asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from msplit.engines.cuda.ir.dtypes import numpy_dtype
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, Unproved, known, require
from msplit.engines.cuda.ir.interpret import evaluate
from msplit.engines.cuda.passes.pattern import takes_rows
from msplit.errors import EngineError
from msplit.opset import schema
from msplit.opset.traits import GATHERS, SELECT, SPARSE_SEGMENTS, ops_with, traits

_GRADS = frozenset(f"{op}Grad" for op in SPARSE_SEGMENTS)
PARTITION = "DynamicPartition"
DISTINCT_GRADS = frozenset(f"{op}V2" for op in _GRADS)
"""They give a row for each distinct index, and these indices."""
_SAME = ops_with("identity")
_SCALES = (ops_with("multiply") - ops_with("divide")) | {"Neg"}
_ADD, _ROWS_OF_VARIABLES = ops_with("adds rows"), ops_with("changes rows")


class _Kind(Enum):
    IDS = "ids, -1 where there is none"
    ROWS = "a row for each of such ids"
    PLACES = "the place of each id that went in among those that come out"
    COUNT = "how many ids there are, at most"


Group = tuple[Any, ...]
"""Names ids that rows belong to: those of one Unique, or of several one behind the other."""


@dataclass(frozen=True)
class _Padded:
    """A value that has more places than TensorFlow's.

    Attributes:
        group: Of the ids; of places the Unique they come from, and the group of what went into it.
        sources: Every Unique that has a part in it.
        zero: Rows without an id are zeros.
        linear: Rows are sums of what went in, scaled at most.
        leads: A count is one number, or stands first.
        within: Ids are places of this group.
    """

    kind: _Kind
    group: Group
    sources: frozenset[int]
    zero: bool = False
    linear: bool = False
    leads: bool = True
    within: Group | None = None


class Walk:
    """Follows padded values through a graph, if these candidates are padded.

    Attributes:
        stuck: Candidates that can not be.
        nonlinear: Those whose sums, or ids, are more than added to variables.
        summed: The sums that each makes.
        lookups: Ops that look padded ids up.
        divided: What went into each op that sends ids to the parts of a table: the group of its rows, where they are padded.
        stitched: Ops that put such parts together again.
        reshaped: Ops that give rows another shape and leave their number open.
    """

    def __init__(self, graph: OpGraph, candidates: set[int]) -> None:
        self.graph, self._candidates = graph, candidates
        self.stuck: set[int] = set()
        self.nonlinear: set[int] = set()
        self.summed: dict[int, list[int]] = {}
        self.lookups: list[int] = []
        self.divided: dict[int, Group | None] = {}
        self.stitched: list[int] = []
        self.reshaped: list[int] = []
        self._found: dict[Key, _Padded] = {}

    def go(self) -> None:
        """Looks at every op, in order."""
        for op in self.graph.ops.values():
            given = {slot: self._found[key] for slot, key in enumerate(op.inputs) if key in self._found}
            if not given and op.node not in self._candidates:
                continue
            try:
                result = self._result(op, given)
            except Unproved:
                self.stuck |= {source for one in given.values() for source in one.sources}
                result = None
                if op.node in self._candidates:
                    self.stuck.add(op.node)
            if result is not None:
                self._found[op.node, 0] = result
        for key in self.graph.kept():
            if key in self._found:
                self.stuck |= self._found[key].sources

    def _result(self, op: Op, given: Mapping[int, _Padded]) -> _Padded | None:
        """The result of an op for padded values; None for what is as long as TensorFlow's."""
        if op.node in self._candidates:
            made = self._partition if op.op == PARTITION else self._unique
            return made(op, given)
        kinds = {one.kind for one in given.values()}
        rule = _RULES.get(op.op)
        if rule is not None:
            return rule(self, op, given)
        if op.op.startswith("SparseApply"):
            self._update(op, given)
            return None
        if kinds <= {_Kind.ROWS, _Kind.IDS} and ("per element" in traits(op.op).words or op.op in SELECT):
            return self._per_element(op, given)
        raise Unproved

    def _unique(self, op: Op, given: Mapping[int, _Padded]) -> _Padded:
        """Padded ids may go in, too: -1 is one more that there is none of."""
        if op.op in DISTINCT_GRADS:
            return self._distinct_grad(op, given)
        before = _all_of(given, _Kind.IDS, 0)
        sources = frozenset({op.node}).union(*(one.sources for one in given.values()))
        self._found[op.node, 1] = _Padded(_Kind.PLACES, (op.node, before), sources)
        self.nonlinear |= sources - {op.node}
        return _Padded(_Kind.IDS, (op.node,), sources)

    def _distinct_grad(self, op: Op, given: Mapping[int, _Padded]) -> _Padded:
        within = None
        if given:
            within = (_unique_of_segments(given),)
        sources = _sources(given) | {op.node}
        self.nonlinear |= sources
        self._found[op.node, 1] = _Padded(_Kind.IDS, (op.node,), sources, within=within)
        return _Padded(_Kind.ROWS, (op.node,), sources, zero=True)

    def _partition(self, op: Op, given: Mapping[int, _Padded]) -> _Padded:
        """Each part gets all ids, those of other parts as -1."""
        rows = {slot: replace(one, kind=_Kind.ROWS) for slot, one in given.items() if one.kind is _Kind.IDS}
        group = _all_of({**given, **rows}, _Kind.ROWS, 0, 1)
        # A table of constant parts is put together, see `fold_partition`.
        require(bool(self.graph.state) if group is None else len(group) == 1 and group[0] in self._candidates)
        sources = _sources(given) | {op.node}
        self.nonlinear |= sources
        self.divided[op.node] = group
        for part in range(int(op.attrs["num_partitions"])):
            self._found[op.node, part] = _Padded(_Kind.IDS, ("part", op.inputs[1], part), sources)
        return self._found[op.node, 0]

    def _stitch(self, op: Op, given: Mapping[int, _Padded]) -> _Padded | None:
        """Parts at positions that were sent to the parts, from the first to the last, as what lies there was."""
        half = len(op.inputs) // 2
        division = known(self.graph.ops.get(op.inputs[0][0]))
        require(division.node in self.divided and len(given) == 2 * half)
        require(op.inputs[:half] == [(division.node, part) for part in range(int(division.attrs["num_partitions"]))])
        pairs = [(given[part], given[half + part]) for part in range(half)]
        require(all(rows.kind is _Kind.ROWS and rows.group == places.group for places, rows in pairs))
        require(self._counts(division.inputs[0]))
        self.stitched.append(op.node)
        self.nonlinear |= _sources(given)
        group = self.divided[division.node]
        return None if group is None else _Padded(_Kind.ROWS, group, _sources(given))

    def _counts(self, key: Key) -> bool:
        """Returns whether a value is 0, 1, 2, and so on."""
        constants, op = self.graph.constants, self.graph.ops.get(key[0])
        if key in constants:
            return bool(np.array_equal(constants[key], np.arange(constants[key].size)))
        if op is None or op.op != "Range":
            return False
        start, step = constants.get(op.inputs[0]), constants.get(op.inputs[2])
        return start is not None and step is not None and (int(start), int(step)) == (0, 1)

    def _range(self, op: Op, given: Mapping[int, _Padded]) -> _Padded:
        """A number for every row."""
        require(given.keys() == {1} and given[1].kind is _Kind.COUNT and self._counts(op.out))
        return _Padded(_Kind.ROWS, given[1].group, given[1].sources)

    def _same(self, op: Op, given: Mapping[int, _Padded]) -> _Padded:
        if set(given) != {0} or (op.op == "Cast" and op.attrs.get("DstT") not in ("int32", "int64")):
            return self._per_element(op, given)
        return given[0]

    def _per_element(self, op: Op, given: Mapping[int, _Padded]) -> _Padded:
        if any(one.kind is _Kind.IDS for one in given.values()):  # what becomes of -1 is no id
            self.nonlinear |= _sources(given)
            given = {slot: replace(one, kind=_Kind.ROWS) for slot, one in given.items() if one.kind is not _Kind.COUNT}
        group = known(_all_of(given, _Kind.ROWS, *given))
        zero = all(one.zero for one in given.values()) and self._keeps_zeros(op, given)
        scaled = len(given) == 1 and (op.op in _SCALES or (op.op == "RealDiv" and 0 in given))
        linear = scaled and all(one.linear for one in given.values())
        return _Padded(_Kind.ROWS, group, _sources(given), zero=zero, linear=linear)

    def _keeps_zeros(self, op: Op, given: Mapping[int, _Padded]) -> bool:
        """Returns whether zeros become zeros: tried, where all other inputs are known."""
        dtype = op.attrs.get("T") or op.attrs.get("SrcT")
        known = [self.graph.constants.get(key) for key in op.inputs]
        if dtype is None or any(one is None and slot not in given for slot, one in enumerate(known)):
            return False
        zero = np.zeros((), numpy_dtype(str(dtype)))
        try:
            results = evaluate(op, [zero if one is None else one for one in known])
        except EngineError:  # of other shapes
            return False
        return results is not None and not np.any(results[0])

    def _shape(self, op: Op, given: Mapping[int, _Padded]) -> _Padded | None:
        if _is_unpadded(given[0]):
            return None
        require(given[0].kind in (_Kind.IDS, _Kind.ROWS))
        leads = op.op == "Shape" or given[0].kind is _Kind.IDS
        return _Padded(_Kind.COUNT, given[0].group, given[0].sources, leads=leads)

    def _of_sizes(self, op: Op, given: Mapping[int, _Padded]) -> _Padded | None:
        """Sizes put together and taken apart."""
        _all_of(given, _Kind.COUNT, *given)
        first = next(iter(given.values()))
        leads = 0 in given and given[0].leads
        if op.op == "StridedSlice":
            begin = known(self.graph.constants.get(op.inputs[1]))
            require(set(given) == {0} and begin.shape == (1,) and begin[0] >= 0)
            if begin[0] > 0 and leads and not int(op.attrs.get("begin_mask", 0)):
                return None  # sizes of other axes
            leads = leads and _is_one(self.graph, op)
        return replace(first, leads=leads)

    def _reshape(self, op: Op, given: Mapping[int, _Padded]) -> _Padded | None:
        if given.keys() == {0} and given[0].kind is _Kind.COUNT:
            return self._of_sizes(op, given)
        data, sizes = known(given.get(0)), given.get(1)
        if sizes is None and _is_unpadded(data):
            return data
        require(data.kind in (_Kind.IDS, _Kind.ROWS))
        if sizes is None:
            found = known(self.graph.constants.get(op.inputs[1]))
            require(found.shape[:1] >= (1,) and found[0] == -1)
            require(data.kind is _Kind.ROWS or found.size <= 1)
            if data.kind is _Kind.ROWS:
                self.reshaped.append(op.node)
        else:
            require(sizes.kind is _Kind.COUNT and sizes.leads and sizes.group == data.group)
        return data

    def _join(self, op: Op, given: Mapping[int, _Padded]) -> _Padded | None:
        """Sizes, or ids and rows of several lookups one behind the other."""
        if any(one.kind is _Kind.COUNT for one in given.values()):
            return self._of_sizes(op, given)
        axis, kinds = self.graph.constants.get(op.inputs[-1]), {one.kind for one in given.values()}
        require(axis is not None and int(axis) == 0 and len(kinds) == 1 and kinds <= {_Kind.IDS, _Kind.ROWS})
        parts = tuple(given[slot].group if slot in given else None for slot in range(len(op.inputs) - 1))
        zero = all(one.zero for one in given.values())
        self.nonlinear |= _sources(given)
        return _Padded(kinds.pop(), parts, _sources(given), zero=zero)

    def _sum(self, op: Op, given: Mapping[int, _Padded]) -> _Padded | None:
        """Rows by the place of their ids, or by the ids themselves: all rows of a variable."""
        data, ids, count = given.get(0), given.get(1), given.get(2)
        rows = _all_of({0: data} if data else {}, _Kind.ROWS, 0)
        if data is not None and ids is not None and ids.kind is _Kind.IDS and ids.group == rows:
            self.nonlinear |= _sources(given)
            if count is None and ids.within is None:
                return None
            count = known(count)
            require(count.leads and (count.kind, count.group) == (_Kind.COUNT, ids.within))
            return _Padded(_Kind.ROWS, count.group, _sources(given), zero=data.zero)
        number = _number(ids, count)
        require(known(ids).group[1] == rows)
        self.summed.setdefault(number, []).append(op.node)
        if data is not None:
            self.nonlinear |= data.sources
        return _Padded(_Kind.ROWS, (number,), _sources(given), zero=data is None or data.zero, linear=True)

    def _segment_grad(self, op: Op, given: Mapping[int, _Padded]) -> _Padded:
        """Rows of segments, handed to the places of the ids that made them."""
        number = _unique_of_segments(given)
        self.nonlinear |= _sources(given)
        return _Padded(_Kind.ROWS, (number,), _sources(given), zero=True)

    def _gather(self, op: Op, given: Mapping[int, _Padded]) -> _Padded | None:
        """Rows of a table at padded ids; or such rows where their ids were."""
        self.nonlinear |= _sources(given)
        require(1 in given and takes_rows(op, self.graph.constants.get))
        rows = given.get(0)
        if given[1].kind is _Kind.IDS and (rows is None or rows.kind is _Kind.ROWS):
            self.lookups.append(op.node)
            return _Padded(_Kind.ROWS, given[1].group, _sources(given))
        return self._put_back(op, given)

    def _put_back(self, op: Op, given: Mapping[int, _Padded]) -> _Padded | None:
        self.nonlinear |= _sources(given)
        rows, places = known(given.get(0)), known(given.get(1))
        require(
            len(given) == 2
            and (rows.kind, places.kind) == (_Kind.ROWS, _Kind.PLACES)
            and rows.group == places.group[:1]
        )
        before = places.group[1]
        if before is None:
            return None
        require(op.op in GATHERS)
        return _Padded(_Kind.ROWS, before, _sources(given))

    def _update(self, op: Op, given: Mapping[int, _Padded]) -> None:
        """Rows of variables, changed at ids."""
        grad, indices = rows_and_ids(op)
        ids, rows = known(given.get(indices)), given.get(grad)
        one_number = rows is None and np.ndim(self.graph.constants.get(op.inputs[grad], [])) == 0
        require(ids.kind is _Kind.IDS and set(given) <= {grad, indices})
        require(one_number or (rows is not None and rows.kind is _Kind.ROWS and rows.group == ids.group))
        if op.op not in _ADD or rows is None or not rows.linear:
            self.nonlinear |= _sources(given)

    def _total(self, op: Op, given: Mapping[int, _Padded]) -> _Padded | None:
        """Sums within rows, or over all of them where those without an id are zeros."""
        self.nonlinear |= _sources(given)
        axes = self.graph.constants.get(op.inputs[1]) if op.op == "Sum" else np.zeros(1, np.int32)
        listed = sorted(axes.reshape(-1).tolist()) if axes is not None else []
        require(given.keys() == {0} and given[0].kind is _Kind.ROWS and bool(listed) and listed[0] >= 0)
        if listed[0] > 0:
            return replace(given[0], linear=False)
        require(given[0].zero)
        return None


def rows_and_ids(op: Op) -> tuple[int, int]:
    """Input slots of what an op changes rows of variables by, and of the ids of these rows; -1 where it has no such input."""
    if op.op in _ROWS_OF_VARIABLES:
        return 2, 1
    info = schema.lookup(op.op) or schema.lookup(f"Resource{op.op}")
    slots = {arg.name: slot for slot, arg in enumerate(info.inputs)} if info else {}
    return slots.get("grad", -1), slots.get("indices", -1)


def _all_of(given: Mapping[int, _Padded], kind: _Kind, *slots: int) -> Group | None:
    """The group of what is padded, all of it of one kind and group and in these slots; None where nothing is."""
    groups = {one.group for one in given.values()}
    if not given:
        return None
    require(len(groups) == 1 and set(given) <= set(slots) and all(one.kind is kind for one in given.values()))
    return groups.pop()


def _number(places: _Padded | None, count: _Padded | None) -> int:
    """The Unique that places are of, all of which a count counts."""
    places, count = known(places), known(count)
    require((places.kind, count.kind) == (_Kind.PLACES, _Kind.COUNT))
    require(count.leads and count.group == places.group[:1])
    return int(places.group[0])


def _unique_of_segments(given: Mapping[int, _Padded]) -> int:
    """The Unique whose places rows of segments are handed to: all of its ids, which came from no other one."""
    number = _number(given.get(1), given.get(3))
    require(given.keys() == {1, 3} and given[1].group[1] is None)
    return number


def _is_unpadded(one: _Padded) -> bool:
    """Returns whether these are places of ids that are not padded: as many as TensorFlow's."""
    return one.kind is _Kind.PLACES and one.group[1] is None


def _sources(given: Mapping[int, _Padded]) -> frozenset[int]:
    return frozenset[int]().union(*(one.sources for one in given.values()))


def _is_one(graph: OpGraph, op: Op) -> bool:
    """Returns whether a StridedSlice of a vector from the front takes its first element, as a number or as a vector of one."""
    end = graph.constants.get(op.inputs[2])
    if int(op.attrs.get("shrink_axis_mask", 0)) & 1:
        return True
    return end is not None and end.tolist() == [1] and not int(op.attrs.get("end_mask", 0))


Rule = Callable[[Walk, Op, Mapping[int, _Padded]], "_Padded | None"]

_RULES: dict[str, Rule] = {
    "Shape": Walk._shape,
    "Size": Walk._shape,
    "Cast": Walk._same,
    **dict.fromkeys(_SAME, Walk._same),
    "StridedSlice": Walk._of_sizes,
    "ExpandDims": Walk._of_sizes,
    "Squeeze": Walk._of_sizes,
    "Pack": Walk._of_sizes,
    "Reshape": Walk._reshape,
    "ConcatV2": Walk._join,
    "UnsortedSegmentSum": Walk._sum,
    **dict.fromkeys(_GRADS, Walk._segment_grad),
    **dict.fromkeys(GATHERS, Walk._gather),
    **dict.fromkeys(SPARSE_SEGMENTS, Walk._put_back),
    **dict.fromkeys((f"{op}WithNumSegments" for op in SPARSE_SEGMENTS), Walk._put_back),
    **dict.fromkeys(_ROWS_OF_VARIABLES, Walk._update),
    "L2Loss": Walk._total,
    "Sum": Walk._total,
    **dict.fromkeys(ops_with("stitch"), Walk._stitch),
    "Range": Walk._range,
}
"""Rules of ops that are known to pass padded values on, or to be indifferent to them."""
