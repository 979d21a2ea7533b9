"""Assign streams by rules, and say what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msplit import formats, rules
from msplit.api.model import price
from msplit.assignment import UNASSIGNED
from msplit.cost import DEFAULT_GPU
from msplit.cost.costs import Costs
from msplit.cost.shapes import Shapes
from msplit.dag import Dag
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.graph import CONTROL, Ints
from msplit.rules import Outcome, RuleSet, streamfile
from msplit.schedule.order import record_order
from msplit.schedule.plan import Plan, make_plan

EMITS = ("stream-file", "placement", "json", "yaml", "plan")


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
        cross_bytes: Their bytes.
        unassigned: GPU nodes that no rule claimed: they are on the default stream.
        changed: GPU nodes whose id differs from what the file says.
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
    unassigned: int
    changed: Ints

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
    priced: tuple[Shapes, Costs] | None = None,
) -> Assigned:
    """Assigns a stream id to every node by rules. The graph is not changed; `save` writes the ids.

    Args:
        flat: From `load`.
        ruleset: A rules file, the name of a shipped rule set, or one loaded already.
        streams: Number of streams, instead of what the rules say.
        wrap: Take ids modulo the number of streams, as the forks do, instead of refusing those out of range.
        batch: Size of unknown leading dimensions.
        shapes: Whole shapes by input name.
        gpu: Data sheet that prices the nodes.
        priced: What `price` gave for this graph, to spare the work.

    Raises:
        RulesError: The rules file is wrong.
        AssignError: The rules contradict each other on this graph.
    """
    if not isinstance(ruleset, RuleSet):
        ruleset = rules.load(ruleset, streams=streams, wrap=wrap)
    sizes, costs = priced or price(flat, batch=batch, shapes=shapes, gpu=gpu)
    outcome = rules.assign(flat, costs, ruleset, streams=streams, wrap=wrap)
    plan = plan_of(flat, costs, outcome.ids)
    edges, moved = _crossing(flat, costs, outcome.ids)
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
        unassigned=int(np.count_nonzero((outcome.assignment.ids == UNASSIGNED) & ~flat.host)),
        changed=np.flatnonzero((outcome.ids != present_ids(flat)) & ~flat.host).astype(np.int32),
    )


def present_ids(flat: FlatGraph) -> Ints:
    """The ids that the file holds; 0 where a node has none."""
    ids = np.zeros(len(flat), np.int32)
    for node in flat.graph.nodes_with(formats.STREAM_ID):
        ids[node] = int(flat.graph.attrs[node].get(formats.STREAM_ID, 0))
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


def _crossing(flat: FlatGraph, costs: Costs, ids: Ints) -> tuple[int, float]:
    edges = flat.graph.edges
    ends = (edges.port != CONTROL) & (ids[edges.src] != ids[edges.dst]) & ~flat.host[edges.src] & ~flat.host[edges.dst]
    # Constants and weights are there before the step begins: reading them elsewhere crosses nothing.
    ends &= costs.time_us[edges.src] > 0
    pairs = np.unique(np.stack([edges.src[ends], edges.port[ends], ids[edges.dst[ends]]], axis=1), axis=0)
    sources = np.unique(pairs[:, [0, 2]], axis=0)[:, 0]
    return len(pairs), float(costs.out_bytes[sources].sum())


def emit(assigned: Assigned, kind: str, path: Path, *, force: bool = False) -> None:
    """Writes an assignment in another form.

    Args:
        assigned: The assignment.
        kind: ``stream-file`` (NVIDIA's TF_STREAM_FROM_FILE format), ``placement`` (node -> ``/device:GPU:k`` for stock TensorFlow's
            logical devices, JSON), ``json`` or ``yaml`` (ids with the rule that decided each), ``plan`` (order and waits, JSON).
        path: Where to.
        force: Replace what is there.

    Raises:
        WriteError: It can not be written.
    """
    formats.write_bytes_atomic(path, _emitted(assigned, kind).encode(), force=force)


def _emitted(assigned: Assigned, kind: str) -> str:
    flat, ids = assigned.flat, assigned.ids
    names = flat.graph.names
    gpu = np.flatnonzero(~flat.host).tolist()
    if kind == "stream-file":
        return streamfile.emit([names[node] for node in gpu], [int(ids[node]) for node in gpu])
    if kind == "placement":
        devices = {names[node]: f"/device:GPU:{ids[node]}" for node in gpu}
        devices |= {names[node]: "/device:CPU:0" for node in np.flatnonzero(flat.host).tolist()}
        return json.dumps({"schema_version": 1, "devices": devices}, indent=1, sort_keys=True) + "\n"
    if kind == "plan":
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
