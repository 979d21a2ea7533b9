"""Proof that rows of a model are independent: the walk over its graph, and the verdict.

One pass over a graph in topological order that finds how each tensor depends on the rows.

The proof for a model: inputs, outputs, and what stands in the way.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from msplit.analysis.rows import elements
from msplit.analysis.rows.counts import ARITHMETIC, arithmetic, limited
from msplit.analysis.rows.elements import call, passing
from msplit.analysis.rows.node import (
    FIXED,
    LARGEST,
    NUMBERS,
    PLACE,
    RULES,
    VARYING,
    Array,
    Arrays,
    LinearSizes,
    ListState,
    MixedRows,
    Mixes,
    PerRow,
    RowDependence,
    RowLimits,
    RowState,
    UniqueValues,
    View,
    merged,
)
from msplit.core.graph import CONTROL, Function, Graph
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.opset import schema
from msplit.opset.traits import ENTER, EXIT, FREE_OF_EFFECTS, MERGE, NEXT, SWITCH, ops_with
from msplit.shapes.infer import inferred, stated_shapes
from msplit.shapes.registry import Shape, Value, output_dtypes
from msplit.shapes.result import CONTRADICTION, FUNCTIONAL, Result, key_of

MAX_PASSES = 32
"""Passes over a graph whose loops change what they carry; afterwards everything counts as mixed."""

MAX_BODY_NODES = 2_000_000
"""Nodes inside of functions that are walked."""

Tensor = tuple[int, int]

_FEEDS = ops_with("fed")
_DRAWS = ops_with("draws")
_HANDS_ON = ops_with("hands on a handle") | ops_with("forwards") | ops_with("fills a table")
_CONDITIONAL = MERGE | SWITCH
_ROUNDS = ENTER | EXIT | NEXT
_LIMITS = ops_with("limit") & ops_with("binary")
_PASSING = frozenset(op for op, known in RULES.items() if known.decide is passing)


@dataclass(frozen=True, eq=False)
class Setting:
    """Data that the passes over a graph and its functions share.

    Attributes:
        batch: Number of rows at which shapes are known.
        functions: The library.
        prefix: Stands before names of nodes: the call that they are in.
        left: How many nodes of functions may still be walked, in one entry. Loops inside of loops are walked again in each round.
        numbers, counted: As in `View`.
    """

    batch: int
    functions: Mapping[str, Function]
    prefix: str = ""
    left: list[int] = field(default_factory=lambda: [MAX_BODY_NODES])
    numbers: dict[str, int] = field(default_factory=dict)
    counted: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class RowPass:
    """A pass over a graph.

    Attributes:
        graph: A DAG.
        result: Its shapes and known values, at the setting's batch.
        given: States that are decided from outside, by tensor.
        back: What goes back into a Merge, by Merge: loops of TensorFlow 1.
        arrays: What its tensor arrays hold.
        states: What is found: per node a state per output; None where all are fixed.
        chosen: By node why what it gives depends on a choice that rows make.
    """

    setting: Setting
    graph: Graph
    result: Result
    given: Mapping[Tensor, RowState]
    back: Mapping[int, Tensor] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=Arrays)
    merges: dict[int, RowState] = field(default_factory=dict)
    states: list[list[RowState] | None] = field(default_factory=list)
    chosen: dict[int, RowDependence] = field(default_factory=dict)

    def state(self, node: int, port: int) -> RowState:
        """State of a tensor."""
        found = self.states[node]
        if found is None:
            return FIXED
        return found[port] if port < len(found) else self._mixed(node, "has an output that is not known")

    def entries(self, node: int, port: int) -> int:
        """Entries of the first axis that belong to a row, of a tensor whose rows are apart; 0 of any other."""
        verdict = _verdict(self.graph, node, self.state(node, port))
        return verdict if isinstance(verdict, int) else 0

    def _mixed(self, node: int, why: str | Mixes) -> MixedRows:
        return MixedRows(
            (why if isinstance(why, Mixes) else Mixes(why)).refusal(self._name(node), self.graph.ops[node])
        )

    def _name(self, node: int) -> str:
        return self.setting.prefix + self.graph.names[node]

    def run(self) -> None:
        """Finds the state of every tensor; passes go on until loops and arrays change nothing."""
        for _ in range(MAX_PASSES):
            self.arrays.grown = False
            self._once()
            before = dict(self.merges)
            for merge, source in self.back.items():
                self.merges[merge] = self._joined(merge, before.get(merge) or self.state(merge, 0), self.state(*source))
            if not self.arrays.grown and all(
                state == before.get(merge, self.state(merge, 0)) for merge, state in self.merges.items()
            ):
                return
        lost = self._mixed(next(iter(self.back), 0), "is part of a loop that changes what it carries in each round")
        self.states = [[lost] * max(1, len(outputs)) for outputs in self.result.outputs]

    def _joined(self, merge: int, before: RowState, after: RowState) -> RowState:
        """State of a value that a loop of TensorFlow 1 carries, by what goes in and what comes back."""
        try:
            return merged(before, after)
        except Mixes as why:
            return self._mixed(merge, why)

    def _once(self) -> None:
        graph = self.graph
        ops, edges = graph.ops, graph.edges
        src, port, starts = edges.src.tolist(), edges.port.tolist(), graph.in_start.tolist()
        forced: dict[int, dict[int, RowState]] = {}
        for (node, place), state in self.given.items():
            forced.setdefault(node, {})[place] = state
        states: list[list[RowState] | None] = [None] * len(graph)
        self.states = states
        outputs = self.result.outputs
        fate = {op: _fate(op, self.setting.functions) for op in dict.fromkeys(ops)}
        chooses = not _CONDITIONAL.isdisjoint(fate)
        self.chosen = {}
        for node in graph.topological.tolist():
            fixed = True
            first = end = starts[node]
            last = starts[node + 1]
            while end < last and port[end] != CONTROL:
                if states[src[end]] is not None:
                    fixed = False
                end += 1
            if chooses:
                self._choices(node, src[first:last])
            decided = forced.get(node)
            plain, why = fate[ops[node]]
            if decided is not None and len(outputs[node]) <= 1:
                states[node] = None if decided.get(0, FIXED) is FIXED else [decided[0]]
                continue
            if why:
                states[node] = [self._mixed(node, why)] * max(1, len(outputs[node]))
            elif not (fixed and plain):
                states[node] = self._general(node, list(zip(src[first:end], port[first:end], strict=True)))
            if decided is not None:
                made = states[node] or []
                made = [*made, *[FIXED] * (len(outputs[node]) - len(made))]
                states[node] = [decided.get(place, state) for place, state in enumerate(made)]

    def _general(self, node: int, sources: list[Tensor]) -> list[RowState] | None:
        """The states of a node's outputs; None where all are fixed."""
        op, outputs = self.graph.ops[node], self.result.outputs[node]
        taken = [self.state(*source) for source in sources]
        shapes = [self.result.shape(*source) for source in sources]
        try:
            if op == "GatherV2" and (rows := self._rows_of_entries(*sources[:2])) is not None:
                return [rows]
            # Mixed rows stay mixed, but where an op limits them again.
            for state in taken:
                if isinstance(state, MixedRows) and op not in _LIMITS:
                    return [MixedRows(state.refusal)] * max(1, len(outputs))
            # Ops without a rule of their own first, then the rule of the op.
            if op in MERGE:
                found: RowState | list[RowState] = self._merge(node, taken)
            elif op in _PASSING:
                found = taken[0]
                if op in _ROUNDS and not _lasting(found):
                    raise Mixes("takes entries that were chosen into a loop, or out of it")
            elif op in _LIMITS and any(isinstance(state, MixedRows) for state in taken):
                found = limited(self._view(node, sources, taken, shapes))
            elif op in elements.PER_ELEMENT and all(state is FIXED or _plain(state) for state in taken):
                found = elements.broadcast(taken, shapes)
            else:
                found = self._by_rule(node, self._view(node, sources, taken, shapes))
            states = found if isinstance(found, list) else [found] * max(1, len(outputs))
            # A state has to fit the shape that is known of its output.
            for state, shape in zip(states, outputs, strict=False):
                if isinstance(state, PerRow):
                    self._agrees(state, shape)
        except Mixes as why:
            return [self._mixed(node, why)] * max(1, len(outputs))
        except CONTRADICTION:
            return [self._mixed(node, "can not be followed")] * max(1, len(outputs))
        return None if all(state is FIXED for state in states) else states

    def _rows_of_entries(self, repeated: Tensor, kept: Tensor) -> RowState | None:
        """The row of each entry of a ragged tensor, as TensorFlow computes it; None where that is not what is gathered.

        `tf.repeat` repeats the number of each row as often as the longest row needs, and keeps as many as the row has entries. So the
        longest of all rows is asked for, and changes nothing.
        """
        try:
            spread, times = self._operands(repeated, "Reshape", "Tile")
            once, longest = self._operands(times, "Pack")
            places, ends = self._operands(kept, "Squeeze", "Where", "Reshape", "Less")
            start, stop, step = self._operands(places, "Range")
            _, measured = self._operands(longest, "Maximum")
            lengths = [self._operands(ends, "ExpandDims")[0], self._operands(measured, "Max")[0]]
        except ValueError:  # an op in between is another one
            return None
        first, second = (self._origin(tensor, "BroadcastTo") for tensor in lengths)
        choice = self.setting.counted.get(f"{self.setting.prefix}{first[0]}:{first[1]}", "")
        dropped = self.graph.attrs[self._origin(kept)[0]].get("squeeze_dims", ())
        found: list[object] = [self.state(*spread), self.state(*ends), tuple(dropped) in ((1,), (-1,))]
        found += [(self.result.shape(*tensor) or ())[1:] for tensor in (spread, ends)]
        found += [self._value(tensor, self.state(*tensor)) for tensor in (once, start, step)]
        found += [len(self.result.shape(*repeated) or ()), first == second, self._origin(stop) == self._origin(longest)]
        expected = [PerRow(0, tells=NUMBERS), PerRow(0), True, (1,), (1,), 1, 0, 1, 1, True, True]
        return PerRow(0, 1, None, NUMBERS, group=choice) if choice and found == expected else None

    def _origin(self, tensor: Tensor, *more: str) -> Tensor:
        """The tensor that has the same elements, behind ops that hand them on or make other integers of them."""
        ops, attrs = self.graph.ops, self.graph.attrs
        while tensor not in self.given:
            op, to = ops[tensor[0]], attrs[tensor[0]].get("DstT")
            if op not in _PASSING and op not in more and (op != "Cast" or to not in ("int32", "int64")):
                break
            tensor = self.graph.inputs(tensor[0])[0]
        return tensor

    def _operands(self, tensor: Tensor, *chain: str) -> list[Tensor]:
        """The inputs of the last of some ops, of which each takes what the next one makes.

        Raises:
            ValueError: There is another op.
        """
        found = [tensor]
        for op in chain:
            tensor = self._origin(found[0])
            if self.graph.ops[tensor[0]] != op:
                raise ValueError(op)
            found = self.graph.inputs(tensor[0])
        return found

    def _value(self, source: Tensor, state: RowState) -> Value | None:
        """The known value of a tensor that is fixed: that of others belongs to one batch."""
        return self.result.value(key_of(*source)) if state is FIXED else None

    def _view(self, node: int, sources: list[Tensor], taken: list[RowState], shapes: list[Shape]) -> View:
        prefix, outputs = self.setting.prefix, self.result.outputs[node]
        return View(
            self.graph.ops[node],
            self.graph.attrs[node],
            shapes,
            lambda: [self._value(source, state) for source, state in zip(sources, taken, strict=True)],
            [None] * len(taken),
            outputs=max(1, len(outputs)),
            room=len(outputs),
            states=taken,
            made=outputs,
            key=f"{prefix}{node}",
            sources=[f"{prefix}{source}:{port}" for source, port in sources],
            held=self.arrays,
            numbers=self.setting.numbers,
            counted=self.setting.counted,
            batched=lambda slot: self.result.value(key_of(*sources[slot])),
        )

    def _by_rule(self, node: int, view: View) -> RowState | list[RowState]:
        op, taken = view.op, view.states
        if op in FUNCTIONAL or op in self.setting.functions:
            if any(isinstance(state, Array) or not _lasting(state) for state in taken):
                raise Mixes("takes an array, or entries that were chosen, into a function")
            return call(view, self.result.bodies.get(node, {}), functools.partial(self._body, node))
        known = RULES.get(op)
        sizes = known.sizes if known else ()
        counts = any(isinstance(state, LinearSizes) and slot not in sizes for slot, state in enumerate(taken))
        if counts and (known or op in ARITHMETIC):
            return arithmetic(view)
        if known is None:
            raise Mixes("is not known to treat rows one by one")
        if not all(map(known.takes, taken)):
            raise Mixes(PLACE)
        return known.decide(view)

    def _body(self, node: int, function: Function, result: Result, arguments: list[RowState]) -> list[RowState]:
        """The states of the results of a function."""
        given = {(item.node, 0): state for item, state in zip(function.parameters, arguments, strict=False)}
        self.setting.left[0] -= len(function.body) + 1
        if self.setting.left[0] < 0:
            raise Mixes("runs functions inside of functions too often to be followed")
        setting = replace(self.setting, prefix=f"{self._name(node)}/", counted={})
        inner = RowPass(setting, function.body, result, given)
        writes = writer(function.body, setting, {item.node for item in function.results})
        if writes is not None:
            raise Mixes(writes)
        inner.run()
        found = [inner.state(item.node, item.port) for item in function.results]
        if not all(map(_lasting, found)):
            raise Mixes("gives entries that were chosen out of a function")
        return found

    def _agrees(self, state: PerRow, shape: Shape) -> None:
        """Holds a state against the shape at one batch, which was found in another way."""
        if state.inner == 0 or state.outer < 1:
            raise Mixes("leaves nothing of each row")
        if state.outer * (state.inner or 1) > LARGEST:
            raise Mixes("makes a tensor too large to be followed")
        if shape is None:
            return
        size = shape[state.axis] if 0 <= state.axis < len(shape) else -1
        if (
            size is not None
            and state.inner is not None
            and not state.group
            and size != state.outer * state.inner * self.setting.batch
        ):
            raise Mixes("gives a shape that does not go with the number of rows")

    def _merge(self, node: int, taken: list[RowState]) -> list[RowState]:
        if node in self.chosen:
            raise Mixes(self.chosen[node])
        found = self.merges.get(node)
        for state in taken:
            found = state if found is None else merged(found, state)
        return [found or FIXED, FIXED]

    def _choices(self, node: int, sources: list[int]) -> None:
        """Keeps what depends, by data or control edges, on a Switch whose condition is not fixed."""
        for source in sources:
            if source in self.chosen:
                self.chosen[node] = self.chosen[source]
                return
        if self.graph.ops[node] in SWITCH:
            condition = self.graph.inputs(node)[1:2]
            state = self.state(*condition[0]) if condition else FIXED
            if state is not FIXED:
                refusal = state.refusal if isinstance(state, MixedRows) else None
                self.chosen[node] = refusal or self._mixed(node, "chooses by what depends on rows").refusal


