"""Utilization of the GPU, as a part of the report of `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.benchmark.utilization import Utilization
from msplit.report.bounds import short
from msplit.report.document import Table


def table(found: Sequence[Utilization]) -> Table:
    """A row per variant."""
    rows = [(short(one.label), _share(one.works), _share(one.driver), _share(one.filled)) for one in found]
    note = (
        "works: share of a user's step in which the device works; driver: share of the time in which a kernel ran (NVML), steps one behind "
        "the other; filled: share of the processors that kernels fill meanwhile, by their times alone"
    )
    return Table("How busy the GPU is", ("", ">works", ">driver", ">filled"), rows, note)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def payload(found: Sequence[Utilization]) -> list[dict[str, Any]]:
    """Utilization for JSON."""
    shares = ("works", "driver", "filled")
    percent = [{f"{key}_percent": getattr(one, key) for key in shares} for one in found]
    return [
        {"label": one.label, **{key: None if value is None else round(100 * value, 3) for key, value in share.items()}}
        for one, share in zip(found, percent, strict=True)
    ]
