"""A comparison of two models for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msplit.cost.gpus import gpu_title
from msplit.report.compare import ModelChanges, Move, NodeChange, Side
from msplit.report.document import Document, Name, Table, first
from msplit.report.jsonio import picked
from msplit.report.text import count, micros, more, plural, ratio

SHOWN = 30
"""Nodes and groups that a table lists unless more are asked for; JSON has all."""


def document(found: ModelChanges, limit: int | None = SHOWN, *, judged_with: str = "") -> Document:
    """The comparison for people.

    Args:
        found: Changes between the models.
        limit: Most rows of each table of nodes; None: all.
        judged_with: Source of the costs and of the reasons, in words; "" where that need not be told.
    """
    old, new = found.old, found.new
    title = f"{old.flat.model.path} → {new.flat.model.path}"
    if found.same:
        return Document(title, _facts(found), notes=("Nothing changed: the same nodes on the same streams.",))
    judged = (f"Judged with {judged_with}.",) if judged_with else ()
    tables = [_plan_table(old, new), _load_table(old, new)]
    if found.moved:
        tables += [_group_table(found, limit), _move_table(found, limit)]
    for entries, what in ((found.added, "added"), (found.removed, "removed"), (found.replaced, "with another op now")):
        if entries:
            tables.append(_node_table(entries, what, limit))
    return Document(title, _facts(found), tables, notes=(_conclusion(old, new), *judged), warnings=_warnings(found))


def _facts(found: ModelChanges) -> list[tuple[str, str]]:
    changed = f"{plural(len(found.moved), 'node')}, {micros(found.moved_us)} of kernels"
    return [
        ("nodes", f"{count(len(found.old.flat))} → {count(len(found.new.flat))}"),
        ("added", count(len(found.added))),
        ("removed", count(len(found.removed))),
        ("stream changed", changed if found.moved else "0"),
    ]


def _warnings(found: ModelChanges) -> list[str]:
    if len(found.added) < len(found.new.flat):
        return []
    return ["The two models have no node name in common, so there is nothing to compare."]


def _change(before: float, now: float, text: Callable[[Any], str], least: float = 0.0) -> tuple[str, str, str]:
    """Before, now and what changed by at least so much."""
    by = abs(now - before)
    changed = now != before and by >= least
    return text(before), text(now), f"{'+' if now > before else '-'}{text(by)}" if changed else "="


def _plan_table(old: Side, new: Side) -> Table:
    was, now = old.prediction, new.prediction
    rows = [
        ("streams in use", *_change(len(was.lanes), len(now.lanes), count)),
        ("edges cut", *_change(was.plan.edges, now.plan.edges, count)),
        ("waits", *_change(was.plan.waits, now.plan.waits, count)),
        ("predicted step", *_change(was.makespan_us, now.makespan_us, micros)),
        ("predicted on one stream", *_change(was.one_us, now.one_us, micros)),
        ("predicted gain", ratio(was.gain), ratio(now.gain), ""),
    ]
    return Table("The plan", ("", ">before", ">now", ">change"), rows, f"simulated on a {gpu_title(new.costs.gpu)}")


def _load_table(old: Side, new: Side) -> Table:
    before, now = old.prediction.load_us(), new.prediction.load_us()
    rows = [
        (str(stream), *_change(before.get(stream, 0.0), now.get(stream, 0.0), micros, 1e-9))
        for stream in sorted(before.keys() | now.keys())
    ]
    return Table("Cost per stream", (">stream", ">before", ">now", ">change"), rows)


def _group_table(found: ModelChanges, limit: int | None) -> Table:
    rows = []
    for (before, now, rule, why), moves in list(found.groups.items())[:limit]:
        reason = (f"{rule}: {why}",) if found.explained else ()
        total = micros(sum(move.time_us for move in moves))
        rows.append((f"{before} → {now}", count(len(moves)), total, *reason))
    columns = ("stream", ">nodes", ">cost", *(("why",) if found.explained else ()))
    note = more(len(found.groups) - len(rows), "--all", "group")
    return Table(
        "What moved", columns, rows, note or ("" if found.explained else "give --rules to see which rule moved them")
    )


def _move_table(found: ModelChanges, limit: int | None) -> Table:
    rule = ("rule",) if found.explained else ()

    def row(move: Move) -> tuple[str, ...]:
        told = (Name(move.name), move.op, f"{move.old} → {move.new}", micros(move.time_us))
        return (*told, move.rule) if found.explained else told

    columns = ("node", "op", "stream", ">cost", *rule)
    return first("Nodes whose stream changed", columns, found.moved, row, limit, "--all", "node")


def _node_table(entries: Sequence[NodeChange], what: str, limit: int | None) -> Table:
    def row(node: NodeChange) -> tuple[str, ...]:
        op = f"{node.was} → {node.op}" if node.was else node.op
        return Name(node.name), op, str(node.stream), micros(node.time_us)

    return first(f"Nodes {what}", ("node", "op", ">stream", ">cost"), entries, row, limit, "--all", "node")


def _conclusion(old: Side, new: Side) -> str:
    before, now = old.prediction.makespan_us, new.prediction.makespan_us
    change = now - before
    if abs(change) <= 0.005 * max(before, now):
        return f"The prediction stays at {micros(now)}."
    share = f" ({100 * abs(change) / before:.0f} %)" if before > 0 else ""
    return f"The prediction says {micros(abs(change))}{share} {'slower' if change > 0 else 'faster'}: {micros(before)} → {micros(now)}."


def payload(found: ModelChanges, *, judged_with: str = "") -> dict[str, Any]:
    """The comparison for JSON."""
    return {
        "old": _side(found.old),
        "new": _side(found.new),
        **picked(found, "same moved_us moved added removed replaced"),
        "judged_with": judged_with or None,
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        **picked(side.flat, "path=model.path"),
        "nodes": len(side.flat),
        "gpu": side.costs.gpu,
        **picked(side.prediction, "streams=lanes edges_cut=plan.edges waits=plan.waits"),
        "load_us": side.prediction.load_us(),
        **picked(side.prediction, "predicted_us=makespan_us predicted_one_stream_us=one_us predicted_gain=gain"),
    }