def _lasting(state: RowState) -> bool:
    """True if a state means the same in each round of a loop: not what refers to a node of the round."""
    while isinstance(state, ListState):
        state = state.element or FIXED
    if isinstance(state, LinearSizes):
        return state.varying is None
    return not (
        isinstance(state, UniqueValues | RowLimits) or (isinstance(state, PerRow) and (state.group or state.origin))
    )


def _plain(state: RowState) -> bool:
    return isinstance(state, PerRow) and not state.tells


def _fate(op: str, functions: Mapping[str, Function]) -> tuple[bool, str]:
    """True if an op gives what is fixed of what is fixed; and why it is refused whatever it takes, or ""."""
    if op in FUNCTIONAL or op in functions or op in MERGE or (op in RULES and RULES[op].always):
        return False, ""
    if op in _FEEDS and op != "PlaceholderWithDefault":
        return False, "is fed by nobody"
    if op in _DRAWS:
        return False, "draws other random numbers for each place in the batch"
    info = schema.lookup(op)
    known = op in FREE_OF_EFFECTS or (info is not None and not info.stateful) or op in RULES
    if known:
        return True, ""
    return False, "is an op that msplit does not know" if info is None else "gives what does not follow from its inputs"


def writer(graph: Graph, setting: Setting, results: Container[int]) -> RowDependence | None:
    """The first node of a graph that changes a state, so that a step with other rows in it is another step for the next one.

    Of an op that is not known nobody knows: it counts if it takes a handle, or if nothing reads what it gives and it is no result.
    """
    harmless = FREE_OF_EFFECTS | _DRAWS | _HANDS_ON | FUNCTIONAL.keys() | RULES.keys() | setting.functions.keys()
    writes = {op: _writes(op) for op in dict.fromkeys(graph.ops) if op not in harmless}
    for node, op in enumerate(graph.ops):
        if op not in writes or writes[op] is False:
            continue
        if writes[op] is None:
            edges = graph.edges
            read = node in results or any(edges.port[edge] != CONTROL for edge in graph.out_edges(node).tolist())
            taken = (
                output_dtypes(graph.ops[src], graph.attrs[src], port + 1)[port:] for src, port in graph.inputs(node)
            )
            if read and not any(dtypes[:1] == ("resource",) for dtypes in taken):
                continue
            return RowDependence(
                setting.prefix + graph.names[node], op, "is an op that msplit does not know, and may change a state"
            )
        return RowDependence(setting.prefix + graph.names[node], op, "changes a state")
    return None


