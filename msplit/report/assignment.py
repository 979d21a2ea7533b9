"""Reports of `assign`: of one assignment, and of several side by side.

The report of `assign --compare`: every way to choose streams, side by side.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msplit.assignment.assignment import Assigned, devices, present_ids
from msplit.benchmark.comparison import Compared, Row
from msplit.errors import MsplitError
from msplit.flatten.flat import Conflict, with_ids
from msplit.formats.writer import WriteReport
from msplit.report.document import Document, Table, count, heading, micros, percent, picked, plural, ratio, size

_MOST_REMARKS = 12

_EXPLAINING = frozenset({"no-gain", "dominant", "moved", "host", "kernels", "split", "kept"})
"""Kinds of remarks that explain; the others ask the user to look."""


@dataclass(frozen=True)
class Outputs:
    """Results of an assignment, in sentences.

    Attributes:
        written: Files that were written, with their content.
        notes: Remarks of the writer.
        warnings: Warnings of the writer.
        unwritten: Reason why nothing was written.
    """

    written: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unwritten: str = "there is no -o OUT"


def document(assigned: Assigned, outputs: Outputs, *, diff: bool = False, every: bool = False) -> Document:
    """Loads, cuts and waits of an assignment; with `diff` the nodes whose id changes, with `every` where each node goes and why."""
    flat, plan = assigned.flat, assigned.plan
    work = sum(load.time_us for load in assigned.loads)
    used = [load for load in assigned.loads if load.nodes]
    empty = len(assigned.loads) - len(used)
    rows = [
        (str(load.stream), count(load.nodes), count(load.kernels), micros(load.time_us), percent(load.time_us, work))
        for load in used
    ]
    decided = claims(assigned)
    idle = _idle(assigned, decided)
    unassigned = plural(assigned.unassigned, "GPU node") if assigned.unassigned else ""
    reduced = f", the fewest that order {plural(plan.edges, 'dependency', 'dependencies')} between streams"
    facts = [
        ("rules", f"{assigned.ruleset.source}: " + ", ".join(rule.key for rule in assigned.ruleset.rules)),
        *([("costs", assigned.costs.source)] if assigned.costs.source != "static" else []),
        ("decided by", ", ".join(f"{rule} {count(number)}" for rule, number in decided.items() if number) or "no rule"),
        *([("matched nothing", idle)] if idle else []),
        ("streams", f"{count(len(used))} used of {count(assigned.outcome.streams)}" if empty else count(len(used))),
        ("predicted gain", _predicted(assigned)),
        ("cross-stream edges", _crossing(assigned)),
        ("waits", count(plan.waits) + (reduced if plan.edges else "")),
        ("unassigned", f"{unassigned}, on the default stream {assigned.ruleset.default}" if unassigned else "none"),
        ("host nodes", f"{count(int(flat.host.sum()))}, which have no stream"),
        *_old_ids(assigned),
        ("changed", f"{_moving(len(assigned.changed))}, compared with the file"),
    ]
    tables = [Table("Streams", (">stream", ">nodes", ">kernels", ">time", ">share"), rows)]
    if diff:
        tables.append(_diff(assigned))
    if every:
        tables.append(_placement(assigned))
    warned, noted = _remarks(assigned)
    if _simulated(assigned) and not assigned.judgement.helps:
        noted = [assigned.judgement.words, *noted]
    return Document(
        title=heading(flat.model.source, flat.model.format),
        facts=facts,
        tables=tables,
        warnings=[*warned, *outputs.warnings],
        notes=[*noted, *outputs.notes, *(outputs.written or [f"Nothing was written: {outputs.unwritten}."])],
    )


def _simulated(assigned: Assigned) -> bool:
    """True if there is a prediction: there may be more streams than can be simulated."""
    try:
        return assigned.prediction is not None
    except MsplitError:
        return False


def _predicted(assigned: Assigned) -> str:
    if not _simulated(assigned):
        return "none: there are more streams than can be simulated"
    one, many, kernels = assigned.prediction.one_us, assigned.prediction.makespan_us, ""
    if assigned.kernels is not None:
        one, many, kernels = assigned.kernels.one_us, assigned.kernels.predicted_us, "with larger kernels "
    return f"{ratio(assigned.judgement.gain)} {kernels}over one stream, {micros(many)} instead of {micros(one)}"


def _old_ids(assigned: Assigned) -> list[tuple[str, str]]:
    """Sentence on the ids that were on the model, if there were any."""
    model = assigned.flat.model
    kept, total = (sum(map(len, nodes.values())) for nodes in (assigned.by_hand, with_ids(model)))
    if not total:
        return []
    if model.record is None and kept:
        text = f"{plural(kept, 'node')} had one, taken as set by hand; --no-keep-ids starts anew"
    else:
        text = f"{plural(total, 'node')} had one: {count(kept)} set by hand, {count(total - kept)} not kept"
    manual = any(rule.key == "manual" for rule in assigned.ruleset.rules)
    return [("old ids", text if manual or not kept else f"{text}; these rules have no `manual`, so none counts")]


def _moving(number: int) -> str:
    return f"{plural(number, 'node')} {'changes its' if number == 1 else 'change their'} stream"


def counted(report: WriteReport, moved: int) -> str:
    """Counts of ids that writing changed: "3 stream ids set, 2 changed, 1 removed; 4 nodes change their stream"."""
    changed = f", {count(report.changed)} changed" if report.changed else ""
    removed = f", {count(report.removed)} removed" if report.removed else ""
    return f"{plural(report.new, 'stream id')} set{changed}{removed}; {_moving(moved)}"


def about_plan(assigned: Assigned) -> str:
    """Contents of a plan file beside order and waits, as the end of a sentence."""
    if assigned.kernels is None:
        return ""
    planned, runs = assigned.kernels.planned, "`msplit bench --plan` runs it"
    return f" for {planned.kernels} kernels, with {plural(planned.groups, 'group')} of nodes that share one; {runs}"


def claims(assigned: Assigned) -> dict[str, int]:
    """GPU nodes that each rule decided, in the order of the rules."""
    found = assigned.outcome.assignment
    by_reason = np.bincount(found.reason[(found.ids >= 0) & ~assigned.flat.host], minlength=len(found.reasons))
    nodes = dict.fromkeys((rule.key for rule in assigned.ruleset.rules), 0)
    for (rule, _), number in zip(found.reasons, by_reason.tolist(), strict=True):
        nodes[rule] = nodes.get(rule, 0) + number
    return nodes


def _idle(assigned: Assigned, decided: Mapping[str, int]) -> str:
    """Rules that decided nothing. Of constraints that is not expected."""
    constraints = {rule.key for rule in assigned.ruleset.rules if getattr(rule, "constraint", False)}
    return ", ".join(rule for rule, number in decided.items() if not number and rule not in constraints)


def _crossing(assigned: Assigned) -> str:
    if not assigned.cross_edges:
        return "none"
    text = f"{count(assigned.cross_edges)}, {size(assigned.cross_bytes)}"
    return f"{text} and {count(assigned.cross_unknown)} of unknown size" if assigned.cross_unknown else text


def _remarks(assigned: Assigned) -> tuple[list[str], list[str]]:
    """Warnings and notes. An embedding rule in a model without tables is no more than that: a rule that matched nothing."""
    warnings: list[str] = []
    notes: list[str] = []
    for remark in assigned.outcome.remarks:
        if remark.kind == "no-match" and remark.rule == "embedding":
            continue
        where = f" ({remark.where})" if remark.where and remark.where.removeprefix("node ") not in remark.text else ""
        (notes if remark.kind in _EXPLAINING else warnings).append(f"{remark.rule}: {remark.text}{where}")
    left = warnings[_MOST_REMARKS:]
    more = [f"and {len(left)} more (--format json has them all)"] if left else []
    return warnings[:_MOST_REMARKS] + more, notes[:_MOST_REMARKS]


def _diff(assigned: Assigned) -> Table:
    names, before = assigned.flat.graph.names, present_ids(assigned.flat)
    rows = [
        (names[node], str(before[node]), str(assigned.ids[node]), _decided(assigned, node)[0])
        for node in assigned.changed.tolist()
    ]
    return Table("Nodes whose stream changes", ("node", ">was", ">is", "rule"), rows, whole=True)


def _explained(assigned: Assigned) -> list[dict[str, Any]]:
    """Each node's stream, its device as `--emit placement` has it, and what decided that."""
    graph, host = assigned.flat.graph, assigned.flat.host
    found = []
    for node, device in devices(assigned).items():
        rule, why = ("host", "runs on the host") if host[node] else _decided(assigned, node)
        stream = None if host[node] else int(assigned.ids[node])
        values = (graph.names[node], graph.ops[node], stream, device, rule, why)
        found.append(dict(zip(("node", "op", "stream", "device", "rule", "why"), values, strict=True)))
    return found


