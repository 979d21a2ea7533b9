"""All algorithms, in the order in which they are tried and shown."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msplit.schedule.algorithms.base import Algorithm
from msplit.schedule.algorithms.fan_out import fan_out
from msplit.schedule.algorithms.greedy_cover import greedy_cover
from msplit.schedule.algorithms.list_schedule import list_schedule
from msplit.schedule.algorithms.longest_first import longest_first
from msplit.schedule.algorithms.matching_cover import matching_cover
from msplit.schedule.algorithms.one import one_stream
from msplit.schedule.algorithms.round_robin import round_robin
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