def _writes(op: str) -> bool | None:
    """True if an op changes a state; None for one that is not known."""
    info = schema.lookup(op)
    if info is None:
        return None
    return any(argument.is_ref or (info.stateful and argument.dtype == "resource") for argument in info.inputs)


@dataclass(frozen=True)
class Rows:
    """The inputs and outputs of a model that carry rows, and the outputs with rows that depend on each other.

    Row r of what carries k entries per row is its entries k * r to k * r + k - 1 along the first axis.

    Attributes:
        inputs: By name, how many entries of the first axis belong to one row: all that carry rows have to be fed equally many. 0 for an
            input that is the same for all rows, such as a scalar: requests may share a step only where it is equal.
        outputs: The same of outputs whose rows are independent. One with 0 depends on no row.
        refusals: By the name of each other output, what stands in the way.
    """

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    refusals: Mapping[str, RowDependence]

    @property
    def independent(self) -> bool:
        """True if there are rows at all, and they are independent in every output."""
        return not self.refusals and any(self.inputs.values()) and any(self.outputs.values())

    def check(self, outputs: Iterable[str] | None = None) -> None:
        """Makes sure that rows are independent in some outputs, or in all.

        Raises:
            MsplitError: They are not, or no input carries any; names the ops that mix rows.
        """
        if not any(self.inputs.values()):
            raise MsplitError(
                "no input of the model carries rows: the first dimension of each is fixed",
                fix="run it at its own batch, one request a step",
            )
        asked = self.refusals if outputs is None else [name for name in outputs if name in self.refusals]
        if asked:
            listed = [f"output {name!r}: {self.refusals[name]}" for name in asked]
            more = [f"and {len(listed) - 5} more"] if len(listed) > 5 else []
            raise MsplitError(
                "rows of a batch depend on each other, so that batches can not be padded or joined",
                details=[*listed[:5], *more],
                fix="run each request at its own batch, or ask for other outputs",
            )


