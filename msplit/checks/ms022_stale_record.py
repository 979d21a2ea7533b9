"""The record of the assignment is not this model's.

Finds: `msplit assign` leaves a record of the rules, the batch and whatever else it made the ids with: `assets.extra/msplit.json` in a
SavedModel, `MODEL.msplit.json` beside any other file. There is one, but the model has changed since it was written, or it is damaged.

Why: Without the record the model is checked with defaults in place of what its ids were made with, and ids that msplit wrote count as set
by hand. If the model itself was changed, its ids may be stale.

Example: A new export was written over `model.pb`, and `model.pb.msplit.json` is still that of the old one.

Mend: Run `msplit assign` again and commit what it writes, record included; or remove the record.
"""

from __future__ import annotations

from collections.abc import Iterator

from msplit.checks.subject import Check, Finding, Severity, Subject


def find(subject: Subject) -> Iterator[Finding]:
    """One finding."""
    problem = subject.flat.model.record_problem
    if problem is not None:
        yield Finding(
            f"there is a record of an assignment, and nothing goes by it: {problem}",
            "run `msplit assign` again, which writes it anew, or remove it",
        )


CHECK = Check.of(__name__, __doc__, Severity.WARNING, find)
