"""Where a rule stands."""

from __future__ import annotations

import re

_PLACE = re.compile(r"(?P<file>.+):(?P<line>[0-9]+)", re.DOTALL)


def place(where: str | None) -> tuple[str | None, int | None]:
    """ "rules.yaml:12" as ("rules.yaml", 12); a place without a line number is no file."""
    match = _PLACE.fullmatch(where or "")
    return (match["file"], int(match["line"])) if match else (None, None)