def _placement(assigned: Assigned) -> Table:
    rows = [["-" if value is None else str(value) for value in one.values()] for one in _explained(assigned)]
    return Table("Placement", ("node", "op", ">stream", "device", "rule", "why"), rows, whole=True)


def conflict_warnings(conflicts: Sequence[Conflict]) -> list[str]:
    """Functions that several call sites use with different ids."""
    shown = [str(conflict) for conflict in conflicts[:5]]
    if len(conflicts) > len(shown):
        shown.append(f"and {len(conflicts) - len(shown)} more nodes of functions whose call sites want different ids")
    return shown


def explain(assigned: Assigned, name: str) -> Document:
    """Explains why one node is on its stream.

    Raises:
        MsplitError: The graph has no such node.
    """
    flat = assigned.flat
    node = flat.graph.index.get(name)
    if node is None:
        near = difflib.get_close_matches(name, flat.graph.names[:100_000], 3)
        raise MsplitError(
            f"the graph has no node {name!r}",
            where=str(flat.model.source),
            fix=f"did you mean {', '.join(near)}?" if near else "`msplit analyze --show nodes` lists them",
        )
    found = explanation(assigned, name, Outputs())
    facts = [
        ("op", found["op"]),
        ("stream", "none: a host node" if found["host"] else str(found["stream"])),
        ("decided by", found["rule"]),
        ("why", found["why"]),
        ("cost", micros(found["time_us"]) + ("" if found["known"] else ", a guess")),
        *([("function", found["function"])] if found["function"] else []),
        *([("region", f"{region.kind} {region.name}")] if (region := found["region"]) is not None else []),
    ]
    sides = {"Inputs": flat.graph.predecessors(node), "Consumers": flat.graph.successors(node)}
    return Document(name, facts, [_neighbours(title, assigned, nodes) for title, nodes in sides.items()])


