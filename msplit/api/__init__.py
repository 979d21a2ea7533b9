"""What the commands do, as functions: the library's front door. The command line adds only options and printing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from msplit.api.analysis import Analysis, analyze
from msplit.api.assignment import Assigned, StreamLoad, assign
from msplit.api.emission import EMITS, check_places, emit
from msplit.api.model import load, price, save, strip

if TYPE_CHECKING:
    from msplit.api.benchmark import Bench, bench
    from msplit.api.comparison import Compared, compare
    from msplit.api.execution import Runner, prepare
    from msplit.api.request import BenchRequest
    from msplit.api.tune import Tuned, TuneSettings
    from msplit.measure.result import Settings

__all__ = [
    "EMITS",
    "Analysis",
    "Assigned",
    "Bench",
    "BenchRequest",
    "Compared",
    "Runner",
    "Settings",
    "StreamLoad",
    "TuneSettings",
    "Tuned",
    "analyze",
    "assign",
    "bench",
    "check_places",
    "compare",
    "emit",
    "load",
    "prepare",
    "price",
    "save",
    "strip",
]

_LATER = {
    "Bench": "msplit.api.benchmark",
    "bench": "msplit.api.benchmark",
    "Compared": "msplit.api.comparison",
    "compare": "msplit.api.comparison",
    "Runner": "msplit.api.execution",
    "prepare": "msplit.api.execution",
    "BenchRequest": "msplit.api.request",
    "Tuned": "msplit.api.tune",
    "TuneSettings": "msplit.api.tune",
    "Settings": "msplit.measure.result",
}
"""What runs a model, by where it is: commands that only decide start without it, in a fifth less time."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value
