"""Independent work in a model, and what streams could gain."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from msplit.analysis import inventory, isomorphic
from msplit.analysis.advice import Guesses, Suggestion, guesses, suggest
from msplit.analysis.branches import branches_of
from msplit.analysis.colocation import groups
from msplit.analysis.embeddings import columns
from msplit.analysis.inventory import Antichain, LevelWidth, level_width, max_antichain
from msplit.assignment.model import DisplayMixin, Facts, gain, opened, price
from msplit.core.graph import no_collection
from msplit.cost.costs import Costs
from msplit.cost.profile import Workload
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import LOOPS
from msplit.progress import phase
from msplit.schedule.choose import WORTH
from msplit.schedule.judge import Bounds, Judgement, bounds, foresee, judge, problem_of
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
            ("model", str(self.flat.model.path)),
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
