"""Rules: one file per rule; a rule is a frozen dataclass whose fields are its YAML options."""

from msplit.rules.base import Remark, Rule, RuleContext
from msplit.rules.ruleset import STANDARD, RuleSet, RulesResult, assign, available, load, parse, text_of

__all__ = [
    "STANDARD",
    "Remark",
    "Rule",
    "RuleContext",
    "RuleSet",
    "RulesResult",
    "assign",
    "available",
    "load",
    "parse",
    "text_of",
]
