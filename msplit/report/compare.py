"""Changes between two annotated models: streams of nodes, why, and what that does to the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from msplit import formats, rules
from msplit.core.graph import Ints
from msplit.core.memory import no_collection
from msplit.cost.costs import Costs
from msplit.errors import AssignError
from msplit.flatten.flat import FlatGraph, among
from msplit.rules.ruleset import RuleSet
from msplit.schedule.judge import Prediction, predict

_MOST_ID = 2**31 - 1


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
        return Side(flat, costs, predict(flat, costs, annotated_ids(flat)))


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


def annotated_ids(flat: FlatGraph) -> Ints:
    """The stream ids that a model holds; 0 for a node without one.

    Raises:
        AssignError: One is not an integer, or out of range.
    """
    ids = np.zeros(len(flat), np.int32)
    for node in flat.graph.nodes_with(formats.STREAM_ID):
        value = flat.graph.attrs[node].get(formats.STREAM_ID)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_ID:
            raise AssignError(
                f"its `{formats.STREAM_ID}` is no stream id: {value!r}",
                where=f"node '{flat.graph.names[node]}'",
                fix="run `msplit check` to see all of these, and mend or remove them",
            )
        ids[node] = value
    return ids


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
