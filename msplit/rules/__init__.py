"""Rules: one file per rule; a rule is a frozen dataclass whose fields are its YAML options."""

from msplit.rules.base import Context, Remark, Rule
from msplit.rules.ruleset import STANDARD, Outcome, RuleSet, assign, available, load, parse, text_of

__all__ = [
    "STANDARD",
    "Context",
    "Outcome",
    "Remark",
    "Rule",
    "RuleSet",
    "assign",
    "available",
    "load",
    "parse",
    "text_of",
]