def _decided(assigned: Assigned, node: int) -> tuple[str, str]:
    return assigned.outcome.assignment.why(node) or ("default", "no rule claimed it")


def _neighbours(title: str, assigned: Assigned, nodes: Any) -> Table:
    flat = assigned.flat
    unique = list(dict.fromkeys(int(node) for node in nodes))[:20]
    rows = [(flat.graph.names[n], flat.graph.ops[n], "host" if flat.host[n] else str(assigned.ids[n])) for n in unique]
    return Table(title, ("node", "op", ">stream"), rows, whole=True)


def explanation(assigned: Assigned, name: str, outputs: Outputs) -> dict[str, Any]:
    """Explanation for JSON. The node is in the graph: `explain` was asked before."""
    flat = assigned.flat
    node = flat.graph.index[name]
    rule, why = _decided(assigned, node)
    function, original = flat.origin(node)
    region = int(flat.region[node])
    return {
        "model": flat.model.source,
        "node": name,
        "op": flat.graph.ops[node],
        "host": bool(flat.host[node]),
        "stream": None if flat.host[node] else int(assigned.ids[node]),
        "rule": rule,
        "why": why,
        "time_us": float(assigned.costs.time_us[node]),
        "known": bool(assigned.costs.known[node]),
        "function": function,
        "original": original,
        "region": flat.regions[region] if region >= 0 else None,
        **picked(outputs, "written notes"),
    }


def payload(assigned: Assigned, outputs: Outputs, *, diff: bool = False, every: bool = False) -> dict[str, Any]:
    """The assignment for JSON."""
    flat, chosen = assigned.flat, assigned.kernels
    kernels = "kernels=planned.kernels algorithm streams=planned.streams groups=planned.groups predicted_us"
    result: dict[str, Any] = {
        "model": flat.model.source,
        "rules": {"source": assigned.ruleset.source, "rules": [rule.key for rule in assigned.ruleset.rules]},
        **picked(assigned, "costs=costs.source streams=outcome.streams loads"),
        "decided_by": claims(assigned),
        "cross_stream": picked(assigned, "edges=cross_edges bytes=cross_bytes unknown=cross_unknown"),
        "waits": picked(assigned.plan, "minimal=waits edges once_per_stream=merged_waits records"),
        "kernels": chosen and picked(chosen, kernels, "plain_on_one_stream_us=one_us plain_on_streams_us=streams_us"),
        "judgement": assigned.judgement if _simulated(assigned) else None,
        "unassigned": assigned.unassigned,
        "changed": len(assigned.changed),
        "remarks": assigned.outcome.remarks,
        **picked(outputs, "written notes warnings"),
    }
    if every:
        result["placement"] = _explained(assigned)
    if diff:
        before = present_ids(flat)
        result["diff"] = [
            {"name": flat.graph.names[node], "was": int(before[node]), "is": int(assigned.ids[node])}
            for node in assigned.changed.tolist()
        ]
    return result


_MARK = " ←"


