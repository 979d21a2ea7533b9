"""Plans as JSON, keyed by node names: `msplit assign --emit plan` writes them, `msplit check --plan` proves them.

    {"schema_version": 1, "kind": "plan", "graph_hash": "…", "streams": 2,
     "order": [["x/MatMul", 0], ["y/MatMul", 1], …],     record order, each node with its stream
     "waits": [["join", "y/MatMul"], …],                 the first waits for the event that the second records
     "fork": ["y/MatMul"], "join": [],                   see `plan.Plan`
     "edges": 3, "merged_waits": 2,
     "kernels": [["x/MatMul", 0, 0], …],                 optional, of a tuned plan: the engine's own record order, see `PlanFile`
     "groups": [{"kind": "fused", "nodes": ["x/Relu", "x/Mul"], "stream": 0}, …],    optional, of a tuned plan: who shares a kernel
     "made_for": {"gpu": "h200", "batch": 128}}

`docs/schemas/plan.json` describes them. A file may come from anybody: it is bounded in size, and every mistake in it is an error that
says where it is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import numpy as np

from msplit.core.arguments import MAX_STREAMS
from msplit.core.graph import Ints
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.files import JsonValue, read_file
from msplit.formats.summary import graph_hash
from msplit.schedule.plan import Plan

SCHEMA_VERSION = 1
KIND = "plan"
MAX_BYTES = 256 << 20
"""Longest plan file: a million nodes with long names and as many waits."""

KINDS = ("fused", "grouped", "fused and grouped", "columns", "library")
"""Keys of groups in a plan file; see `engines.cuda.options.SharedKernel`."""

FIX = "write the plan again: msplit assign MODEL --rules FILE --emit plan PATH"
"""Advice on a plan that does not fit."""


@dataclass(frozen=True)
class KernelGroup:
    """Two or more nodes whose work one kernel of one of `KINDS` does: they have one stream."""

    kind: Annotated[str, KINDS]
    nodes: tuple[str, ...]
    stream: int


@dataclass(frozen=True)
class PlanFile:
    """A plan as a file holds it. What is not said here is as in `Plan`.

    Attributes:
        graph_hash: `formats.graph_hash` of the model that it was made for, "" where the file does not say.
        order: (node, stream) in record order, each node once.
        waits: (node that waits, node whose event it waits for).
        kernels: The order in which the cuda engine records: (node, which of that node's kernels, stream). A kernel that does the work of
            several nodes belongs to the first of them. Empty where the plan does not say; then the engine orders for itself.
        groups: Nodes that share a kernel. Nothing runs by them: they say what the kernels do.
        made_for: What else it depends on, such as the GPU and the batch.
    """

    source: str = ""
    graph_hash: str = ""
    streams: Annotated[int, 0, MAX_STREAMS] = 0
    order: tuple[tuple[str, int], ...] = ()
    waits: tuple[tuple[str, str], ...] = ()
    fork: tuple[str, ...] = ()
    join: tuple[str, ...] = ()
    edges: int = 0
    merged_waits: int = 0
    kernels: tuple[tuple[str, int, int], ...] = ()
    groups: tuple[KernelGroup, ...] = ()
    made_for: Mapping[str, Any] = field(default_factory=dict)

    def on(self, flat: FlatGraph) -> tuple[Plan, tuple[str, ...]]:
        """The plan over a graph, without what names none of its nodes; and the names that name none, in the order of the file."""
        index = flat.graph.index
        stream = np.full(len(flat), -1, np.int32)
        for name, lane in self.order:
            if name in index:
                stream[index[name]] = lane
        waits = [(index[one], index[other]) for one, other in self.waits if one in index and other in index]
        named = (
            *(name for name, _ in self.order),
            *(name for pair in self.waits for name in pair),
            *self.fork,
            *self.join,
            *(name for name, _, _ in self.kernels),
            *(name for group in self.groups for name in group.nodes),
        )
        unknown = tuple(dict.fromkeys(name for name in named if name not in index))

        def nodes(names: tuple[str, ...]) -> Ints:
            return np.asarray([index[name] for name in names if name in index], dtype=np.int32)

        plan = Plan(
            stream=stream,
            order=nodes(tuple(name for name, _ in self.order)),
            wait_node=np.asarray([one for one, _ in waits], np.int32),
            wait_on=np.asarray([other for _, other in waits], np.int32),
            fork=nodes(self.fork),
            join=nodes(self.join),
            streams=self.streams,
            edges=self.edges,
            merged_waits=self.merged_waits,
        )
        return plan, unknown


def dump(
    plan: Plan,
    flat: FlatGraph,
    *,
    kernels: Sequence[tuple[int, int, int]] = (),
    groups: Sequence[tuple[str, Sequence[int], int]] = (),
    made_for: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A plan as plain data for JSON.

    Args:
        plan: Over the nodes of `flat`.
        kernels: See `PlanFile`, with numbers of nodes in place of names.
        groups: Kind, nodes and stream of each group. Host nodes have no stream, so they are left out.
        made_for: What else the plan depends on, such as the GPU and the batch; plain data.
    """
    names = flat.graph.names
    placed = [(kind, [node for node in nodes if not flat.host[node]], lane) for kind, nodes, lane in groups]
    shared = [
        {"kind": kind, "nodes": [names[node] for node in nodes], "stream": lane}
        for kind, nodes, lane in placed
        if len(nodes) > 1
    ]

    def named(nodes: Ints) -> list[str]:
        return [names[node] for node in nodes.tolist()]

    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "graph_hash": graph_hash(flat.model) if flat.model.graph_def is not None else "",
        "streams": plan.streams,
        "order": [
            [names[node], lane]
            for node, lane in zip(plan.order.tolist(), plan.stream[plan.order].tolist(), strict=True)
        ],
        "waits": [list(pair) for pair in zip(named(plan.wait_node), named(plan.wait_on), strict=True)],
        "fork": named(plan.fork),
        "join": named(plan.join),
        "edges": plan.edges,
        "merged_waits": plan.merged_waits,
        **({"kernels": [[names[node], index, lane] for node, index, lane in kernels]} if kernels else {}),
        **({"groups": shared} if shared else {}),
        "made_for": dict(made_for or {}),
    }


