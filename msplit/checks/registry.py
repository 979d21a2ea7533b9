"""The checks by their codes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from msplit.checks.subject import Check
from msplit.errors import MsplitError

_FOUND: list[Check] = [
    import_module(f"msplit.checks.{name}").CHECK
    for name in sorted(module.name for module in iter_modules([str(Path(__file__).parent)]))
    if re.match(r"ms[0-9]{3}_", name)
]

CHECKS: dict[str, Check] = {check.code: check for check in _FOUND}
"""Code -> check, ascending: that of every file that is called like one."""


def chosen(select: Sequence[str], ignore: Sequence[str]) -> tuple[Check, ...]:
    """The checks whose codes, or their beginnings ("MS01"), are selected (none: all) and not ignored.

    Raises:
        MsplitError: An entry is the beginning of no code.
    """
    wanted = set(expand(select)) if select else set(CHECKS)
    wanted -= set(expand(ignore))
    return tuple(check for code, check in CHECKS.items() if code in wanted)


def expand(prefixes: Iterable[str]) -> list[str]:
    """The codes that begin with one of some prefixes.

    Raises:
        MsplitError: A prefix is the beginning of no code.
    """
    found = []
    for prefix in prefixes:
        codes = [code for code in CHECKS if prefix and code.startswith(prefix.upper())]
        if not codes:
            raise MsplitError(f"no check's code begins with {prefix!r}{near(prefix)}", fix=_known())
        found += codes
    return found


def lookup(code: str) -> Check:
    """The check of a code, or of a name such as ``id-out-of-range``.

    Raises:
        MsplitError: There is none.
    """
    for check in CHECKS.values():
        if code.upper() == check.code or code.lower() == check.name:
            return check
    raise MsplitError(f"there is no check {code!r}{near(code)}", fix=_known())


def near(word: str) -> str:
    """A hint at the code or the name that an unknown one may stand for, or nothing."""
    number = re.fullmatch(r"(?:ms)?0*([0-9]{1,3})", word.lower())
    code = f"MS{int(number[1]):03}" if number else ""
    names = [check.name for check in CHECKS.values()]
    found = [code] if code in CHECKS else difflib.get_close_matches(word.lower(), names, 1)
    return f"; did you mean {found[0]}?" if found else ""


def _known() -> str:
    return f"codes are {next(iter(CHECKS))} to {next(reversed(CHECKS))}; `msplit check --explain all` lists them"
