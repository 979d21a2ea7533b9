"""What a check finds, and how bad it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
