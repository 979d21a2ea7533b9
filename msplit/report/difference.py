"""Comparison of two models: what changed between them, and its report.

A comparison of two models for people and for programs.

Changes between two annotated models: streams of nodes, why, and what that does to the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from msplit import rules
from msplit.assignment.assignment import present_ids
from msplit.core.graph import no_collection
from msplit.cost.costs import Costs
from msplit.cost.gpus import gpu_title
from msplit.flatten.flat import FlatGraph, among
from msplit.report.document import Document, Name, Table, count, first, micros, more, picked, plural, ratio
from msplit.rules.ruleset import RuleSet
from msplit.schedule.judge import Prediction, predict


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two models, and its simulated run with the ids that the file holds."""

    flat: FlatGraph
    costs: Costs
    prediction: Prediction

    @staticmethod
    def of(flat: FlatGraph, costs: Costs) -> Side:
        """Reads the ids of a model and simulates it.

        Raises:
            AssignError: A node has an id that is none.
        """
        return Side(flat, costs, predict(flat, costs, present_ids(flat, least=0)))


@dataclass(frozen=True)
class Move:
    """A node that is in both models, on different streams.

    Attributes:
        old: Stream id before.
        new: Stream id now.
        time_us: Time of its kernel in the new model.
        rule: Key of the rule that gives it the new id, for the reason `why`; "" if no rules were given, "graph" if none of them does.
    """

    name: str
    op: str
    old: int
    new: int
    time_us: float
    rule: str = ""
    why: str = ""


@dataclass(frozen=True)
class NodeChange:
    """A node that is in only one of the models, or that is in both and had another op, `was`, before."""

    name: str
    op: str
    stream: int
    time_us: float
    was: str = ""


Entry = TypeVar("Entry", Move, NodeChange)


@dataclass(frozen=True, eq=False)
class ModelChanges:
    """Changes between two models.

    Attributes:
        moved: Nodes of both on different streams, the costliest first.
        added: Nodes that only the new one has, likewise.
        removed: Nodes that only the old one has, likewise.
        replaced: Nodes that have another op now, likewise.
        explained: True if rules were given, so that `Move.rule` means something.
    """

    old: Side
    new: Side
    moved: tuple[Move, ...]
    added: tuple[NodeChange, ...]
    removed: tuple[NodeChange, ...]
    replaced: tuple[NodeChange, ...]
    explained: bool

    @property
    def same(self) -> bool:
        """True if nothing changed."""
        return not (self.moved or self.added or self.removed or self.replaced)

    @cached_property
    def moved_us(self) -> float:
        """Time of the kernels that changed their stream."""
        return sum(move.time_us for move in self.moved)

    @cached_property
    def groups(self) -> Mapping[tuple[int, int, str, str], Sequence[Move]]:
        """Moves by (old stream, new stream, rule, why); the costliest group first."""
        found: dict[tuple[int, int, str, str], list[Move]] = {}
        for move in self.moved:
            found.setdefault((move.old, move.new, move.rule, move.why), []).append(move)
        order = sorted(found, key=lambda key: (-sum(move.time_us for move in found[key]), -len(found[key]), key))
        return {key: found[key] for key in order}


@no_collection()
def compare(old: Side, new: Side, ruleset: RuleSet | None = None) -> ModelChanges:
    """Matches the nodes of two models by name and compares their streams.

    Rules are applied to the new model without looking at the ids there. Where they give a node the id that it has, their reason is
    the explanation.

    Raises:
        AssignError: The rules contradict each other on the new model.
    """
    reason = _reasons(new, ruleset)
    index = old.flat.graph.index
    moved, added, replaced, seen = [], [], [], np.zeros(len(old.flat), np.bool_)
    for node, name in enumerate(new.flat.graph.names):
        before = index.get(name)
        if before is None:
            added.append(_node(new, node))
            continue
        seen[before] = True
        was = old.flat.graph.ops[before]
        if was != new.flat.graph.ops[node]:
            replaced.append(replace(_node(new, node), was=was))
        ids = int(old.prediction.ids[before]), int(new.prediction.ids[node])
        if ids[0] != ids[1]:
            time = float(new.prediction.kernel_us[node])
            moved.append(Move(name, new.flat.graph.ops[node], *ids, time, *reason(node)))
    removed = [_node(old, node) for node in np.flatnonzero(~seen).tolist()]
    return ModelChanges(
        old, new, _costly(moved), _costly(added), _costly(removed), _costly(replaced), explained=ruleset is not None
    )


def by_rules(flat: FlatGraph, costs: Costs, ruleset: RuleSet, streams: int | None = None) -> rules.RulesResult:
    """Assigns by rules alone, whatever ids the file holds: those came from rules, and as claims of `manual` they would explain themselves.

    The record knows others, which were set by hand.
    """
    record = flat.model.record
    by_hand = among(flat, {} if record is None else record.by_hand)
    return rules.assign(flat, costs, ruleset, streams=streams, by_hand=by_hand)


def _reasons(side: Side, ruleset: RuleSet | None) -> Callable[[int], tuple[str, str]]:
    """Function that gives (rule, reason) of the id that a node of the new model has."""
    if ruleset is None:
        return lambda _: ("", "")
    outcome = by_rules(side.flat, side.costs, ruleset)

    def reason(node: int) -> tuple[str, str]:
        given = int(outcome.ids[node])
        if given != side.prediction.ids[node]:
            return "graph", f"the id is on the graph; the rules alone give {given}"
        return outcome.assignment.why(node) or ("default", "no rule claims it")

    return reason


def _node(side: Side, node: int) -> NodeChange:
    graph = side.flat.graph
    return NodeChange(
        graph.names[node], graph.ops[node], int(side.prediction.ids[node]), float(side.prediction.kernel_us[node])
    )


def _costly(entries: list[Entry]) -> tuple[Entry, ...]:
    return tuple(sorted(entries, key=lambda entry: -entry.time_us))


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
