"""The rule `device`: branches and embedding tables spread over GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from msplit.core.graph import Assignment
from msplit.errors import AssignError
from msplit.rules.auto import Auto, claim_ids
from msplit.rules.base import Remark, RuleContext, RuleOptions
from msplit.schedule.choose import best, choose
from msplit.schedule.split import judge_split
from msplit.schedule.split_problem import SplitProblem

MAX_GPUS = 64


@dataclass(frozen=True)
class Device:
    """Assigns everything to streams of several GPUs, by cost and memory. Stream ids are divided evenly, in order: of 8 streams on 2 GPUs,
    0 to 3 are the first GPU's.

    Ways to use several GPUs are simulated (`schedule.split`), copies between them included. One GPU is kept unless another way is
    faster, or the weights do not fit there.

    Attributes:
        gpus: How many there are.
        memory_gb: Memory of each, 10^9 bytes; 0: that of the data sheet.
        needed: Whether only a model that does not fit on one GPU is split.
    """

    key: ClassVar[str] = "device"
    settles: ClassVar[bool] = True
    """Nothing that comes later moves what it decides: see `Auto`."""
    gpus: int = 2
    memory_gb: float = 0.0
    needed: bool = False

    @classmethod
    def from_options(cls, options: RuleOptions) -> Device:
        """Read the options of the rule from YAML."""
        return cls(
            gpus=options.integer("gpus", cls.gpus, 1, MAX_GPUS),
            memory_gb=options.number("memory_gb", cls.memory_gb, 0.0),
            needed=options.flag("needed", cls.needed),
        )

    def apply(self, context: RuleContext, assignment: Assignment) -> tuple[Assignment, tuple[Remark, ...]]:
        """Claim every node but host nodes.

        Raises:
            AssignError: There are fewer streams than GPUs, or the weights do not fit.
        """
        problem = Auto().problem(context, assignment)
        if not len(problem):
            return assignment, (Remark(self.key, "no-gain", "no node launches a kernel"),)
        streams = self._streams_of_each(context)
        split = SplitProblem.of(context.flat, context.costs, problem, self.gpus, memory_gb=self.memory_gb)
        judged = judge_split(split, context.costs.gpu, streams=streams)
        if judged.kind == "too large":
            raise AssignError(judged.words, fix="give the rule `device` more `gpus`, or GPUs with more `memory_gb`")
        if judged.kind == "needed" or (judged.kind == "pays" and not self.needed):
            assert judged.best is not None
            return claim_ids(context, assignment, problem.spread(judged.best.lane), judged.words, self.key), (
                # What is predicted of streams elsewhere is of streams of one GPU.
                Remark(self.key, "split", f"streams are divided over {self.gpus} GPUs, {streams} each: {judged.words}"),
            )
        first = replace(problem, pin=np.where(problem.pin < streams, problem.pin, -1).astype(np.int32))
        lane = best(choose(first, streams)).stream
        placed = claim_ids(context, assignment, problem.spread(lane), judged.words, self.key)
        return placed, (Remark(self.key, "no-gain", f"all stays on the first GPU: {judged.words}"),)

    def _streams_of_each(self, context: RuleContext) -> int:
        if context.streams >= self.gpus and context.streams % self.gpus == 0:
            return context.streams // self.gpus
        raise AssignError(
            f"{context.streams} stream{'s' * (context.streams != 1)} can not be divided evenly over {self.gpus} GPUs",
            fix=f"pass --streams {self.gpus * max(context.streams // self.gpus, 1)}, or give the rule `device` other `gpus`",
        )
