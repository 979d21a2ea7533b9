"""Independent work in a model and what streams could gain; and a comparison of two models, of their streams by names of nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from msplit import rules
from msplit.analysis import inventory, isomorphic
from msplit.analysis.advice import Guesses, Suggestion, guesses, suggest
from msplit.analysis.branches import branches_of
from msplit.analysis.colocation import groups
from msplit.analysis.embeddings import columns
from msplit.analysis.inventory import Antichain, LevelWidth, level_width, max_antichain
from msplit.assignment.assignment import present_ids
from msplit.assignment.changes import ModelDifference, PricedModel, structure
from msplit.assignment.model import DisplayMixin, Facts, gain, opened, price
from msplit.core.graph import no_collection
from msplit.cost.costs import Costs
from msplit.cost.gpus import DEFAULT_GPU
from msplit.cost.profile import Profile, Workload
from msplit.flatten.flat import FlatGraph, among
from msplit.opset.traits import LOOPS
from msplit.progress import phase
from msplit.rules.ruleset import RuleSet
from msplit.schedule.choose import WORTH
from msplit.schedule.judge import Bounds, Judgement, Prediction, bounds, foresee, judge, predict, problem_of
from msplit.schedule.split import SplitJudgement, judge_split
from msplit.schedule.split_problem import SplitProblem
from msplit.shapes import Shapes

_LAUNCH_US = 10.0
"""Least that TensorFlow takes to launch a kernel. It was more in all rows of `benchmarks/README.md`: 5587 µs for the 81 of GoogLeNet, of
which the GPU works 421."""

GAIN_STREAMS = (2, 4, 8)
"""Stream counts that the gain is estimated for."""


@dataclass(frozen=True, eq=False, repr=False)
class Analysis(DisplayMixin):
    """Result of `analyze`. Times in µs, on the GPU that `costs` names.

    Attributes:
        ops: Nodes by op and placement.
        functions: Functions of the library.
        parameters: Constants and variables.
        tables: Embedding tables and what their lookups cost.
        group_sizes: Nodes in each colocation group.
        regions: Loops, conds and ref variables.
        level_width: Most kernels on one level.
        antichain: Largest set of kernels that are all independent of each other.
        bounds: Work, critical path, and what bounds every schedule.
        gains: Number of streams -> most they could gain over one.
        branches: Branches that matter, largest first.
        isomorphic_branches: And those that nearly are.
        suggestion: Which shipped rule set fits.
        guesses: Kernels whose shapes are not known, so that their cost is a guess.
    """

    flat: FlatGraph
    shapes: Shapes
    costs: Costs
    ops: tuple[inventory.OpCount, ...]
    functions: tuple[inventory.FunctionSize, ...]
    parameters: tuple[inventory.Parameter, ...]
    tables: tuple[inventory.TableUse, ...]
    group_sizes: tuple[int, ...]
    regions: tuple[inventory.RegionSize, ...]
    level_width: LevelWidth
    antichain: Antichain
    bounds: Bounds
    gains: Mapping[int, float]
    branches: tuple[inventory.BranchSize, ...]
    isomorphic_branches: isomorphic.IsomorphicBranches
    suggestion: Suggestion
    guesses: Guesses

    @property
    def kernels(self) -> int:
        """Nodes that launch a kernel."""
        return int(np.count_nonzero(self.costs.time_us > 0))

    def _facts(self) -> Facts:
        facts = [
            ("model", str(self.flat.model.source)),
            ("kernels", f"{self.kernels:,} of {len(self.flat):,} nodes"),
            ("work", f"{self.bounds.serial_us:,.1f} µs"),
            ("critical path", f"{self.bounds.critical_path_us:,.1f} µs"),
            ("gain at most", f"{self.bounds.max_gain:.2f}x"),
        ]
        return [*facts, ("predicted", gain(self.judgement))] if "judgement" in vars(self) else facts

    @cached_property
    def judgement(self) -> Judgement:
        """Judgement whether streams help, by the best assignment that the simulator finds. Worked out when first asked for: it takes about
        as long as the rest of the analysis."""
        with phase("simulating streams"), no_collection():
            gain, streams = foresee(self.flat, self.costs)
        return judge(self.bounds, gain, streams, guessed=self.guesses.share)

    @property
    def engine_words(self) -> str:
        """Sentence on what msplit's engine gives beside streams, one launch and larger kernels; "" where it can not run the model."""
        serial = self.bounds.serial_us
        if not self.kernels or not serial:
            return ""
        mean = serial / self.kernels
        words = "msplit's engine runs a step as one launch"
        if not LOOPS.isdisjoint(self.flat.graph.ops):
            words += ", the turns of its loops included."
        elif mean < _LAUNCH_US:
            words += f" in place of {self.kernels:,}, and gains most by that: "
            words += f"a kernel takes {mean:.1f} µs, less than TensorFlow to launch it."
        else:
            words += f" in place of {self.kernels:,}, which gains little: a kernel takes {mean:.1f} µs, as long as to launch it or longer."
        saved = sum(one.saved_us for one in self.isomorphic_branches.isomorphic) / serial
        if saved >= WORTH - 1:
            words += f" Alike branches run as larger kernels, which saves {100 * saved:.0f} % of the work."
        return words

    def on_gpus(self, gpus: int) -> SplitJudgement:
        """Judgement whether to split the model over so many GPUs of this kind, by the best way that the simulator finds."""
        with phase("simulating GPUs"), no_collection():
            split = SplitProblem.of(self.flat, self.costs, problem_of(self.flat, self.costs), gpus)
            return judge_split(split, self.costs.gpu)


