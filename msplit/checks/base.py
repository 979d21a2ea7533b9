"""What a check is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msplit.checks.finding import Finding, Severity
from msplit.checks.subject import Subject


@dataclass(frozen=True)
class Check:
    """One code.

    Attributes:
        code: "MS001" and so on. A code never changes its meaning and is never used again.
        name: The same in words, such as ``"id-out-of-range"``.
        severity: Unless the settings say otherwise.
        title: One line.
        what: What it finds.
        why: Why that matters.
        example: A small case, as text.
        mend: How to mend it.
        find: The check itself. Pure.
        needs: What must be given for it to say anything: "rules", "plan" or "against".
        limits: Fields of `Limits` that it obeys.
        depends: What its findings depend on beside the model: "rules" (and so on what they weigh), "costs", or "".
    """

    code: str
    name: str
    severity: Severity
    title: str
    what: str
    why: str
    example: str
    mend: str
    find: Callable[[Subject], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    depends: str = ""
