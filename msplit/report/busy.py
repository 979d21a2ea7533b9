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
    shares = [[getattr(one, key) for key in _SHARES] for one in found]
    texts = [["-" if share is None else f"{share:.0%}" for share in row] for row in shares]
    rows = [(short(one.label), *row) for one, row in zip(found, texts, strict=True)]
    note = (
        "works: share of a user's step in which the device works; driver: share of the time in which a kernel ran (NVML), steps one behind "
        "the other; filled: share of the processors that kernels fill meanwhile, by their times alone"
    )
    return Table("How busy the GPU is", ("", *(f">{key}" for key in _SHARES)), rows, note)


def payload(found: Sequence[Utilization]) -> list[dict[str, Any]]:
    """Utilization for JSON."""
    return [{"label": one.label, **{f"{key}_percent": _percent(getattr(one, key)) for key in _SHARES}} for one in found]


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 3)
