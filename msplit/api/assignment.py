"""Assign streams by rules, and say what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from msplit import formats, rules
from msplit.api.model import price
from msplit.assignment import UNASSIGNED
from msplit.cost import DEFAULT_GPU
from msplit.cost.costs import Costs
from msplit.cost.profile import Profile
from msplit.cost.shapes import Shapes
from msplit.dag import Dag
from msplit.errors import AssignError
from msplit.flatten.flat import FlatGraph
from msplit.flatten.origin import in_file
from msplit.graph import CONTROL, Ints
from msplit.memory import no_collection
from msplit.progress import phase
from msplit.rules import Outcome, RuleSet
from msplit.schedule.order import record_order
from msplit.schedule.plan import Plan, make_plan

if TYPE_CHECKING:
    from msplit.api.kernels import Chooser, Chosen


@dataclass(frozen=True)
class StreamLoad:
    """One stream of an assignment.

    Attributes:
        stream: Its id.
        nodes: Nodes on it, host nodes not counted.
        kernels: Those that launch a kernel.
        time_us: Their cost.
    """

    stream: int
    nodes: int
    kernels: int
    time_us: float


@dataclass(frozen=True, eq=False)
class Assigned:
    """An assignment with what it means.

    Attributes:
        flat: The graph.
        shapes: Shapes of its tensors.
        costs: Cost of its nodes.
        ruleset: The rules.
        outcome: Ids, provenance and remarks.
        plan: Order and waits.
        loads: Per stream.
        cross_edges: Tensors read on another stream than the one that made them, counted once per reading stream.
        cross_bytes: Their bytes, as far as they are known.
        cross_unknown: How many of them have no known size.
        unassigned: GPU nodes that no rule claimed: they are on the default stream.
        changed: GPU nodes whose id differs from what the file says.
        kernels: The kernels that the ids are made for, where the rule `auto` chose others than plain ones.
    """

    flat: FlatGraph
    shapes: Shapes
    costs: Costs
    ruleset: RuleSet
    outcome: Outcome
    plan: Plan
    loads: tuple[StreamLoad, ...]
    cross_edges: int
    cross_bytes: float
    cross_unknown: int
    unassigned: int
    changed: Ints
    kernels: Chosen | None = None

    @property
    def ids(self) -> Ints:
        """Stream id per node."""
        return self.outcome.ids


def assign(
    flat: FlatGraph,
    ruleset: str | Path | RuleSet = "default",
    *,
    streams: int | None = None,
    wrap: bool = False,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: str = DEFAULT_GPU,
    profile: Profile | None = None,
    priced: tuple[Shapes, Costs] | None = None,
    kernels: Chooser | None = None,
) -> Assigned:
    """Assigns a stream id to every node by rules. The graph is not changed; `save` writes the ids.

    Nothing is executed, unless the rule `auto` shall choose kernels, too (``kernels: best``): that runs the model once, on made-up inputs.

    Args:
        flat: From `load`.
        ruleset: A rules file, the name of a shipped rule set, or one loaded already.
        streams: Number of streams, instead of what the rules say.
        wrap: Take ids modulo the number of streams, as the forks do, instead of refusing those out of range.
        batch: Size of unknown leading dimensions.
        shapes: Whole shapes by input name.
        gpu: Data sheet that prices the nodes.
        profile: What was measured on this graph, in place of the data sheet.
        priced: What `price` gave for this graph, to spare the work.
        kernels: Chooses kernels where a rule asks for that; by default on the GPU where there is one, otherwise on the CPU.

    Raises:
        RulesError: The rules file is wrong.
        AssignError: The rules contradict each other on this graph.
    """
    if not isinstance(ruleset, RuleSet):
        ruleset = rules.load(ruleset, streams=streams, wrap=wrap)
    sizes, costs = priced or price(flat, batch=batch, shapes=shapes, gpu=gpu, profile=profile)
    if kernels is None:
        kernels = _chooser(flat, costs, ruleset, batch, shapes, profile)
    with no_collection():
        outcome = rules.assign(flat, costs, ruleset, streams=streams, wrap=wrap, kernels=kernels)
    chosen = None if kernels is None else kernels.chosen
    if chosen is not None and _moved(flat, outcome, chosen):
        text = "a later rule has moved nodes that share a kernel, so the plan is one of plain kernels"
        outcome = replace(outcome, remarks=(*outcome.remarks, rules.Remark("auto", "kernels-moved", text)))
        chosen = None
    with phase("planning"), no_collection():
        plan = plan_of(flat, costs, outcome.ids) if chosen is None else chosen.planned.plan
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
        changed=np.asarray(
            in_file(flat, np.flatnonzero((outcome.ids != present_ids(flat)) & ~flat.host).tolist()), np.int32
        ),
        kernels=chosen,
    )


def _moved(flat: FlatGraph, outcome: Outcome, chosen: Chosen) -> bool:
    """Whether a node that has a part in a kernel is on another stream than that."""
    lanes = chosen.planned.node_ids
    return bool((outcome.ids != lanes)[(lanes >= 0) & ~flat.host].any())


def _chooser(
    flat: FlatGraph,
    costs: Costs,
    ruleset: RuleSet,
    batch: int | None,
    shapes: Mapping[str, tuple[int, ...]] | None,
    profile: Profile | None,
) -> Chooser | None:
    """What chooses kernels, where a rule asks for it."""
    if not any(getattr(rule, "kernels", "plain") == "best" for rule in ruleset.rules):
        return None  # the engine need not be loaded
    from msplit.api.kernels import Chooser, job_of

    return Chooser(lambda: job_of(flat, costs, batch=batch, shapes=shapes, profile=profile), batch=batch)


def present_ids(flat: FlatGraph) -> Ints:
    """The ids that the file holds, int32 per node of the flat graph; 0 where a node has none.

    Raises:
        AssignError: What a node has is no 32-bit integer.
    """
    ids = np.zeros(len(flat), np.int32)
    for node in flat.graph.nodes_with(formats.STREAM_ID):
        value = flat.graph.attrs[node].get(formats.STREAM_ID, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not -(2**31) <= value < 2**31:
            raise AssignError(
                f"{formats.STREAM_ID} is {value!r}, not a stream's number",
                where=f"node {flat.graph.names[node]}",
                fix="write it as an int attribute, or take it away",
            )
        ids[node] = value
    return ids


def plan_of(flat: FlatGraph, costs: Costs, ids: Ints) -> Plan:
    """Order and waits of an assignment of a flat graph: nodes that cost nothing launch nothing."""
    dag = Dag.from_graph(flat.graph)
    return make_plan(dag, np.where(costs.time_us > 0, ids, -1).astype(np.int32), record_order(dag, costs.time_us))


def _loads(flat: FlatGraph, costs: Costs, outcome: Outcome) -> tuple[StreamLoad, ...]:
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
    tensors = np.unique(np.stack([makers[crosses], ports[crosses], readers[crosses]], axis=1), axis=0)
    made = np.unique(tensors[:, [0, 2]], axis=0)[:, 0]
    return len(tensors), float(costs.out_bytes[made].sum()), int(np.count_nonzero(~costs.known[tensors[:, 0]]))


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
