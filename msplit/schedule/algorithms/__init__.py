"""Ways to put blocks on streams. Each algorithm is a pure function from a problem to a stream per block."""

from collections.abc import Mapping
from types import MappingProxyType

from msplit.schedule.algorithms import list_schedule, path_cover, staged
from msplit.schedule.algorithms.list_schedule import Algorithm, Skipped

__all__ = ["ALGORITHMS", "LIST", "ONE", "Algorithm", "Skipped"]

ONE = "one"
LIST = "list"

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        ONE: list_schedule.one_stream,
        "tensorflow": list_schedule.fan_out,
        "torchsched": list_schedule.round_robin,
        "opara": path_cover.greedy_cover,
        "nimble": path_cover.matching_cover,
        "longest-first": list_schedule.longest_first,
        "ios": staged.staged,
        LIST: list_schedule.list_schedule,
    }
)
"""All of them, in the order in which they are tried and shown."""
