"""Checks of an annotated model: one file per code, each a pure function with its page."""

from msplit.checks.run import CHECKS, Report, Reported, check, examine, lookup
from msplit.checks.subject import Check, CheckSettings, Finding, Severity, Subject, Thresholds

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
