"""A rule or a pattern matches nothing.

Finds: A pattern of a `regex` rule or of a stream file matches no node, or only host nodes; or one of `shared` matches no input; or a
rule `embedding`, `branch` or `auto` of your own rules file claims no node. The shipped rule sets are made for many models and may have
idle rules.

Why: Most often a scope was renamed in the model and the pattern was not: the nodes run on another stream than somebody meant.

Example: `1:tower_a/.*` after `tower_a` became `user_tower`.

Mend: Correct the pattern (`msplit analyze MODEL --show nodes` lists the names), or remove it.
"""

from __future__ import annotations

from collections.abc import Iterator

from msplit.checks.subject import Check, Finding, Severity, Subject, place
from msplit.rules.base import NO_MATCH
from msplit.rules.regex import Regex
from msplit.rules.ruleset import RuleSet

CLAIMING = ("embedding", "branch", "auto")
"""Rules that look for something in the graph. Patterns are told one by one; the other rules depend on what these claim."""


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per pattern, and one per rule of the user's own file that claims no node."""
    outcome, ruleset = subject.applied, subject.ruleset
    assert ruleset is not None
    for remark in outcome.remarks:
        if remark.rule in (Regex.key, "shared") and remark.kind == NO_MATCH:
            file, line = place(remark.where)
            yield Finding(remark.text, "correct the pattern, or remove it", file=file, line=line)
    if shipped(ruleset):
        return
    busy = {rule for rule, _ in outcome.assignment.reasons}
    for rule in dict.fromkeys(rule.key for rule in ruleset.rules):
        if rule in CLAIMING and rule not in busy:
            yield Finding(
                f"the rule '{rule}' claims no node of this graph",
                "remove the rule, or put it before the rules that claim its nodes",
                file=ruleset.source,
            )


def shipped(ruleset: RuleSet) -> bool:
    """True if a rule set came with msplit: those are made for all models, and not each of their rules for each of them."""
    return ruleset.source.endswith("(shipped)")


CHECK = Check.of(__name__, __doc__, Severity.WARNING, find, needs=("rules",), depends="rules")