def independent_rows(
    flat: FlatGraph,
    *,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int | None, ...]] | None = None,
) -> Rows:
    """Proves for each output of a model that its rows depend on the same rows of the inputs alone.

    An input carries rows if the file leaves the size of its first dimension open. Nothing is run, and no library is needed. Checks that
    only fail (such as Assert) do not count: they fail for a batch as soon as they do for a row.

    Args:
        flat: The model.
        batch: Number of rows at which shapes are looked at; 2 where neither it nor shapes say another. The proof holds for all.
        shapes: Whole shapes of inputs at that batch, by name, as `msplit.shapes.infer` takes them. Their first dimensions may be
            multiples of the batch.

    Raises:
        MsplitError: An input that does not exist, or a shape that contradicts the graph's or is no multiple of the batch.
    """
    found, inputs = walked(flat, batch, shapes or {})
    changes = writer(flat.graph, found.setting, {tensor.node for tensor in flat.outputs})
    outputs: dict[str, int] = {}
    refusals: dict[str, RowDependence] = {}
    for tensor in flat.outputs:
        verdict = changes or _verdict(flat.graph, tensor.node, found.state(tensor.node, tensor.port))
        if isinstance(verdict, RowDependence):
            refusals[tensor.name] = verdict
        else:
            outputs[tensor.name] = verdict
    return Rows(inputs, outputs, refusals)


