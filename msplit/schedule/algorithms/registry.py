"""All algorithms, in the order in which they are tried and shown."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msplit.schedule.algorithms.base import Algorithm
from msplit.schedule.algorithms.heuristics import fan_out, longest_first, one_stream, round_robin
from msplit.schedule.algorithms.list_schedule import list_schedule
from msplit.schedule.algorithms.path_cover import greedy_cover, matching_cover
from msplit.schedule.algorithms.staged import staged

ONE = "one"
LIST = "list"

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        ONE: one_stream,
        "tensorflow": fan_out,
        "torchsched": round_robin,
        "opara": greedy_cover,
        "nimble": matching_cover,
        "longest-first": longest_first,
        "ios": staged,
        LIST: list_schedule,
    }
)
