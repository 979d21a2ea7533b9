"""Pieces of the sentences that findings are made of, and the places that they name."""

from __future__ import annotations

import re
from collections.abc import Sequence


def plural(number: int, noun: str) -> str:
    """ "1 node", "1,200 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
