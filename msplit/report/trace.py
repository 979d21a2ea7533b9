"""Files for other viewers: runs as Chrome traces for Perfetto and chrome://tracing, graphs for Google's Model Explorer.

Traces have one track per stream, a slice per kernel, an arrow per wait.

The format is that of the "Trace Event Format" document of the Chromium project. What Perfetto's importer complains about is avoided here:
slices of one track that overlap, arrows whose ends lie on no slice, events out of order. So times are whole nanoseconds, an arrow starts
in the last nanosecond of its slice, and of events at one time slices come first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from msplit.core.graph import CONTROL, Assignment
from msplit.cost.costs import Costs
from msplit.cost.gpus import gpu_title
from msplit.escape import visible
from msplit.flatten.flat import FlatGraph
from msplit.report.document import dimensions, micros, ratio
from msplit.schedule.judge import Prediction

if TYPE_CHECKING:
    from msplit.benchmark.results import Bench, Traced
    from msplit.report.html.page import Page

PROCESS = 1
FIRST_TRACK = 100
"""Track of stream 0. Far from `PROCESS`, since viewers take a thread with the number of its process for its main thread."""

_SLICE, _FLOW_START, _FLOW_END = 0, 1, 2
"""Order of events at one time."""


@dataclass(frozen=True)
class Slice:
    """Something that ran on a stream.

    Attributes:
        name: Text that viewers write on it.
        stream: Its stream id, 0 or more.
        start_us: Its beginning, µs.
        duration_us: Its duration, µs.
        args: Numbers and texts that viewers show when it is clicked.
        row: Track within its stream.
    """

    name: str
    stream: int
    start_us: float
    duration_us: float
    args: Mapping[str, Any] = field(default_factory=dict)
    row: int = 0


@dataclass(frozen=True)
class TracedRun:
    """One run, which viewers show as a process.

    Attributes:
        title: Its name.
        slices: In any order.
        waits: Pairs (waited for, waiting) of positions in `slices`.
        about: Facts for the reader, such as the clock.
    """

    title: str
    slices: Sequence[Slice]
    waits: Iterable[tuple[int, int]] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


def from_runs(runs: Sequence[TracedRun]) -> dict[str, Any]:
    """The trace of runs, one below the other, all beginning at the same time.

    Clocks are not exact: a slice that begins before the one before it on its track has ended begins when that ends instead, and an
    arrow that would point back in time is left out. `otherData` of the trace says how much of either there was.

    Raises:
        ValueError: A time is negative or not finite.
    """
    names: list[dict[str, Any]] = []
    timed: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = []
    about: list[dict[str, Any]] = []
    arrows = 0
    for number, run in enumerate(runs):
        found, moved, undrawn = _events(run, PROCESS + number, arrows)
        names += _names(run, PROCESS + number, number)
        timed += [((at, kind, number, place), event) for at, kind, place, event in found]
        arrows += sum(kind == _FLOW_START for _, kind, _, _ in found)
        clipped = {"clipped_us": round(moved / 1000, 3), "waits_not_drawn": undrawn}
        about.append({"title": run.title, **clipped, **run.about})
    timed.sort(key=lambda entry: entry[0])
    return {
        "displayTimeUnit": "ns",
        "otherData": about[0] if len(about) == 1 else {"runs": about},
        "traceEvents": [*names, *(event for _, event in timed)],
    }


def _events(run: TracedRun, process: int, arrows: int) -> tuple[list[tuple[int, int, int, dict[str, Any]]], int, int]:
    """Time, kind, place and event of each; how far a slice was moved at most, ns; arrows that are not drawn."""
    slices = run.slices
    for piece in slices:
        if not (np.isfinite(piece.start_us) and np.isfinite(piece.duration_us)) or piece.duration_us < 0:
            raise ValueError(f"slice {piece.name!r} has no valid time: {piece.start_us} for {piece.duration_us} µs")
    numbers = _tracks(slices)
    track = [numbers[piece.stream, piece.row] for piece in slices]
    start, end, moved = _placed(slices, np.array(track, np.int64))
    events = []
    for number, piece in enumerate(slices):
        begin, length = int(start[number]), int(end[number] - start[number])
        kernel = {"ph": "X", "name": piece.name, "cat": "kernel", "pid": process, "tid": track[number]}
        times = {"ts": _micros(begin), "dur": _micros(length), "args": _plain(piece.args)}
        events.append((begin, _SLICE, number, {**kernel, **times}))
    undrawn = 0
    for number, (before, after) in enumerate(run.waits):
        arrives = int(start[after])
        leaves = min(int(end[before]) - 1, arrives)
        if leaves < start[before]:
            undrawn += 1
            continue
        arrows += 1
        wait = {"name": "wait", "cat": "wait", "id": arrows, "pid": process}
        head = {"ph": "f", **wait, "tid": track[after], "ts": _micros(arrives), "bp": "e"}
        events.append((leaves, _FLOW_START, number, {"ph": "s", **wait, "tid": track[before], "ts": _micros(leaves)}))
        events.append((arrives, _FLOW_END, number, head))
    return events, moved, undrawn


def _tracks(slices: Sequence[Slice]) -> dict[tuple[int, int], int]:
    """(stream, row) -> number of its track."""
    rows = max((piece.row for piece in slices), default=0) + 1
    used = sorted({(piece.stream, piece.row) for piece in slices})
    return {(stream, row): FIRST_TRACK + (stream if rows == 1 else stream * rows + row) for stream, row in used}


def from_simulation(
    flat: FlatGraph, costs: Costs, prediction: Prediction, assignment: Assignment | None = None
) -> dict[str, Any]:
    """The trace of a simulated step: a slice per kernel, and one for the join of all streams at the end.

    An assignment says which rule decided each node.
    """
    slices: list[Slice] = []
    ends: list[tuple[int, int]] = []
    for block in range(len(prediction.problem)):
        first = len(slices)
        slices += _block(flat, costs, prediction, assignment, block)
        ends.append((first, len(slices) - 1))
    plan = prediction.plan
    pairs = zip(plan.wait_on.tolist(), plan.wait_node.tolist(), strict=True)
    waits = [(ends[before][1], ends[after][0]) for before, after in pairs]
    step_us = prediction.problem.machine.step_us
    over = prediction.makespan_us - step_us
    if len(plan.join):
        last = max(piece.start_us + piece.duration_us for piece in slices)
        slices.append(Slice("join", int(prediction.lanes[0]), last, over - last, {"streams": len(plan.join)}))
        waits += [(ends[block][1], len(slices) - 1) for block in plan.join.tolist()]
    if slices and step_us > 0:
        slices.append(Slice("start and end of the step", int(prediction.lanes[0]), over, step_us))
    return from_runs([TracedRun(f"msplit: simulated on {costs.gpu}", slices, waits)])


def from_bench(flat: FlatGraph, found: Bench) -> dict[str, Any]:
    """The trace of what `bench` timed: a process per variant."""
    known = {name: node for node, name in enumerate(flat.graph.names)}
    return from_runs([_measured_run(flat, found.costs, one, known) for one in found.traced])


def _measured_run(flat: FlatGraph, costs: Costs | None, traced: Traced, known: dict[str, int]) -> TracedRun:
    slices = []
    for position, span in enumerate(traced.timeline.spans):
        nodes = [node for node in span.nodes if node < len(flat)]
        if not span.nodes and span.name in known:
            nodes = [known[span.name]]
        args: dict[str, Any] = {"ran": ", ".join(span.ran)}
        if nodes and costs is not None:
            args |= node_args(flat, costs, nodes[0], traced.assignment)
        if len(nodes) > 1:
            args["nodes"] = ", ".join(flat.graph.names[node] for node in nodes)
        stream, time_us = traced.stream_of(position), span.end_us - span.start_us
        slices.append(Slice(span.name, stream, span.start_us, time_us, args, span.row))
    return TracedRun(f"msplit bench: {traced.label}", slices, traced.timeline.waits, {"clock": traced.timeline.clock})


def _block(
    flat: FlatGraph, costs: Costs, prediction: Prediction, assignment: Assignment | None, block: int
) -> Iterable[Slice]:
    """The kernels of a block. While it shares the GPU all of them take longer by one factor."""
    nodes = prediction.node[prediction.start[block] : prediction.start[block + 1]].tolist()
    if not nodes:
        return
    begin, end = float(prediction.simulation.start_us[block]), float(prediction.simulation.end_us[block])
    done = np.cumsum(prediction.kernel_us[nodes])
    edges = begin + (end - begin) * np.concatenate([[0.0], done / done[-1]])
    stream = prediction.stream_of(block)
    for node, left, right in zip(nodes, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        yield Slice(flat.graph.names[node], stream, left, right - left, node_args(flat, costs, node, assignment))


def node_args(flat: FlatGraph, costs: Costs, node: int, assignment: Assignment | None = None) -> dict[str, Any]:
    """Arguments of a node's slice: op, cost, and the rule that decided its stream."""
    args: dict[str, Any] = {
        "op": flat.graph.ops[node],
        "cost_us": round(float(costs.time_us[node]), 3),
        "flops": float(costs.flops[node]),
        "bytes": float(costs.bytes[node]),
        "share": round(float(costs.share[node]), 4),
    }
    if not costs.known[node]:
        args["cost_is_a_guess"] = True
    decided = assignment.why(node) if assignment is not None else None
    if decided is not None:
        args["rule"], args["why"] = decided
    return args


