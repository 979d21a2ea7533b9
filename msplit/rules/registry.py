"""The rules by their keys in YAML."""

from __future__ import annotations

from collections.abc import Callable

from msplit.rules.auto import Auto
from msplit.rules.base import Rule
from msplit.rules.branch import Branch
from msplit.rules.colocation import Colocation
from msplit.rules.embedding import Embedding
from msplit.rules.manual import Manual
from msplit.rules.options import RuleOptions
from msplit.rules.propagate import Propagate
from msplit.rules.regex import Regex

RULES: dict[str, Callable[[RuleOptions], Rule]] = {
    Manual.key: Manual.from_options,
    Regex.key: Regex.from_options,
    Embedding.key: Embedding.from_options,
    Branch.key: Branch.from_options,
    Colocation.key: Colocation.from_options,
    Propagate.key: Propagate.from_options,
    Auto.key: Auto.from_options,
}
"""Reads a rule's options, noting mistakes with `RuleOptions.problem`."""
