"""What the commands do, as functions: the library's front door. The command line adds only options and printing."""

from msplit.api.analysis import Analysis, analyze
from msplit.api.assignment import Assigned, StreamLoad, assign, emit
from msplit.api.benchmark import BenchRequest, bench
from msplit.api.model import load, price, save

__all__ = [
    "Analysis",
    "Assigned",
    "BenchRequest",
    "StreamLoad",
    "analyze",
    "assign",
    "bench",
    "emit",
    "load",
    "price",
    "save",
]
