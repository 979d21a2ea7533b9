"""Assignments of streams: made by rules, explained, and written in the forms of other tools.

Assign streams by rules, and say what came of it.

Write an assignment in other forms, for other tools.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats, rules
from msplit.analysis.advice import guesses
from msplit.assignment.model import DisplayMixin, Facts, gain, measured_record, opened, price
from msplit.core.dag import Dag, distinct
from msplit.core.graph import CONTROL, UNASSIGNED, Ints, no_collection
from msplit.cost.costs import Costs
from msplit.cost.profile import Workload
from msplit.errors import AssignError, MsplitError, WriteError
from msplit.flatten.flat import FlatGraph, among, as_written, to_ids, with_ids
from msplit.formats.atomic import check_target
from msplit.formats.model import AssignmentRecord, Model, Nodes, RecordedRules
from msplit.progress import phase
from msplit.rules import streamfile
from msplit.rules.manual import Manual
from msplit.rules.ruleset import RuleSet, RulesResult
from msplit.schedule.judge import Judgement, Prediction, bounds, judge, predict
from msplit.schedule.plan import Plan, make_plan, record_order
from msplit.shapes import Shapes

if TYPE_CHECKING:
    from msplit.assignment.plans import ChoosesPlan, Chosen


MakesChooser = Callable[[FlatGraph, Costs, Workload], "ChoosesPlan"]
"""Makes what chooses kernels for a model."""


@dataclass(frozen=True)
class StreamLoad:
    """One stream of an assignment: its nodes (host nodes not counted), those that launch a kernel, and their cost."""

    stream: int
    nodes: int
    kernels: int
    time_us: float


@dataclass(frozen=True, eq=False, repr=False)
class Assigned(DisplayMixin):
    """An assignment with what it means.

    Attributes:
        outcome: Ids, provenance and remarks.
        plan: Order and waits.
        cross_edges: Tensors read on another stream than the one that made them, counted once per reading stream.
        cross_bytes: Their bytes, as far as they are known.
        cross_unknown: How many of them have no known size.
        unassigned: GPU nodes that no rule claimed: they are on the default stream.
        changed: GPU nodes that run on another stream than the file says, where no id means stream 0.
        kernels: The kernels that the ids are made for, where the rule `auto` chose others than plain ones.
        workload: What sized and priced the graph.
        wrap: Whether ids out of range were taken modulo the number of streams.
        by_hand: The nodes of the file whose ids were set by hand, and so were there for the rules.
    """

    flat: FlatGraph
    shapes: Shapes
    costs: Costs
    ruleset: RuleSet
    outcome: RulesResult
    plan: Plan
    loads: tuple[StreamLoad, ...]
    cross_edges: int
    cross_bytes: float
    cross_unknown: int
    unassigned: int
    changed: Ints
    kernels: Chosen | None = None
    workload: Workload = field(default_factory=Workload)
    wrap: bool = False
    by_hand: Nodes = field(default_factory=dict)

    @property
    def ids(self) -> Ints:
        """Stream id per node."""
        return self.outcome.ids

    def _facts(self) -> Facts:
        used = sum(load.nodes > 0 for load in self.loads)
        facts = [
            ("model", str(self.flat.model.source)),
            ("rules", self.ruleset.source),
            ("streams", f"{used} of {self.outcome.streams}"),
            ("waits", f"{self.plan.waits:,}"),
            ("changed", f"{len(self.changed):,} nodes"),
        ]
        return [*facts, ("predicted", gain(self.judgement))] if "judgement" in vars(self) else facts

    @cached_property
    def prediction(self) -> Prediction:
        """The simulated run of plain kernels with these ids. Worked out when first asked for.

        Raises:
            MsplitError: There are more streams than can be simulated.
        """
        with phase("simulating"), no_collection():
            return predict(self.flat, self.costs, self.outcome.ids)

    @cached_property
    def judgement(self) -> Judgement:
        """Judgement of these streams: the simulated gain of the kernels that the ids are made for, over plain ones on one stream.

        Raises:
            MsplitError: There are more streams than can be simulated.
        """
        found = self.prediction
        gain, streams = found.gain, len(found.lanes)
        if self.kernels is not None:
            gain, streams = self.kernels.gain, self.kernels.planned.streams
        guessed = guesses(self.flat, self.costs, self.shapes).share
        return judge(bounds(self.flat, self.costs), gain, streams, guessed=guessed)


def assign(
    flat: FlatGraph | str | os.PathLike[str],
    ruleset: str | Path | RuleSet,
    workload: Workload | None = None,
    *,
    streams: int | None = None,
    wrap: bool = False,
    priced: tuple[Shapes, Costs] | None = None,
    kernels: MakesChooser | None = None,
    keep_ids: bool | None = None,
) -> Assigned:
    """Assigns a stream id to every node by rules; see `api.assign`. `kernels` makes what chooses kernels, once a rule asks for that."""
    workload = workload or Workload()
    flat = opened(flat)
    if not isinstance(ruleset, RuleSet):
        ruleset = rules.load(ruleset, streams=streams, wrap=wrap)
    sizes, costs = priced or price(flat, workload)
    # The engine need not be loaded where no rule asks for it.
    asks = any(getattr(rule, "kernels", "plain") == "best" for rule in ruleset.rules)
    chooser = kernels(flat, costs, workload) if asks and kernels is not None else None
    by_hand = _by_hand(flat.model, ruleset, keep_ids)
    with no_collection():
        outcome = rules.assign(
            flat, costs, ruleset, streams=streams, wrap=wrap, kernels=chooser, by_hand=among(flat, by_hand)
        )
    _refuse_strays(flat, by_hand, outcome)
    chosen = None if chooser is None else chooser.chosen
    if chosen is not None and _moved(flat, outcome, chosen):
        text = "a later rule has moved nodes that share a kernel, so the plan is one of plain kernels"
        outcome = replace(outcome, remarks=(*outcome.remarks, rules.Remark("auto", "kernels-moved", text)))
        chosen = None
    with phase("planning"), no_collection():
        plan = plan_of(flat, costs, outcome.ids) if chosen is None else chosen.planned.plan
    written = as_written(flat, np.where(flat.host, -1, outcome.ids).astype(np.int32), costs.time_us)
    edges, moved, unknown = _crossing(flat, costs, outcome.ids)
    return Assigned(
        flat=flat,
        shapes=sizes,
        costs=costs,
        ruleset=ruleset,
        outcome=outcome,
        plan=plan,
        loads=_loads(flat, costs, outcome),
        cross_edges=edges,
        cross_bytes=moved,
        cross_unknown=unknown,
        unassigned=int(np.count_nonzero((outcome.assignment.ids == UNASSIGNED) & ~flat.host)),
        changed=np.flatnonzero((written >= 0) & (written != present_ids(flat))).astype(np.int32),
        kernels=chosen,
        workload=workload,
        wrap=wrap,
        by_hand=by_hand,
    )


def record_of(assigned: Assigned) -> AssignmentRecord:
    """The record of an assignment, to be written with the model."""
    ruleset = assigned.ruleset
    return replace(
        measured_record(assigned.flat, assigned.workload, assigned.outcome.streams),
        rules=RecordedRules(ruleset.source, ruleset.text, ruleset.files) if ruleset.text else None,
        wrap=assigned.wrap,
        by_hand=assigned.by_hand,
    )


def _by_hand(model: Model, ruleset: RuleSet, keep_ids: bool | None) -> Nodes:
    """The nodes of a file whose ids count as set by hand, and count at all."""
    if keep_ids is False or not any(rule.key == Manual.key for rule in ruleset.rules):
        return {}
    present = with_ids(model)
    if keep_ids or model.record is None:
        return present
    known = {function: frozenset(names) for function, names in model.record.by_hand.items()}
    kept = {function: tuple(n for n in names if n in known.get(function, ())) for function, names in present.items()}
    return {function: names for function, names in kept.items() if names}


def _refuse_strays(flat: FlatGraph, by_hand: Nodes, outcome: RulesResult) -> None:
    """Refuses ids that are kept and can not be: rules see those of the flat graph, and these are elsewhere in the file.

    Raises:
        AssignError: Names the first of them.
    """
    library, streams = flat.model.graph, outcome.streams
    wrong = []
    for function, names in by_hand.items():
        graph = library.functions[function].body if function else library
        for name in names:
            value = graph.attrs[graph.index[name]].get(formats.STREAM_ID)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < streams:
                wrong.append(((function or None, name), value))
    # The rules took those of the flat graph modulo, or would have refused them.
    inside = to_ids(flat, [0] * len(flat))[0] if wrong else {}
    for place, value in wrong:
        if place not in inside:
            of = f" of function '{place[0]}'" if place[0] else ""
            raise AssignError(
                f"its stream id is {value!r}, but ids are 0..{streams - 1}",
                where=f"node '{place[1]}'{of}",
                fix="mend it or take it off, or pass --no-keep-ids to start anew",
            )


def _moved(flat: FlatGraph, outcome: RulesResult, chosen: Chosen) -> bool:
    """True if a node that has a part in a kernel is on another stream than that."""
    lanes = chosen.planned.node_ids
    return bool((outcome.ids != lanes)[(lanes >= 0) & ~flat.host].any())


def present_ids(flat: FlatGraph, least: int = -(2**31)) -> Ints:
    """The ids that the file holds, int32 per node of the flat graph; 0 where a node has none.

    Raises:
        AssignError: What a node has is no 32-bit integer, or below `least`.
    """
    ids = np.zeros(len(flat), np.int32)
    for node in flat.graph.nodes_with(formats.STREAM_ID):
        value = flat.graph.attrs[node].get(formats.STREAM_ID, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise AssignError(
                f"its `{formats.STREAM_ID}` is no stream id: {value!r}",
                where=f"node '{flat.graph.names[node]}'",
                fix="run `msplit check` to see all of these, and mend or remove them",
            )
        ids[node] = value
    return ids


def plan_of(flat: FlatGraph, costs: Costs, ids: Ints) -> Plan:
    """Order and waits of an assignment of a flat graph: nodes that cost nothing launch nothing."""
    dag = Dag.from_graph(flat.graph)
    return make_plan(dag, np.where(costs.time_us > 0, ids, -1).astype(np.int32), record_order(dag, costs.time_us))


def _loads(flat: FlatGraph, costs: Costs, outcome: RulesResult) -> tuple[StreamLoad, ...]:
    gpu = ~flat.host
    lanes = outcome.ids[gpu]
    nodes = np.bincount(lanes, minlength=outcome.streams)
    kernels = np.bincount(lanes, weights=costs.time_us[gpu] > 0, minlength=outcome.streams)
    times = np.bincount(lanes, weights=costs.time_us[gpu], minlength=outcome.streams)
    return tuple(
        StreamLoad(lane, int(nodes[lane]), int(kernels[lane]), float(times[lane])) for lane in range(len(nodes))
    )


def _crossing(flat: FlatGraph, costs: Costs, ids: Ints) -> tuple[int, float, int]:
    """Tensors that one stream makes and another reads, once per reading stream; their bytes; how many have no known size.

    What is there before the step begins (constants, weights, inputs) crosses nothing. A node that launches nothing and has one moving
    input passes that on, so that what counts is where the kernels are.
    """
    edges, host = flat.graph.edges, flat.host
    data = (edges.port != CONTROL) & ~host[edges.src] & ~host[edges.dst]
    kernel = costs.time_us > 0
    source, port = _sources(flat, kernel, data)
    reads = data & (source[edges.src] >= 0) & (source[edges.dst] == edges.dst)
    makers = source[edges.src[reads]]
    ports = np.where(makers == edges.src[reads], edges.port[reads], port[edges.src[reads]])
    readers = ids[edges.dst[reads]]
    crosses = ids[makers] != readers
    lanes, reader = np.unique(readers[crosses], return_inverse=True)
    count, most = max(len(lanes), 1), int(ports[crosses].max(initial=0)) + 1
    tensors = distinct((makers[crosses].astype(np.int64) * count + reader.reshape(-1)) * most + ports[crosses])
    made = distinct(tensors // most) // count
    unknown = np.count_nonzero(~costs.known[tensors // most // count])
    return len(tensors), float(costs.out_bytes[made].sum()), int(unknown)


def _sources(flat: FlatGraph, kernel: NDArray[np.bool_], data: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Per node the node and port whose tensor it hands on: itself for a kernel, -1 for what does not move during a step."""
    edges = flat.graph.edges
    starts, sources, ports, moves = (part.tolist() for part in (flat.graph.in_start, edges.src, edges.port, data))
    found = np.where(kernel, np.arange(len(flat)), -1).tolist()
    port = [0] * len(flat)
    order = flat.graph.topological
    for node in order[~kernel[order]].tolist():
        inputs = [edge for edge in range(starts[node], starts[node + 1]) if moves[edge] and found[sources[edge]] >= 0]
        if len(inputs) == 1:
            before = sources[inputs[0]]
            found[node] = found[before]
            port[node] = ports[inputs[0]] if found[before] == before else port[before]
        elif inputs:
            found[node] = node
    return np.asarray(found, np.int32), np.asarray(port, np.int32)


