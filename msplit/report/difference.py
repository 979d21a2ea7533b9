"""Report of a comparison of two models, for people and for programs: streams of nodes, why, and what that does to the plan; and what else
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msplit.analysis.matching import WeightDifference
from msplit.assignment.analysis import ModelChanges, Move, NodeChange, Side
from msplit.assignment.changes import Aspect, ModelDifference, NodeDifference, ScopeChanges
from msplit.cost.gpus import gpu_title
from msplit.report.document import (
    Document,
    Name,
    Table,
    count,
    dimensions,
    first,
    micros,
    more,
    picked,
    plural,
    ratio,
    some,
)
from msplit.report.html.document import side_by_side

SHOWN = 30
"""Nodes and groups that a table lists unless more are asked for; JSON has all."""


UNCHANGED = "Nothing changed: the same nodes on the same streams."


def document(found: ModelChanges, limit: int | None = SHOWN, *, judged_with: str = "") -> Document:
    """The comparison for people.

    Args:
        found: Changes between the models.
        limit: Most rows of each table of nodes; None: all.
        judged_with: Source of the costs and of the reasons, in words; "" where that need not be told.
    """
    old, new = found.old, found.new
    title = f"{old.flat.model.source} → {new.flat.model.source}"
    if found.same:
        return Document(title, _facts(found), notes=(UNCHANGED,))
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


def payload(found: ModelChanges, made: ModelDifference | None = None, *, judged_with: str = "") -> dict[str, Any]:
    """The comparison for JSON: of streams, and what else changed where that was looked at."""
    return {
        "old": _side(found.old),
        "new": _side(found.new),
        **picked(found, "same moved_us moved added removed replaced"),
        "judged_with": judged_with or None,
        **({} if made is None else {"structure": {"same": made.same, **vars(made)}}),
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        **picked(side.flat, "path=model.source"),
        "nodes": len(side.flat),
        "gpu": side.costs.gpu,
        **picked(side.prediction, "streams=lanes edges_cut=plan.edges waits=plan.waits"),
        "load_us": side.prediction.load_us(),
        **picked(side.prediction, "predicted_us=makespan_us predicted_one_stream_us=one_us predicted_gain=gain"),
    }


def with_structure(found: Document, made: ModelDifference, limit: int | None = SHOWN) -> Document:
    """The report, and behind it what else changed; itself where nothing did."""
    if made.same and not made.renamed:
        return replace(found, warnings=[*found.warnings, *made.not_compared])
    scopes = ("scope", ">added", ">removed", ">changed", ">cost before", ">now")
    renamed = [(Name(old), Name(new), count(nodes)) for old, new, nodes in made.renamed]
    tables = [
        first("What changed in the graph, by scope", scopes, made.scopes, _scope_row, limit, "--all", "scope"),
        first("Renamed", ("before", "now", ">nodes"), renamed, tuple, limit, "--all"),
        first(
            "Changes of the graph", ("node", "what", "before", "now"), _changes(made), tuple, limit, "--all", "change"
        ),
    ]
    notes = found.notes if made.same else [note for note in found.notes if note != UNCHANGED]
    return replace(
        found,
        tables=[*found.tables, *(table for table in tables if table.rows)],
        notes=[*notes, *_sentences(made)],
        warnings=[*found.warnings, *made.not_compared],
    )


def _scope_row(one: ScopeChanges) -> Sequence[str]:
    numbers = map(count, (one.added, one.removed, one.changed))
    return Name(one.scope), *numbers, micros(one.old_us), micros(one.new_us)


def _changes(made: ModelDifference) -> list[Sequence[str]]:
    """A row for everything that is not the same: node, what it is, before, now."""
    rows: list[Sequence[str]] = [("", aspect.what, *_both(aspect)) for aspect in made.ends]
    rows += [(Name(_where(node)), "removed", node.op, "") for node in made.removed]
    rows += [(Name(_where(node)), "added", "", node.op) for node in made.added]
    return rows + [(Name(_where(node)), *row) for node in made.changed for row in _rows(node)]


def _where(node: NodeDifference) -> str:
    return f"{node.function}/{node.name}" if node.function else node.name


def _rows(node: NodeDifference) -> list[tuple[str, str, str]]:
    rows = [(aspect.what, *_both(aspect)) for aspect in node.aspects]
    if node.weights is not None and (node.weights.elements or not rows):
        rows.append(("value", "", distance(node.weights)))
    return rows


def _both(aspect: Aspect) -> tuple[str, str]:
    if aspect.what.startswith("shape"):
        return dimensions(aspect.old), dimensions(aspect.new)
    texts = ("" if value is None else str(value) for value in (aspect.old, aspect.new))
    old, new = (Name(text) if "/" in text else text for text in texts)
    return old, new


def distance(found: WeightDifference) -> str:
    """The distance of two values in words."""
    if not found.elements:
        return "another type or shape"
    told = f"{count(found.differing)} of {plural(found.elements, 'element')}"
    return f"{told}, by {found.largest:.3g} at most, relative {found.relative:.3g}" if found.largest else told


def _sentences(made: ModelDifference) -> list[str]:
    said = ["But for names, the graphs are the same." if made.same else "The graphs are not the same."]
    for what, (old, new) in (("work", made.work_us), ("critical path", made.critical_path_us)):
        if micros(old) != micros(new):
            said.append(f"The {what} was {micros(old)} and is {micros(new)}.")
    if made.joined and not made.same:
        said.append(f"On the critical path now, and not before: {some(made.joined, 5)}.")
    return said


_MOST_ROWS = 5_000
"""Rows of the HTML file; JSON has all."""


def page(found: Document, made: ModelDifference) -> str:
    """One HTML file with both models side by side, as far as they are not the same."""
    rows: list[tuple[str, str, Sequence[str], Sequence[str]]] = []
    for kind, nodes in (("changed", made.changed), ("removed", made.removed), ("added", made.added)):
        for node in nodes:
            before = next((str(aspect.old) for aspect in node.aspects if aspect.what == "op"), node.op)
            sides = [node.was, before, micros(node.old_us)], [_where(node), node.op, micros(node.new_us)]
            for what, *both in _rows(node):
                for side, value in zip(sides, both, strict=True):
                    side.append(f"{what}: {value}")
            old, new = ((), sides[1]) if kind == "added" else (sides[0], () if kind == "removed" else sides[1])
            rows.append((_where(node).rpartition("/")[0], kind, old, new))
    rows.sort(key=lambda row: (row[0], (row[3] or row[2])[0]))
    rows += [("renamed", "renamed", [old], [new, plural(number, "node")]) for old, new, number in made.renamed]
    return side_by_side(found, rows[:_MOST_ROWS], more(len(rows) - _MOST_ROWS, "--format json has all", "row"))
