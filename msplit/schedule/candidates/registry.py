"""All algorithms, in the order in which they are tried and shown."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msplit.schedule.candidates.base import Algorithm
from msplit.schedule.candidates.fan_out import fan_out
from msplit.schedule.candidates.greedy_cover import greedy_cover
from msplit.schedule.candidates.one import one_stream
from msplit.schedule.candidates.round_robin import round_robin

ONE = "one"

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        ONE: one_stream,
        "opara": greedy_cover,
        "tensorflow": fan_out,
        "torchsched": round_robin,
    }
)