def load(path: str | os.PathLike[str]) -> PlanFile:
    """Reads a plan file.

    Raises:
        MsplitError: It can not be read, or is no plan.
    """
    return parse(read_file(path, MAX_BYTES, what=KIND, fix=FIX), os.fspath(path))


def parse(text: str, source: str) -> PlanFile:
    """Reads the JSON text of a plan file that messages call `source`.

    Raises:
        MsplitError: It is no plan.
    """
    whole = JsonValue.parse(text, source, what=KIND, fix=FIX).of_version(KIND, SCHEMA_VERSION)
    plan = whole.to(PlanFile, optional=[one.name for one in fields(PlanFile)], source=source)
    lanes: dict[str, tuple[Sequence[Any], list[int]]] = {
        "order": ([name for name, _ in plan.order], [lane for _, lane in plan.order]),
        "kernels": ([entry[:2] for entry in plan.kernels], [lane for *_, lane in plan.kernels]),
        "groups": (range(len(plan.groups)), [group.stream for group in plan.groups]),
    }
    for key, (named, streams) in lanes.items():
        if max(streams, default=-1) >= plan.streams:
            place = next(place for place, lane in enumerate(streams) if lane >= plan.streams)
            raise _wrong(f"`{key}[{place}]` is on stream {streams[place]}, but `streams` is {plan.streams}", source)
        if len(set(named)) < len(named):
            twice, _ = Counter(named).most_common(1)[0]
            raise _wrong(f"`{key}`: {twice!r} is there twice", source)
    for place, group in enumerate(plan.groups):
        if not 1 < len(set(group.nodes)) == len(group.nodes):
            raise _wrong(f"`groups[{place}].nodes` are not two or more different nodes", source)
    return plan


def _wrong(what: str, source: str) -> MsplitError:
    return MsplitError(what, where=source, fix=FIX)
