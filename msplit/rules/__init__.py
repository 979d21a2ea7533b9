"""Rules: one file per rule; a rule is a frozen dataclass whose fields are its YAML options."""

from msplit.rules.base import Remark as Remark
from msplit.rules.base import Rule as Rule
from msplit.rules.base import RuleContext as RuleContext
from msplit.rules.ruleset import STANDARD as STANDARD
from msplit.rules.ruleset import RuleSet as RuleSet
from msplit.rules.ruleset import RulesResult as RulesResult
from msplit.rules.ruleset import assign as assign
from msplit.rules.ruleset import available as available
from msplit.rules.ruleset import load as load
from msplit.rules.ruleset import parse as parse
from msplit.rules.ruleset import text_of as text_of
