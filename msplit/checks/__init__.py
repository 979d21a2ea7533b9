"""Checks of an annotated model: one file per code, each a pure function with its page."""

from msplit.checks.finding import Finding, Severity
from msplit.checks.registry import CHECKS, lookup
from msplit.checks.run import Report, Reported, check, examine
from msplit.checks.settings import CheckSettings, Limits
from msplit.checks.subject import Check, Subject

__all__ = [
    "CHECKS",
    "Check",
    "CheckSettings",
    "Finding",
    "Limits",
    "Report",
    "Reported",
    "Severity",
    "Subject",
    "check",
    "examine",
    "lookup",
]
