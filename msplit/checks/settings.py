"""What a project wants of the checks: which, how severe, which limits. Read from msplit.yaml or pyproject.toml by `config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msplit.checks.finding import Severity
from msplit.core.arguments import MAX_STREAMS, whole
from msplit.schedule.judge import MUCH, WORTH


@dataclass(frozen=True)
class Limits:
    """Thresholds.

    Attributes:
        min_gain: MS015: predicted speed-up over one stream, at least.
        max_imbalance: MS012: time of the busiest stream over the best that could be (an equal share, or the critical path), at most.
        max_cross_edges: MS013: tensors that cross streams, at most; None for any number.
        max_cross_bytes: MS013: bytes that cross streams, at most; None for any number.
        max_cross_share: MS013: share of the dependencies between kernels that cross streams, at most.
        max_unknown: MS016: share of the kernels with unknown shapes, at most.
    """

    min_gain: float = WORTH
    max_imbalance: float = 2.0
    max_cross_edges: int | None = None
    max_cross_bytes: int | None = None
    max_cross_share: float = 0.5
    max_unknown: float = MUCH


@dataclass(frozen=True)
class CheckSettings:
    """Everything that a configuration file can say.

    Attributes:
        select: Codes to run, or beginnings of codes; empty: all.
        ignore: Codes not to run, likewise. It wins over `select`.
        severity: Code -> severity, in place of the check's own.
        fail_on: Findings of this severity, or worse, make the exit code 1.
        streams: Ids are 0..streams-1; None: as the rules or the plan say.
        fork_streams: How many streams the fork that runs the graph is started with; None: as many as there are ids.
        hand_set: Patterns of the names of nodes whose ids come from the model's code: applying the rules again keeps these.
        rules: Rules file or name of a shipped rule set.
        batch: Size of unknown leading dimensions.
        gpu: Data sheet that prices the nodes.
        shapes: Whole shapes by input name.
        baseline: Findings that are known, a file.
        profile: Profile that prices the nodes in place of the data sheet, a file.
        source: The file that this comes from, None for the defaults.
        origin: "rules", "batch" and so on -> who says so, where that is not the file.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    severity: Mapping[str, Severity] = field(default_factory=dict)
    fail_on: Severity = Severity.ERROR
    streams: int | None = None
    fork_streams: int | None = None
    hand_set: tuple[str, ...] = ()
    rules: str | None = None
    plan: str | None = None
    batch: int | None = None
    gpu: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    baseline: str | None = None
    profile: str | None = None
    limits: Limits = field(default_factory=Limits)
    source: str | None = None
    origin: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, most in (("streams", MAX_STREAMS), ("fork_streams", MAX_STREAMS), ("batch", None)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1, most)