def candidates_document(found: Compared, written: Sequence[str] = ()) -> Document:
    """A table of them, what was skipped and why, and which `auto` takes."""
    tried = [row for row in found.rows if row.skipped is None]
    note = "predicted: simulated; gain: over one stream"
    if _measured(tried):
        note += "; memory: of values at their highest, over one stream's"
    tables = [_table("Candidates", tried, note, found.auto)]
    if found.kernels:
        note = "over the kernels that run, each way on its best streams; gain: over plain kernels on one stream"
        tables.append(_table("Kernels", found.kernels, note))
    skipped = [f"{row.name} was skipped: {row.skipped}." for row in found.rows if row.skipped is not None]
    return Document(
        title=heading(found.flat.model.source, found.flat.model.format),
        facts=_facts(found),
        tables=tables,
        notes=[
            *skipped,
            *_verdict(found, tried),
            *_of_kernels(found),
            *(written or ["Nothing was written: --compare only compares."]),
        ],
    )


def _facts(found: Compared) -> list[tuple[str, str]]:
    one = found.rows[0].predicted_us
    most = f", {ratio(one / found.bound_us)} at most" if found.bound_us > 0 else ""
    return [
        ("streams", f"{found.streams} at most"),
        ("costs", found.costs.gpu if found.costs.source == "static" else found.costs.source),
        ("one stream", f"{micros(one)}, simulated"),
        ("lower bound", f"{micros(found.bound_us)}{most}"),
        ("measured", f"on {found.device}" if found.device else f"no: {found.why_not}"),
    ]


def _measured(rows: Sequence[Row]) -> bool:
    return any(row.measured_us is not None for row in rows)


def _table(title: str, rows: Sequence[Row], note: str, auto: str = "") -> Table:
    measured = _measured(rows)
    columns = ["", ">streams", ">waits", ">predicted", ">gain"]
    if measured:
        columns += [">measured", ">gain", ">memory"]
    return Table(title, columns, [_cells(row, auto, measured) for row in rows], note)


def _cells(row: Row, auto: str, measured: bool) -> tuple[str, ...]:
    cells = [
        row.name + (_MARK if row.name == auto else ""),
        str(row.streams),
        str(row.waits),
        micros(row.predicted_us),
        f"{row.predicted_gain:.2f}",
    ]
    if measured:
        cells += [
            "-" if row.measured_us is None else micros(row.measured_us),
            "1.00" if row.gain is None else f"{row.gain.value:.2f}",
            "-" if row.memory is None else f"{row.memory:.2f}",
        ]
    return tuple(cells)


def _of_kernels(found: Compared) -> list[str]:
    if not found.kernels:
        return [f"Larger kernels are left out: {found.no_kernels}."]
    lines = []
    if found.same:
        lines.append(f"The same as simpler kernels, and left out: {', '.join(found.same)}.")
    top = min(found.kernels, key=lambda row: row.predicted_us)
    if top is not found.kernels[0]:
        lines.append(
            f"With larger kernels, '{top.name}' is predicted to take {micros(top.predicted_us)}: "
            "`msplit bench --rules auto` runs what is best of these."
        )
    return lines


def _verdict(found: Compared, tried: Sequence[Row]) -> list[str]:
    auto = next(row for row in tried if row.name == found.auto)
    lines = [
        f"The rule `auto` takes '{auto.name}' ({_MARK.strip()}): {micros(auto.predicted_us)} on {plural(auto.streams, 'stream')}."
    ]
    quickest = min(row.predicted_us for row in tried if not row.name.startswith("rules "))
    if micros(quickest) != micros(auto.predicted_us):
        lines.append(
            "What is predicted to be faster gains less than 1 %, or has less room to spare: ways are compared by their mean when "
            "kernels take a tenth more or less."
        )
    gains = [row for row in tried if row.gain is not None]
    if gains:
        top = max(gains, key=lambda row: row.gain.value if row.gain else 0.0)
        assert top.gain is not None
        if top.gain.value <= 1:
            lines.append("Measured, none is faster than one stream.")
        elif top.name != auto.name:
            lines.append(f"Measured, '{top.name}' is the fastest: {top.gain.value:.2f} times one stream.")
        lines.append("`msplit tune` starts from the best of them and searches on.")
    return lines


def candidates_payload(found: Compared, written: Sequence[str] = ()) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        **picked(
            found, "model=flat.model.source streams costs=costs.source gpu=costs.gpu bound_us auto measured_on=device?"
        ),
        "not_measured": found.why_not or None,
        "candidates": [_row(row) for row in found.rows],
        "kernels": [_row(row) for row in found.kernels],
        "no_kernels": found.no_kernels or None,
        "written": written,
    }


def _row(row: Row) -> dict[str, Any]:
    found = picked(
        row, "name streams waits predicted_us predicted_gain measured_us gain memory memory_ratio=memory skipped"
    )
    return found | dict.fromkeys(("predicted_us", "predicted_gain") if row.skipped else ())
