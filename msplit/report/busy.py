"""Utilization of the GPU, as a part of the report of `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.benchmark.utilization import Utilization
from msplit.report.bounds import short
from msplit.report.document import Table

_SHARES = ("works", "driver", "filled")


def table(found: Sequence[Utilization]) -> Table:
    """A row per variant."""
    rows = [(short(one.label), *(_share(getattr(one, key)) for key in _SHARES)) for one in found]
    note = (
        "works: share of a user's step in which the device works; driver: share of the time in which a kernel ran (NVML), steps one behind "
        "the other; filled: share of the processors that kernels fill meanwhile, by their times alone"
    )
    return Table("How busy the GPU is", ("", *(f">{key}" for key in _SHARES)), rows, note)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def payload(found: Sequence[Utilization]) -> list[dict[str, Any]]:
    """Utilization for JSON."""
    return [{"label": one.label, **{f"{key}_percent": _percent(getattr(one, key)) for key in _SHARES}} for one in found]


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 3)
