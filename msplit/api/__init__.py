"""What the commands do, as functions: the library's front door. The command line adds only options and printing."""

from msplit.api.analysis import Analysis, analyze
from msplit.api.assignment import Assigned, StreamLoad, assign
from msplit.api.benchmark import Bench, bench
from msplit.api.comparison import Compared, compare
from msplit.api.emission import EMITS, check_places, emit
from msplit.api.execution import Runner, prepare
from msplit.api.model import load, price, save
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
]
