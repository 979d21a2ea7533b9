"""What the functions of the library check of what they are given, before any work is done."""

from __future__ import annotations

import operator
from typing import Any

from msplit.errors import MsplitError

MAX_STREAMS = 1024
"""Most streams that anything may use; no GPU runs a tenth of them at once."""


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """A value, of any integer type, as an integer of at least `least` and at most `most`; `name` is what the caller calls it.

    Raises:
        MsplitError: It is no integer, or out of range.
    """
    limits = f"{least} or more" if most is None else f"{least} to {most}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise MsplitError(f"{name} is {value!r}, which is no integer", fix=f"give {limits}")
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        raise MsplitError(f"{name} is {number}", fix=f"give {limits}")
    return number


def number(name: str, value: Any, least: float = 0.0, *, above: bool = False) -> float:
    """A value as a finite number of at least `least`, or `above` that; `name` is what the caller calls it.

    Raises:
        MsplitError: It is none, not finite, or too small.
    """
    limits = f"{'more than' if above else 'at least'} {least:g}"
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = float("nan")
    if isinstance(value, bool | str) or not (least < found or (found == least and not above)) or found == float("inf"):
        raise MsplitError(f"{name} is {value!r}", fix=f"give a number, {limits}")
    return found