def analyze(flat: FlatGraph | str | os.PathLike[str], workload: Workload) -> Analysis:
    """Analyzes a graph, from `load` or where the model is. Nothing of it is executed."""
    flat = opened(flat)
    sizes, costs = price(flat, workload)
    with phase("finding branches and embeddings"), no_collection():
        branches = branches_of(flat, costs)
        blocks = branches.blocks
        kernels = blocks.kernels
        isomorphic_branches = isomorphic.find(flat, sizes, blocks)
        found = columns(flat, costs)
    with phase("bounds"), no_collection():
        limits = bounds(flat, costs)
    return Analysis(
        flat=flat,
        shapes=sizes,
        costs=costs,
        ops=inventory.op_counts(flat, costs),
        functions=inventory.functions(flat.model),
        parameters=inventory.parameters(flat.graph),
        tables=inventory.table_uses(found),
        group_sizes=tuple(int(size) for size in inventory.group_sizes(groups(flat))),
        regions=inventory.regions(flat, costs),
        level_width=level_width(kernels),
        antichain=max_antichain(branches),
        bounds=limits,
        gains={streams: limits.gain_at_most(streams) for streams in GAIN_STREAMS},
        branches=inventory.branches_that_matter(branches),
        isomorphic_branches=isomorphic_branches,
        suggestion=suggest(flat, costs, found),
        guesses=guesses(flat, costs, sizes),
    )


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


def diff(
    old: FlatGraph | str | os.PathLike[str],
    new: FlatGraph | str | os.PathLike[str],
    *,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: str = DEFAULT_GPU,
    profile: Profile | None = None,
) -> ModelDifference:
    """Compares two models: what was added, removed, changed and renamed, and what that costs. Nothing of them is executed.

    Args:
        old: From `load`, or where the model is.
        new: The other one.
        batch: Size of unknown leading dimensions.
        shapes: Whole shapes by input name.
        gpu: Data sheet that prices the nodes.
        profile: What was measured on both graphs, in place of the data sheet.
    """
    workload = Workload(batch, shapes or {}, gpu=gpu, profile=profile)
    priced = [(flat, *price(flat, workload)) for flat in map(opened, (old, new))]
    with phase("comparing"):
        return structure(*(PricedModel(flat, sizes, costs.time_us) for flat, sizes, costs in priced))
