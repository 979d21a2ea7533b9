"""Checks of an annotated model: one file per code, each a pure function with its page."""

from msplit.checks.finding import CheckSettings, Finding, Severity, Thresholds
from msplit.checks.run import CHECKS, Report, Reported, check, examine, lookup
from msplit.checks.subject import Check, Subject

__all__ = [
    "CHECKS",
    "Check",
    "CheckSettings",
    "Finding",
    "Report",
    "Reported",
    "Severity",
    "Subject",
    "Thresholds",
    "check",
    "examine",
    "lookup",
]
