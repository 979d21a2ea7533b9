"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msplit.core.statistics import Ratio


def count(value: int) -> str:
    """1234567 -> "1,234,567"."""
    return f"{value:,}"


def size(value: float) -> str:
    """Bytes: 1536 -> "1.54 KB" (powers of 1000, as disk and bandwidth figures are)."""
    return f"{value:.0f} B" if value < 999.5 else _scaled(value / 1000, ("KB", "MB", "GB", "TB", "PB"))


def micros(value: float) -> str:
    """Microseconds, to a tenth at most: 0.42 -> "0.4 µs", 12345 -> "12.3 ms"."""
    if value == 0:
        return "0 µs"
    if value < 0.05:
        return "<0.1 µs"
    if value < 999.5:
        return f"{value:.1f} µs" if value < 99.95 else f"{value:.0f} µs"
    if value < 999_500:
        return f"{value / 1e3:.3g} ms"
    return f"{value / 1e6:.3g} s"


def operations(value: float) -> str:
    """Floating-point operations: 2.5e9 -> "2.5 GFLOP"."""
    return _scaled(value, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(value: float, units: Sequence[str]) -> str:
    """In the unit, of those a thousand times as large as the one before, that leaves three digits."""
    for unit in units[:-1]:
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {units[-1]}"


def percent(part: float, whole: float) -> str:
    """Share of a whole: "12 %", "0.4 %"; "-" of nothing."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 10 or share == 0 else f"{share:.1f} %"


def ratio(value: float) -> str:
    """A speed-up: "5.61x"."""
    return f"{value:.2f}x" if value < 9.995 else f"{value:.1f}x" if value < 99.95 else f"{value:.0f}x"


def plural(number: int, noun: str, many: str | None = None) -> str:
    """ "1 node", "2 nodes", "2 branches"."""
    return f"{count(number)} {noun if number == 1 else many or noun + 's'}"


def dimensions(shape: Sequence[int | None] | None) -> str:
    """Sizes of a tensor: "?×224×224×3", "scalar" of no axes, "?" of an unknown number of them."""
    return "?" if shape is None else "×".join("?" if size is None else str(size) for size in shape) or "scalar"


def more(left: int, option: str, noun: str = "") -> str:
    """The line below a table that was cut: "and 7 more (--all)", "and 1 more node (--all)"; "" where nothing is left out."""
    if left <= 0:
        return ""
    return f"and {plural(left, f'more {noun}') if noun else f'{count(left)} more'} ({option})"


def some(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first of several: "a, b … and 3 more"; "none" of nothing."""
    left = len(names) - most
    return between.join(names[:most]) + (f" … and {left} more" if left > 0 else "") or "none"


_FORMATS = {"graphdef": "GraphDef", "metagraph": "MetaGraphDef", "savedmodel": "SavedModel"}


def heading(path: object, form: str) -> str:
    """First line of a report on a model: "model.pb (GraphDef)"."""
    kind, _, text = form.partition("-")
    return f"{path} ({_FORMATS.get(kind, kind)}{', text' if text else ''})"


def gain(ratio: Ratio | None) -> str:
    """A measured ratio with its confidence interval; "-" for none."""
    if ratio is None:
        return "-"
    if ratio.undecided:
        return f"{ratio.value:.2f} ({ratio.undecided})"
    verdict = "" if ratio.significant else ", no difference"
    return f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f}{verdict})"
