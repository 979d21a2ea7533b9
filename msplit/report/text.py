"""Numbers as people read them."""

from __future__ import annotations


def count(value: int) -> str:
    """1234567 -> "1,234,567"."""
    return f"{value:,}"


def size(value: float) -> str:
    """Bytes: 1536 -> "1.5 KB" (powers of 1000, as disk and bandwidth figures are)."""
    if value < 1000:
        return f"{value:.0f} B"
    for unit in ("KB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value:.0f} PB"


def micros(value: float) -> str:
    """Microseconds: 0.42 -> "0.42 µs", 12345 -> "12.3 ms"."""
    if 0 < value < 0.01:
        return "<0.01 µs"
    if value < 1000:
        return f"{value:.3g} µs" if value < 100 else f"{value:.0f} µs"
    if value < 1e6:
        return f"{value / 1e3:.3g} ms"
    return f"{value / 1e6:.3g} s"


def operations(value: float) -> str:
    """Floating-point operations: 2.5e9 -> "2.5 GFLOP"."""
    for unit in ("", "K", "M", "G", "T", "P"):
        if value < 999.5 or unit == "P":
            return f"{value:.3g} {unit}FLOP"
        value /= 1000
    raise AssertionError


def percent(part: float, whole: float) -> str:
    """Share of a whole: "12 %", "0.4 %"; "-" of nothing."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 10 or share == 0 else f"{share:.1f} %"


def ratio(value: float) -> str:
    """A speed-up: "5.61x"."""
    return f"{value:.3g}x" if value < 100 else f"{value:.0f}x"


def plural(number: int, noun: str, many: str | None = None) -> str:
    """ "1 node", "2 nodes", "2 branches"."""
    return f"{count(number)} {noun if number == 1 else many or noun + 's'}"


def shorten(name: str, width: int) -> str:
    """A long node name with its middle left out, so that both scope and op stay readable."""
    if len(name) <= width:
        return name
    keep = width - 1
    return f"{name[: keep - keep // 2]}…{name[len(name) - keep // 2 :]}"
