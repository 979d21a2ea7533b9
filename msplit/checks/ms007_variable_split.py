"""A variable is split from its users.

Finds: A ref variable (`VariableV2`) and what reads or writes it through the reference, or a variable's handle (`VarHandleOp`) and the nodes
that take it, have different ids. Where the rules say `colocation: {handles: false}`, handles are not looked at.

Why: A ref edge can not cross devices, and streams are devices in DeepRec and in stock TensorFlow. A handle can not cross them either.
Writers on another stream than readers are ordered by the graph only (see MS010).

Example: `VarHandleOp` w on stream 0, `ReadVariableOp` of w on stream 1.

Mend: Put `- colocation` in the rules and assign again. If you run the graph with the cuda engine or NVIDIA's fork only, `colocation:
{handles: false}` allows readers on several streams.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.analysis.colocation import groups
from msplit.checks.subject import Check, Finding, Severity, Subject, splits
from msplit.rules.colocation import Colocation


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per ref variable, and one per group of handles with common users."""
    flat = subject.flat
    variable = np.asarray([region.kind == "variable" for region in flat.regions] + [False], np.bool_)
    for region, members, streams in splits(subject, np.where(variable[flat.region], flat.region, -1).astype(np.int32)):
        what = f"read and write the ref variable '{flat.regions[region].name}', but are on {streams}"
        yield subject.about(members, what, "give them one id, or let the rule `colocation` do so")
    rules = subject.ruleset.rules if subject.ruleset else ()
    colocations = [rule for rule in rules if isinstance(rule, Colocation)]
    if colocations and not any(rule.handles for rule in colocations):
        return  # the rules say that users of a handle may be on several streams
    for _, members, streams in splits(subject, groups(flat, classes=False, regions=False, state=False).of):
        yield subject.about(
            members,
            f"are a variable's handle and its users, but on {streams}",
            "give them one id, or let the rule `colocation` do so; `colocation: {handles: false}` in the rules allows it",
        )


CHECK = Check.of(__name__, __doc__, Severity.ERROR, find)