def walked(
    flat: FlatGraph,
    batch: int | None,
    shapes: Mapping[str, tuple[int | None, ...]],
    fixed: Iterable[str] = (),
) -> tuple[RowPass, dict[str, int]]:
    """The states of all tensors, and of each input how many entries belong to a row; see `independent_rows`.

    Args:
        fixed: Inputs that have no rows, whatever the file says.
    """
    result, _ = inferred(flat, batch=batch if batch is not None or shapes else 2, shapes=shapes)
    fed = {tensor.name: result.shape(tensor.node, tensor.port) for tensor in flat.inputs}
    stated = stated_shapes(flat)
    open_ones = {name for name, shape in stated.items() if (shape is None or shape[:1] == (None,)) and fed[name] != ()}
    open_ones = open_ones.difference(fixed)
    firsts = {name: shape[0] for name in open_ones if (shape := fed[name]) and shape[0] is not None}
    rows = batch if batch is not None else min(firsts.values(), default=2)
    inputs = {name: _per_row(name, firsts.get(name), rows) if name in open_ones else 0 for name in fed}
    given: dict[tuple[int, int], RowState] = {}
    for tensor in flat.inputs:
        count = inputs[tensor.name]
        free = None in (stated[tensor.name] or ()) and tensor.name not in shapes
        refusal = RowDependence(
            flat.graph.names[tensor.node], flat.graph.ops[tensor.node], "has another size open than its first"
        )
        given[tensor.node, tensor.port] = PerRow(0, 1, count) if count else MixedRows(refusal) if free else FIXED
    setting = Setting(rows, flat.graph.functions)
    back = flat.back_edges
    goes_back = {
        merge: (source, port)
        for source, port, merge in zip(back.src.tolist(), back.port.tolist(), back.dst.tolist(), strict=True)
    }
    found = RowPass(setting, flat.graph, result, given, goes_back)
    found.run()
    return found, inputs


