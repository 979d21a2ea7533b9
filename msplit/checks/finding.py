"""What a check finds, how bad it is, and the pieces of its sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def about(
    names: Sequence[str],
    what: str,
    fix: str,
    *,
    count: int | None = None,
    file: str | None = None,
    depends: str | None = None,
) -> Finding:
    """A finding whose sentence begins with its nodes: "node 'a'" or "12 nodes (such as 'a')", and then `what`.

    Where `names` are only the first of them, `count` says how many there are.
    """
    count = len(names) if count is None else count
    return Finding(f"{nodes(names, count)} {what}", fix, tuple(names[:NODES_SHOWN]), count, file, depends=depends)


def nodes(names: Sequence[str], count: int) -> str:
    """ "node 'a'", "nodes 'a' and 'b'", "12 nodes (such as 'a')": the subject of a sentence."""
    if count == 1:
        return f"node '{names[0]}'"
    if count == 2 and len(names) > 1:
        return f"nodes '{names[0]}' and '{names[1]}'"
    return f"{count:,} nodes (such as '{names[0]}')"


def verb(count: int, one: str, many: str) -> str:
    """The form of a verb that fits a number."""
    return one if count == 1 else many


def listed(numbers: Sequence[int], most: int = 8) -> str:
    """ "1", "1 and 2", "1, 2, 3 and 9 more"."""
    if len(numbers) > most:
        return f"{', '.join(map(str, numbers[:most]))} and {len(numbers) - most} more"
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


_PLACE = re.compile(r"(?P<file>.+):(?P<line>[0-9]+)", re.DOTALL)


def place(where: str | None) -> tuple[str | None, int | None]:
    """ "rules.yaml:12" as ("rules.yaml", 12); a place without a line number is no file."""
    match = _PLACE.fullmatch(where or "")
    return (match["file"], int(match["line"])) if match else (None, None)
