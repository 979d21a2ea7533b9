"""Rules: one file per rule; a rule is a frozen dataclass whose fields are its YAML options."""

from msplit.rules.base import Context, Remark, Rule
from msplit.rules.ruleset import STANDARD, RuleSet, available, load, parse, text_of
from msplit.rules.run import Outcome, assign

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
