"""What the commands do, as functions: the library's front door. The command line adds only options and printing."""

from msplit.api.analysis import Analysis, analyze
from msplit.api.assignment import Assigned, StreamLoad, assign
from msplit.api.benchmark import Bench, BenchRequest, bench
from msplit.api.emission import EMITS, check_places, emit
from msplit.api.model import load, price, save
from msplit.measure.result import Settings

__all__ = [
    "EMITS",
    "Analysis",
    "Assigned",
    "Bench",
    "BenchRequest",
    "Settings",
    "StreamLoad",
    "analyze",
    "assign",
    "bench",
    "check_places",
    "emit",
    "load",
    "price",
    "save",
]
