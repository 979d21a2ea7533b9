"""The report of `assign`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.api.assignment import Assigned, present_ids
from msplit.errors import MsplitError
from msplit.flatten.origin import Conflict
from msplit.report.document import Document, Table
from msplit.report.text import count, micros, percent, plural, shorten, size

_MOST_DIFF = 40
_MOST_REMARKS = 12


def document(assigned: Assigned, *, written: str = "", notes: Sequence[str] = (), diff: bool = False) -> Document:
    """Loads, cuts and waits of an assignment.

    Args:
        assigned: The assignment.
        written: What was written where, "" for a dry run.
        notes: What the writer says.
        diff: List the nodes whose id changes.
    """
    flat, plan = assigned.flat, assigned.plan
    work = sum(load.time_us for load in assigned.loads)
    used = [load for load in assigned.loads if load.nodes]
    empty = len(assigned.loads) - len(used)
    rows = [
        (str(load.stream), count(load.nodes), count(load.kernels), micros(load.time_us), percent(load.time_us, work))
        for load in used
    ]
    facts = [
        ("rules", f"{assigned.ruleset.source}: " + ", ".join(rule.key for rule in assigned.ruleset.rules)),
        ("streams", str(assigned.outcome.streams)),
        ("cross-stream edges", f"{count(assigned.cross_edges)}, {size(assigned.cross_bytes)}"),
        (
            "waits",
            f"{count(plan.waits)} (without reduction {count(plan.edges)}; once per source stream {count(plan.merged_waits)})",
        ),
        ("unassigned", f"{plural(assigned.unassigned, 'GPU node')} on the default stream {assigned.ruleset.default}"),
        ("host nodes", f"{count(int(flat.host.sum()))}, which have no stream"),
        ("changed", f"{plural(len(assigned.changed), 'node')} of the file"),
    ]
    tables = [
        Table(
            "Streams",
            (">stream", ">nodes", ">kernels", ">time", ">share"),
            rows,
            f"{plural(empty, 'stream')} not used" if empty else "",
        )
    ]
    if diff:
        tables.append(_diff(assigned))
    return Document(
        title=f"{flat.model.path} ({flat.model.format})",
        facts=facts,
        tables=tables,
        warnings=_warnings(assigned),
        notes=[*notes, *([written] if written else ["Nothing was written (no -o, or --dry-run)."])],
    )


def _warnings(assigned: Assigned) -> list[str]:
    remarks = [
        f"{f'{remark.where}: ' if remark.where else ''}{remark.rule}: {remark.text}"
        for remark in assigned.outcome.remarks
    ]
    left = remarks[_MOST_REMARKS:]
    return remarks[:_MOST_REMARKS] + ([f"and {len(left)} more remarks (--format json has them all)"] if left else [])


def _diff(assigned: Assigned) -> Table:
    before = present_ids(assigned.flat)
    names = assigned.flat.graph.names
    rows = []
    for node in assigned.changed[:_MOST_DIFF].tolist():
        rule = assigned.outcome.assignment.why(node)
        rows.append(
            (shorten(names[node], 52), str(before[node]), str(assigned.ids[node]), rule[0] if rule else "default")
        )
    left = len(assigned.changed) - len(rows)
    return Table(
        "Nodes whose stream changes", ("node", ">was", ">is", "rule"), rows, f"and {count(left)} more" if left else ""
    )


def conflict_notes(conflicts: Sequence[Conflict]) -> list[str]:
    """Functions that several call sites use with different ids."""
    shown = [f"warning: {conflict}" for conflict in conflicts[:5]]
    if len(conflicts) > len(shown):
        shown.append(
            f"warning: and {len(conflicts) - len(shown)} more nodes of functions whose call sites want different ids"
        )
    return shown


def explain(assigned: Assigned, name: str) -> Document:
    """Why one node is where it is.

    Raises:
        MsplitError: The graph has no such node.
    """
    flat = assigned.flat
    node = flat.graph.index.get(name)
    if node is None:
        import difflib

        near = difflib.get_close_matches(name, flat.graph.names[:100_000], 3)
        raise MsplitError(
            f"the graph has no node {name!r}",
            where=str(flat.model.path),
            fix=f"did you mean {', '.join(near)}?" if near else "`msplit analyze --show nodes` lists them",
        )
    rule, why = assigned.outcome.assignment.why(node) or ("default", "no rule claimed it")
    function, _ = flat.origin(node)
    region = int(flat.region[node])
    facts = [
        ("op", flat.graph.ops[node]),
        ("stream", "none: a host node" if flat.host[node] else str(assigned.ids[node])),
        ("decided by", rule),
        ("why", why),
        ("cost", micros(float(assigned.costs.time_us[node])) + ("" if assigned.costs.known[node] else ", a guess")),
    ]
    if function:
        facts.append(("function", function))
    if region >= 0:
        facts.append(("region", f"{flat.regions[region].kind} {flat.regions[region].name}"))
    return Document(
        title=name,
        facts=facts,
        tables=[
            Table("Inputs", ("node", "op", ">stream"), _neighbours(assigned, flat.graph.predecessors(node))),
            Table("Consumers", ("node", "op", ">stream"), _neighbours(assigned, flat.graph.successors(node))),
        ],
    )


def _neighbours(assigned: Assigned, nodes: Any) -> list[tuple[str, str, str]]:
    flat = assigned.flat
    unique = list(dict.fromkeys(int(node) for node in nodes))[:20]
    return [
        (shorten(flat.graph.names[n], 52), flat.graph.ops[n], "host" if flat.host[n] else str(assigned.ids[n]))
        for n in unique
    ]


def payload(assigned: Assigned, *, written: str = "", notes: Sequence[str] = ()) -> dict[str, Any]:
    """The assignment for JSON."""
    plan = assigned.plan
    return {
        "model": str(assigned.flat.model.path),
        "rules": {"source": assigned.ruleset.source, "rules": [rule.key for rule in assigned.ruleset.rules]},
        "streams": assigned.outcome.streams,
        "loads": list(assigned.loads),
        "cross_stream": {"edges": assigned.cross_edges, "bytes": assigned.cross_bytes},
        "waits": {
            "minimal": plan.waits,
            "edges": plan.edges,
            "once_per_stream": plan.merged_waits,
            "records": plan.records,
        },
        "unassigned": assigned.unassigned,
        "changed": len(assigned.changed),
        "remarks": list(assigned.outcome.remarks),
        "written": written or None,
        "notes": list(notes),
    }
