"""Runs that the timeline can show beside that of the ids: simulated candidates, and what `bench` measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msplit.errors import MsplitError
from msplit.escape import lines, visible
from msplit.flatten.flat import FlatGraph
from msplit.formats.files import read_text
from msplit.report.document import picked
from msplit.report.html.data import Leaves, rounded
from msplit.schedule.judge import Prediction

MOST_BARS = 150_000
"""Kernels that all runs beside the first may have together: a page stays a few MB."""


MOST_BYTES = 1 << 28
"""Largest file of `bench` that is read."""


@dataclass(frozen=True, eq=False)
class StepRun:
    """One step, simulated or measured, as bars on streams.

    Attributes:
        name: Name on the page.
        about: A sentence: what it is, and how long it takes.
        command: Command that makes it, in lines of a shell; "" where none does.
        node: Per bar its node in the flat graph, -1 where it belongs to none.
        stream: Per bar its stream; -1 is not drawn.
        start_us: Per bar its beginning.
        time_us: Per bar its duration.
        waits: Pairs (waited for, waiting) of bars.
        makespan_us: Duration of the step.
        label: Per bar what stands on it, where that is not the node's name.
    """

    name: str
    about: str
    command: str
    node: Sequence[int]
    stream: Sequence[int]
    start_us: Sequence[float]
    time_us: Sequence[float]
    waits: Sequence[tuple[int, int]]
    makespan_us: float
    label: Sequence[str] = ()

    @staticmethod
    def of(name: str, about: str, command: str, prediction: Prediction) -> StepRun:
        """A simulated run."""
        leaves, plan = Leaves.of(prediction), prediction.plan
        waits = [*zip(leaves.last[plan.wait_on].tolist(), leaves.first[plan.wait_node].tolist(), strict=True)]
        bars = (leaves.node.tolist(), leaves.stream.tolist(), rounded(leaves.start_us), rounded(leaves.time_us))
        return StepRun(name, about, command, *bars, waits, prediction.makespan_us)

    def columns(self) -> dict[str, Any]:
        """For the page's script."""
        return {
            "name": visible(self.name),
            "about": visible(self.about),
            "command": lines(self.command),
            **picked(self, "node stream start=start_us time=time_us"),
            "on": [first for first, _ in self.waits],
            "by": [second for _, second in self.waits],
            "lanes": sorted({stream for stream in self.stream if stream >= 0}),
            "makespan": round(self.makespan_us, 3),
            "label": list(map(visible, self.label)),
        }


@dataclass(frozen=True)
class MeasuredSteps:
    """Contents of files of `bench`.

    Attributes:
        rows: Per variant (name, streams, median of a step by the device's clock, by the host's, both in µs or None).
        runs: Timelines of one step.
        model: The model that the result names, "" where none does.
        command: The command that measured it, "" where the result does not say.
    """

    rows: tuple[tuple[str, int, float | None, float | None], ...] = ()
    runs: tuple[StepRun, ...] = ()
    model: str = ""
    command: str = ""


@dataclass
class _Trace:
    streams: dict[int, int] = field(default_factory=dict)
    bars: list[Mapping[str, Any]] = field(default_factory=list)
    sends: dict[Any, tuple[int, float]] = field(default_factory=dict)
    receives: dict[Any, tuple[int, float]] = field(default_factory=dict)
    title: str = ""


def measured(flat: FlatGraph, paths: Sequence[Path]) -> MeasuredSteps:
    """Reads what `bench` wrote: results (`--format json`) and timelines (`--trace`), told apart by what is in them.

    Raises:
        MsplitError: A file can not be read or is neither.
    """
    found = MeasuredSteps()
    for path in paths:
        try:
            content = json.loads(read_text(path, MOST_BYTES))
            if not isinstance(content, dict):
                raise TypeError("it is no mapping")
            if "traceEvents" in content:
                found = replace(found, runs=(*found.runs, *_runs(flat, content)))
            else:
                found = _result(found, content)
        except OSError as problem:
            raise MsplitError(f"it can not be read: {problem.strerror or problem}", where=str(path)) from None
        except (EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise MsplitError(
                f"this is neither a result nor a trace of bench ({type(problem).__name__}: {problem})",
                where=str(path),
                fix="give what `msplit bench --format json` printed, or what its --trace wrote",
            ) from None
    return found


def _result(found: MeasuredSteps, content: Mapping[str, Any]) -> MeasuredSteps:
    result = content["result"]
    rows = [
        (str(one["label"]), int(one["streams"]), _median(one.get("device")), _median(one.get("host")))
        for one in result["variants"]
    ]
    line = result.get("environment", {}).get("command") or ()
    return replace(
        found,
        rows=(*found.rows, *rows),
        model=str(content.get("model", "")),
        command=line if isinstance(line, str) else " ".join(map(str, line)),
    )


def _median(summary: Mapping[str, Any] | None) -> float | None:
    return None if not summary else 1e6 * float(summary["median"])


def _runs(flat: FlatGraph, content: Mapping[str, Any]) -> list[StepRun]:
    """The processes of a trace as runs."""
    processes: dict[int, _Trace] = {}
    for event in content["traceEvents"]:
        trace = processes.setdefault(int(event["pid"]), _Trace())
        if event["ph"] == "M":
            name = str(event.get("args", {}).get("name", ""))
            if event["name"] == "process_name":
                trace.title = name
            elif event["name"] == "thread_name" and name.startswith("stream "):
                trace.streams[int(event["tid"])] = int(name.split()[1].rstrip(","))
        elif event["ph"] == "X":
            trace.bars.append(event)
        elif event["ph"] in "sf":
            side = trace.sends if event["ph"] == "s" else trace.receives
            side[event["id"]] = int(event["tid"]), float(event["ts"])
    return [_run(flat, trace) for trace in processes.values() if trace.bars]


def _run(flat: FlatGraph, trace: _Trace) -> StepRun:
    index = flat.graph.index
    starts = [float(bar["ts"]) for bar in trace.bars]
    times = [float(bar["dur"]) for bar in trace.bars]
    first = min(starts)
    makespan = max(start + time for start, time in zip(starts, times, strict=True)) - first
    by_track: dict[int, list[int]] = {}
    for bar in sorted(range(len(starts)), key=starts.__getitem__):
        by_track.setdefault(int(trace.bars[bar]["tid"]), []).append(bar)

    def at(place: tuple[int, float]) -> int | None:
        track, when = place
        return next((bar for bar in by_track.get(track, ()) if starts[bar] <= when <= starts[bar] + times[bar]), None)

    waits = [
        (before, after)
        for key, place in trace.sends.items()
        if key in trace.receives
        and (before := at(place)) is not None
        and (after := at(trace.receives[key])) is not None
    ]
    return StepRun(
        name=f"measured: {trace.title.removeprefix('msplit bench: ')}",
        about=f"One step as it ran: {makespan:,.1f} µs from its first kernel to its last.",
        command="",
        node=[index.get(str(bar["name"]), -1) for bar in trace.bars],
        stream=[trace.streams.get(int(bar["tid"]), 0) for bar in trace.bars],
        start_us=[round(start - first, 3) for start in starts],
        time_us=[round(time, 3) for time in times],
        waits=waits,
        makespan_us=makespan,
        label=[str(bar["name"]) for bar in trace.bars],
    )