EMITS = ("stream-file", "placement", "json", "yaml", "plan")


def check_places(flat: FlatGraph, paths: Sequence[Path], *, force: bool = False) -> None:
    """Refuses a set of places for outputs of a graph before the first of them is written.

    Raises:
        WriteError: Two of them are one place, one is the input or lies in its folder, something is there already and `force` is not
            given, or there is no folder that can be written to.
    """
    source = Path(os.path.realpath(flat.model.source))
    taken: dict[Path, Path] = {}
    for path in paths:
        target = Path(os.path.realpath(path))
        if target == source or source in target.parents:
            what = "is the input" if target == source else "lies in the folder of the input"
            raise WriteError(f"{what}; the input is never modified", where=str(path), fix="choose another name")
        if target in taken:
            raise WriteError("two outputs have this name", where=str(path), fix="choose another name for one of them")
        taken[target] = path
        check_target(path, force=force)


def emit(assigned: Assigned, kind: str, path: Path, *, force: bool = False) -> None:
    """Writes an assignment in another form.

    Args:
        assigned: The assignment.
        kind: ``stream-file`` (NVIDIA's TF_STREAM_FROM_FILE format), ``placement`` (node -> ``/device:GPU:k`` for stock TensorFlow's
            logical devices, JSON), ``json`` or ``yaml`` (ids with the rule that decided each), ``plan`` (order and waits, JSON;
            where the rule `auto` chose kernels, too, also their order and the nodes that share one).
        path: Where to.
        force: Replace what is there.

    Raises:
        WriteError: It can not be written.
    """
    formats.write_bytes_atomic(path, _emitted(assigned, kind).encode(), force=force)


