"""Checks of an annotated model: one file per code, each a pure function with its page."""

from msplit.checks.run import CHECKS as CHECKS
from msplit.checks.run import Report as Report
from msplit.checks.run import Reported as Reported
from msplit.checks.run import check as check
from msplit.checks.run import examine as examine
from msplit.checks.run import lookup as lookup
from msplit.checks.subject import Check as Check
from msplit.checks.subject import CheckSettings as CheckSettings
from msplit.checks.subject import Finding as Finding
from msplit.checks.subject import Severity as Severity
from msplit.checks.subject import Subject as Subject
from msplit.checks.subject import Thresholds as Thresholds