def to_bytes(trace: Mapping[str, Any]) -> bytes:
    """The file's content."""
    return (json.dumps(trace, ensure_ascii=True, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _placed(slices: Sequence[Slice], track: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Begin and end of each slice in ns, so that none overlaps on its stream and none is empty; and how far one was cut at most."""
    start = np.array([round(piece.start_us * 1000) for piece in slices], np.int64)
    end = np.array([round((piece.start_us + piece.duration_us) * 1000) for piece in slices], np.int64)
    moved = 0
    before = -1
    for number in np.lexsort((end, start, track)).tolist():
        if before >= 0 and track[before] == track[number] and start[number] < end[before]:
            moved = max(moved, int(end[before] - start[number]))
            start[number] = end[before]
        end[number] = max(end[number], start[number] + 1)
        before = number
    return start, end, moved


def _names(run: TracedRun, process: int, place: int) -> list[dict[str, Any]]:
    here = {"ph": "M", "pid": process, "tid": FIRST_TRACK}
    events = [
        {**here, "name": "process_name", "args": {"name": run.title}},
        {**here, "name": "process_sort_index", "args": {"sort_index": place}},
    ]
    for (stream, row), number in _tracks(run.slices).items():
        track = {"ph": "M", "pid": process, "tid": number}
        name = f"stream {stream}" if row == 0 else f"stream {stream}, beside"
        for kind, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": number})):
            events.append({**track, "name": kind, "args": args})
    return events


def _micros(nanoseconds: int) -> float:
    """Microseconds that are the same nanoseconds again for a reader that multiplies by 1000 and cuts off, as Perfetto does."""
    value = nanoseconds / 1000
    return value if int(value * 1000) == nanoseconds else math.nextafter(value, math.inf)


def _plain(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as JSON knows them; infinities and NaN become text."""
    result = {}
    for key, value in args.items():
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and not np.isfinite(value):
            value = str(value)
        result[key] = value if isinstance(value, str | int | float | bool) or value is None else str(value)
    return result


EXPLORER_FILES = ("graph.json", "stream.json", "time.json", "bytes.json", "findings.json")
"""Files for Model Explorer: the graph, and data of its nodes."""

_GROWING = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#f28e2c"}]
_SEVERITIES = {"error": "#f4a3a3", "warning": "#f6d58a"}


def model_explorer(page: Page) -> dict[str, bytes]:
    """Files for Model Explorer by name: those of `EXPLORER_FILES`.

    Its package describes the format: `model_explorer.graph_builder` the graph, `model_explorer.node_data_builder` what is known of nodes.
    Bodies of loops and conds stay one node, as in the flat graph. The waits between streams are an overlay.
    """
    flat, names = page.flat, _explorer_ids(page.flat.graph.names)
    ids, times = page.prediction.ids.tolist(), page.prediction.kernel_us
    colours = _stream_colours()
    found: dict[str, list[tuple[str, str, str]]] = {}
    for one in page.findings or ():
        for name in one.finding.nodes:
            found.setdefault(name, []).append((one.code, one.severity.value, one.finding.text))
    streams = {
        names[node]: {
            "value": str(ids[node]),
            "textColor": "#000000",
            "bgColor": colours[(ids[node] - 1) % 15 + 1 if ids[node] > 0 else 0],
        }
        for node in range(len(flat))
        if ids[node] >= 0
    }
    worst = {
        names[flat.graph.index[name]]: {
            "value": " ".join(sorted({code for code, _, _ in told})),
            "bgColor": next(
                (colour for kind, colour in _SEVERITIES.items() if kind in {kind for _, kind, _ in told}), ""
            ),
        }
        for name, told in found.items()
        if name in flat.graph.index
    }
    runs = np.flatnonzero(times > 0).tolist()
    nbytes = np.nan_to_num(page.costs.bytes, nan=0.0, posinf=0.0, neginf=0.0)
    graph_id = visible(str(page.flat.model.source))
    graph = {"id": graph_id, "nodes": _explorer_nodes(page, found), **_about_graph(page)}
    hidden = {"hideInAggregatedStatsTable": True, "hideInChildrenStatsTable": True}  # there is no sum of streams
    data = {
        "stream.json": {"name": "stream", "results": streams, **hidden},
        "time.json": _growing(f"µs, {page.costs.source}", {names[node]: round(float(times[node]), 3) for node in runs}),
        "bytes.json": _growing("bytes", {names[node]: float(nbytes[node]) for node in runs}),
        "findings.json": {"name": "findings", "results": worst, **hidden},
    }
    files = {name: {graph_id: one} for name, one in data.items()}
    whole: dict[str, Mapping[str, Any]] = {"graph.json": {"label": graph_id, "graphs": [graph]}, **files}
    return {name: to_bytes(content) for name, content in whole.items()}


_PROPERTIES = frozenset(
    [
        "__proto__",
        "constructor",
        "hasOwnProperty",
        "isPrototypeOf",
        "propertyIsEnumerable",
        "toLocaleString",
        "toString",
        "valueOf",
    ]
)
"""What every object of JavaScript has: Model Explorer, which looks ids up in objects, shows no graph with such an id."""


def _explorer_ids(names: Sequence[str]) -> list[str]:
    """Ids of nodes: their names, as far as Model Explorer can take them. No name has a colon."""
    return [f"{name}:0" if name in _PROPERTIES else name for name in names]


def _growing(name: str, values: Mapping[str, float]) -> dict[str, Any]:
    return {
        "name": visible(name),
        "results": {key: {"value": one} for key, one in values.items()},
        "gradient": _GROWING,
    }


def _stream_colours() -> dict[int, str]:
    """Slot of a stream -> its colour in the report, by day."""
    from msplit.report.html.document import asset

    found: dict[int, str] = {}
    for slot, colour in re.findall(r"--s(\d+): *(#[0-9a-fA-F]+)", asset("assets", "style.css")):
        found.setdefault(int(slot), colour)
    return found


def _explorer_nodes(page: Page, found: Mapping[str, Sequence[tuple[str, str, str]]]) -> list[dict[str, Any]]:
    """Nodes with their edges, types and shapes, and what the side panel shows of them."""
    flat, shapes = page.flat, page.shapes
    graph, known, ids, times = (
        flat.graph,
        _explorer_ids(flat.graph.names),
        page.prediction.ids.tolist(),
        page.prediction.kernel_us.tolist(),
    )
    starts, src, port = graph.in_start.tolist(), graph.edges.src.tolist(), graph.edges.port.tolist()
    nodes = []
    for node, name in enumerate(graph.names):
        attrs = {"name": name, "stream": ids[node] if ids[node] >= 0 else "none", "time_us": round(times[node], 3)}
        attrs |= node_args(flat, page.costs, node, page.assignment) | ({"runs on": "host"} if flat.host[node] else {})
        edges = [
            {
                "sourceNodeId": known[src[edge]],
                "sourceNodeOutputId": "control" if port[edge] == CONTROL else str(port[edge]),
                "targetNodeInputId": str(edge - starts[node]),
            }
            for edge in range(starts[node], starts[node + 1])
        ]
        outputs = []
        if shapes is not None:
            kinds = [
                f"{shapes.dtype(node, at)} {dimensions(one)}".strip() for at, one in enumerate(shapes.outputs[node])
            ]
            outputs = [{"id": str(at), "attrs": _pairs({"tensor_shape": kind})} for at, kind in enumerate(kinds)]
        told = [pair for code, kind, what in found.get(name, ()) for pair in _pairs({f"{code} ({kind})": what})]
        scope = "/".join(filter(None, visible(name).split("/")[:-1]))
        label = visible(graph.ops[node])
        one = {"id": known[node], "label": label, "namespace": scope, "attrs": _pairs(attrs) + told}
        nodes.append({**one, "incomingEdges": edges, "outputsMetadata": outputs})
    return nodes


def _pairs(attrs: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"key": visible(key), "value": visible(str(value))} for key, value in attrs.items()]


def _about_graph(page: Page) -> dict[str, Any]:
    """What is shown while no node is selected, and the waits as edges beside those of the graph."""
    prediction, names = page.prediction, _explorer_ids(page.flat.graph.names)
    about = {
        "predicted step": micros(prediction.makespan_us),
        "gain over one stream": ratio(prediction.gain),
        "streams": ", ".join(map(str, prediction.lanes.tolist())),
        "priced for": f"{gpu_title(page.costs.gpu)}, {page.costs.source}",
        "stream ids": page.origin,
    }
    node, start = prediction.node.tolist(), prediction.start.tolist()
    waits = [
        {"sourceNodeId": names[node[start[before + 1] - 1]], "targetNodeId": names[node[start[after]]]}
        for before, after in zip(prediction.plan.wait_on.tolist(), prediction.plan.wait_node.tolist(), strict=True)
        if start[before] < start[before + 1] and start[after] < start[after + 1]
    ]
    overlay = {"name": "waits between streams", "edgeColor": "#d62728", "edges": waits}
    overlays = [{"type": "edge_overlays", "name": "msplit", "overlays": [overlay]}]
    return {
        "groupNodeAttributes": {"": {key: visible(value) for key, value in about.items()}},
        "tasksData": {"edgeOverlaysDataListLeftPane": overlays, "edgeOverlaysDataListRightPane": []},
    }
