"""Checks of the arguments of the library's functions, before any work is done.

How exactly a model is computed: one choice, from IEEE float32 to half precision.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import Any

from msplit.errors import MsplitError
from msplit.progress import during

MAX_STREAMS = 1024
"""Most streams that anything may use; no GPU runs a tenth of them at once."""


def _keyword(name: str, value: Any) -> str:
    return name if value is None else f"{name}={value!r}"


_SPELLING: ContextVar[Callable[[str, Any], str]] = ContextVar("spelling", default=_keyword)


def spelled(name: str, value: Any = None) -> str:
    """An option as the caller types it: a keyword of Python or, below `spelling`, what that says."""
    return _SPELLING.get()(name, value)


def spelling(how: Callable[[str, Any], str]) -> AbstractContextManager[object]:
    """Has messages name options in another interface than Python's."""
    return during(_SPELLING, how)


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """A value, of any integer type, as an integer of at least `least` and at most `most`; `name` is what the caller calls it.

    Raises:
        MsplitError: It is no integer, or out of range.
    """
    limits = f"{least} or more" if most is None else f"{least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise MsplitError(f"{name} is {value!r}, which is no integer", fix=f"give {limits}")
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


def listed(name: str, value: Any) -> tuple[Any, ...]:
    """The elements of a list, or of whatever else can be gone through and is no text; `name` is what the caller calls it.

    Raises:
        MsplitError: It is none.
    """
    try:
        found = None if isinstance(value, str | bytes | Mapping) else tuple(value)
    except TypeError:
        found = None
    if found is None:
        raise MsplitError(f"{name}: {value!r} is no list", fix="give a list, of one element where there is one")
    return found


def declared(name: str, value: Any, kind: str) -> None:
    """Refuses a value that is not of the kind its keyword is declared with: Python takes any text for true, or goes through its letters.

    Args:
        name: Name of the keyword.
        value: Value that it was given.
        kind: Its type, as in the source. Numbers are checked where their limits are known.

    Raises:
        MsplitError: It is none.
    """
    kind, *others = kind.split(" | ")
    if (value is None and str(None) in others) or set(others) - {str(None)}:
        return  # of several kinds, what takes the value looks at it
    if kind.startswith("Sequence["):
        listed(name, value)
    elif kind.startswith("Mapping[") and not isinstance(value, Mapping):
        raise MsplitError(f"{name}: {value!r} is no dictionary", fix="give a dictionary, by name")
    elif kind == "bool" and type(value).__name__ not in ("bool", "bool_"):  # NumPy's, too
        raise MsplitError(f"{name} is {value!r}", fix="give True or False")
    elif kind == "str" and not isinstance(value, str):
        raise MsplitError(f"{name}: {value!r} is no text", fix="give a str")


def path(value: Any) -> Path:
    """A path as it may be given.

    Raises:
        MsplitError: It is none.
    """
    if not isinstance(value, str | os.PathLike):
        raise MsplitError(
            f"{type(value).__name__} is no path of a model or a build", fix="give a str or a pathlib.Path"
        )
    return Path(value)


class Precision(StrEnum):
    """Precision of a model's computation, from the coarsest to the finest. Inputs, outputs and variables keep their types in each."""

    BF16 = "bf16"
    """Ops that gain from it are in bfloat16 (8 bits of mantissa, the range of float32), the rest as in `TF32`."""

    FP16 = "fp16"
    """Ops that gain from it are in float16 (11 bits, at most 65504), the rest as in `TF32`."""

    TF32 = "tf32"
    """float32, and its products with operands rounded to TF32 (11 bits, the range of float32), as TensorFlow has it by default."""

    IEEE = "ieee"
    """float32, products included."""

    @property
    def ieee(self) -> bool:
        """True if products of float32 are in float32."""
        return self is Precision.IEEE

    @property
    def half(self) -> str:
        """The type of half precision, such as ``"bfloat16"``; "" where there is none."""
        return "bfloat16" if self is Precision.BF16 else "float16" if self is Precision.FP16 else ""

    @property
    def wide(self) -> Precision:
        """This precision with nothing in half precision."""
        return Precision.TF32 if self.half else self

    @property
    def suffix(self) -> str:
        """Suffix of names of what runs in it: nothing where all is float32."""
        return f", {self}" if self.half else ""

    def on(self, *, gpu: bool) -> Precision:
        """The precision in effect on a device: a CPU has no TF32."""
        return Precision.IEEE if self is Precision.TF32 and not gpu else self

    @staticmethod
    def read(name: object) -> Precision:
        """The one of this name.

        Raises:
            MsplitError: There is none.
        """
        if name not in list(Precision):
            raise MsplitError(f"there is no precision {name!r}", fix=f"one of: {', '.join(Precision)}")
        return Precision(str(name))

    @staticmethod
    def coarsest(*several: Precision) -> Precision:
        """The one in which least is exact."""
        return min(several, key=list(Precision).index)