def _per_row(name: str, first: int | None, batch: int) -> int:
    """Entries of an input's first dimension per row."""
    if first is None:
        return 1
    if batch < 1 or first < 1 or first % batch:
        raise MsplitError(
            f"input {name!r} has {first} entries along its first dimension, which is no multiple of the {batch} rows of a batch",
            fix="give shapes in which the first dimension of each input is the batch, or a multiple of it",
        )
    return first // batch


def _verdict(graph: Graph, node: int, state: RowState) -> int | RowDependence:
    """Entries per row of an output, or why it is none whose rows are apart."""
    name, op = graph.names[node], graph.ops[node]
    if state is FIXED:
        return 0
    if isinstance(state, MixedRows):
        return state.refusal
    if isinstance(state, LinearSizes):
        return RowDependence(name, op, "gives the number of rows" if state.varying is None else VARYING)
    if isinstance(state, UniqueValues):
        return RowDependence(name, op, "gives the different values of all rows")
    if isinstance(state, RowLimits):
        return RowDependence(name, op, "gives the places of rows in a list")
    if isinstance(state, ListState | Array) or not isinstance(state, PerRow):
        return RowDependence(name, op, "gives a list and no tensor")
    if state.tells:
        return RowDependence(name, op, "gives the place of a row in the batch")
    if state.group:
        return RowDependence(name, op, "gives as many entries as were chosen, and not some for each row")
    if state.axis != 0:
        return RowDependence(name, op, f"gives rows along axis {state.axis}, not along the first")
    if state.outer != 1 or state.inner is None:
        return RowDependence(name, op, "gives rows of which each lies in several places")
    return state.inner
