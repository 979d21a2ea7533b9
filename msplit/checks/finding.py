"""Findings of checks, their severities, and the pieces of their sentences.

What a project wants of the checks: which, how severe, which limits. Read from msplit.yaml or pyproject.toml by `config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from msplit.core.arguments import MAX_STREAMS, whole
from msplit.schedule.choose import MUCH, WORTH

NODES_SHOWN = 20
"""Most nodes that a finding names; it counts all of them."""


class Severity(StrEnum):
    """Severity of a finding."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


class Skip(Exception):
    """Raised by a check that can not say anything here. The message is the reason, as half a sentence."""


@dataclass(frozen=True)
class Finding:
    """Something that a check found. Its code and severity come from the check and the settings.

    Attributes:
        text: What is wrong, one sentence.
        fix: How to mend it, one sentence.
        nodes: Nodes that it is about, the first `NODES_SHOWN` of them.
        count: How many nodes it is about.
        file: File that it is about, None for the model itself.
        line: Line in that file, from 1.
        depends: What it depends on beside the model, if that is not what all findings of its check depend on; see `Check.depends`.
    """

    text: str
    fix: str
    nodes: tuple[str, ...] = ()
    count: int = 0
    file: str | None = None
    line: int | None = None
    depends: str | None = None


def about(
    names: Sequence[str],
    what: str,
    fix: str,
    *,
    count: int | None = None,
    file: str | None = None,
    depends: str | None = None,
) -> Finding:
    """A finding whose sentence begins with its nodes: "node 'a'" or "12 nodes (such as 'a')", and then `what`.

    Where `names` are only the first of them, `count` says how many there are.
    """
    count = len(names) if count is None else count
    return Finding(f"{nodes(names, count)} {what}", fix, tuple(names[:NODES_SHOWN]), count, file, depends=depends)


def nodes(names: Sequence[str], count: int) -> str:
    """ "node 'a'", "nodes 'a' and 'b'", "12 nodes (such as 'a')": the subject of a sentence."""
    if count == 1:
        return f"node '{names[0]}'"
    if count == 2 and len(names) > 1:
        return f"nodes '{names[0]}' and '{names[1]}'"
    return f"{count:,} nodes (such as '{names[0]}')"


def verb(count: int, one: str, many: str) -> str:
    """The form of a verb that fits a number."""
    return one if count == 1 else many


def listed(numbers: Sequence[int], most: int = 8) -> str:
    """ "1", "1 and 2", "1, 2, 3 and 9 more"."""
    if len(numbers) > most:
        return f"{', '.join(map(str, numbers[:most]))} and {len(numbers) - most} more"
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


_PLACE = re.compile(r"(?P<file>.+):(?P<line>[0-9]+)", re.DOTALL)


def place(where: str | None) -> tuple[str | None, int | None]:
    """ "rules.yaml:12" as ("rules.yaml", 12); a place without a line number is no file."""
    match = _PLACE.fullmatch(where or "")
    return (match["file"], int(match["line"])) if match else (None, None)


@dataclass(frozen=True)
class Thresholds:
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
    limits: Thresholds = field(default_factory=Thresholds)
    source: str | None = None
    origin: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, most in (("streams", MAX_STREAMS), ("fork_streams", MAX_STREAMS), ("batch", None)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1, most)
