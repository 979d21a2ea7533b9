"""What the commands do, as functions: the library's front door.

`load` reads a model, `analyze` and `assign` decide without running it, `save` and `emit` write; `bench`, `compare` and `prepare` run
it. The command line adds only options and printing. What runs a model is imported when it is asked for, so that the rest starts at
once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from msplit.decide.analysis import Analysis, analyze
from msplit.decide.assignment import Assigned, StreamLoad, assign
from msplit.decide.export import EMITS, check_places, emit
from msplit.decide.model import load, price, save, strip

if TYPE_CHECKING:
    from msplit.measure.benchmark import Bench, bench
    from msplit.measure.comparison import Compared, compare
    from msplit.measure.execution import Runner, prepare
    from msplit.measure.request import BenchRequest
    from msplit.measure.results import Settings
    from msplit.measure.tuning import Tuned, TuneSettings

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
    "Bench": "msplit.measure.benchmark",
    "bench": "msplit.measure.benchmark",
    "Compared": "msplit.measure.comparison",
    "compare": "msplit.measure.comparison",
    "Runner": "msplit.measure.execution",
    "prepare": "msplit.measure.execution",
    "BenchRequest": "msplit.measure.request",
    "Tuned": "msplit.measure.tuning",
    "TuneSettings": "msplit.measure.tuning",
    "Settings": "msplit.measure.results",
}
"""What runs a model, by where it is: commands that only decide start without it, in a fifth less time."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value
