"""MS007: a variable and its users on several streams."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.analysis.colocation import groups
from msplit.checks.base import Check
from msplit.checks.finding import Finding, Severity
from msplit.checks.subject import Subject, splits
from msplit.checks.words import nodes
from msplit.rules.colocation import Colocation


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per ref variable, and one per group of handles with common users."""
    flat = subject.flat
    variable = np.asarray([region.kind == "variable" for region in flat.regions] + [False], np.bool_)
    for region, members, streams in splits(subject, np.where(variable[flat.region], flat.region, -1).astype(np.int32)):
        names, count = subject.names(members), len(members)
        yield Finding(
            f"{nodes(names, count)} read and write the ref variable '{flat.regions[region].name}', but are on {streams}",
            "give them one id, or let the rule `colocation` do so",
            names,
            count,
        )
    if _handles_may_part(subject):
        return
    for _, members, streams in splits(subject, groups(flat, classes=False, regions=False).of):
        names, count = subject.names(members), len(members)
        yield Finding(
            f"{nodes(names, count)} are a variable's handle and its users, but on {streams}",
            "give them one id, or let the rule `colocation` do so; `colocation: {handles: false}` in the rules allows it",
            names,
            count,
        )


def _handles_may_part(subject: Subject) -> bool:
    """Whether the rules say that users of a handle may be on several streams."""
    found = [rule for rule in subject.ruleset.rules if isinstance(rule, Colocation)] if subject.ruleset else []
    return bool(found) and not any(rule.handles for rule in found)


CHECK = Check(
    code="MS007",
    name="variable-split",
    severity=Severity.ERROR,
    title="A variable is split from its users",
    what="A ref variable (`VariableV2`) and what reads or writes it through the reference, or a variable's "
    "handle (`VarHandleOp`) and the nodes "
    "that take it, have different ids. Where the rules say `colocation: {handles: false}`, handles are not looked at.",
    why="A ref edge can not cross devices, and streams are devices in DeepRec and in stock TensorFlow. A handle "
    "can not cross them either. "
    "Writers on another stream than readers are ordered by the graph only (see MS010).",
    example="`VarHandleOp` w on stream 0, `ReadVariableOp` of w on stream 1.",
    mend="Put `- colocation` in the rules and assign again. If you run the graph with the cuda engine or "
    "NVIDIA's fork only, "
    "`colocation: {handles: false}` allows readers on several streams.",
    find=find,
)
