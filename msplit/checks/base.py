"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msplit.checks.subject import Subject

NODES_SHOWN = 20
"""Most nodes that a finding names; it counts all of them."""


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


class Skip(Exception):
    """Raised by a check that can not say anything here. The message is the reason, as half a sentence."""


@dataclass(frozen=True)
class Finding:
    """Something that a check found. Its code and severity come from the check and the settings.

    Attributes:
        text: What is wrong, one sentence.
        fix: How to mend it, one sentence.
        nodes: Nodes that it is about, the first `NODES_SHOWN` of them.
        count: How many nodes it is about.
        file: File that it is about, None for the model itself.
        line: Line in that file, from 1.
        depends: What it depends on beside the model, if that is not what all findings of its check depend on; see `Check.depends`.
    """

    text: str
    fix: str
    nodes: tuple[str, ...] = ()
    count: int = 0
    file: str | None = None
    line: int | None = None
    depends: str | None = None


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