def devices(assigned: Assigned) -> dict[int, str]:
    """Node -> its device for stock TensorFlow: the logical device of its stream, or the host's."""
    host, ids = assigned.flat.host, assigned.ids
    return {node: "/device:CPU:0" if host[node] else f"/device:GPU:{ids[node]}" for node in range(len(assigned.flat))}


def _emitted(assigned: Assigned, kind: str) -> str:
    flat, ids = assigned.flat, assigned.ids
    names = flat.graph.names
    gpu = np.flatnonzero(~flat.host).tolist()
    if kind == "stream-file":
        return streamfile.emit([names[node] for node in gpu], [int(ids[node]) for node in gpu])
    if kind == "placement":
        named = {names[node]: device for node, device in devices(assigned).items()}
        return json.dumps({"schema_version": 1, "devices": named}, indent=1, sort_keys=True) + "\n"
    if kind == "plan":
        if assigned.kernels is not None:
            from msplit.assignment.plans import plan_data

            return json.dumps(plan_data(flat, assigned.kernels.planned), indent=1) + "\n"
        from msplit.schedule import planfile

        return json.dumps(planfile.dump(assigned.plan, flat), indent=1) + "\n"
    if kind in ("json", "yaml"):
        listing = {"schema_version": 1, "streams": assigned.outcome.streams, "nodes": _listing(assigned, gpu)}
        if kind == "json":
            return json.dumps(listing, indent=1) + "\n"
        import yaml

        text: str = yaml.safe_dump(listing, sort_keys=False, allow_unicode=True, width=140)
        return text
    raise MsplitError(f"nothing to emit is called {kind!r}", fix=f"one of: {', '.join(EMITS)}")


def _listing(assigned: Assigned, nodes: Sequence[int]) -> list[dict[str, Any]]:
    listing = []
    for node in nodes:
        rule, why = assigned.outcome.assignment.why(node) or ("default", "no rule claimed it")
        listing.append(
            {"name": assigned.flat.graph.names[node], "stream": int(assigned.ids[node]), "rule": rule, "why": why}
        )
    return listing
