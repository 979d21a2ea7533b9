"""Metrics of a server for Prometheus: requests as its clients saw them, and the counts of its pools.

Memory and use of GPUs come from NVML, where its package (`nvidia-ml-py`) is installed.
"""

from __future__ import annotations

import functools
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from importlib import import_module
from itertools import accumulate, chain
from platform import python_version
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, core
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from msplit._version import __version__
from msplit.engines.table_rows import LOOKUPS
from msplit.serving.pool.pool import Pool
from msplit.serving.pool.scheduler import rows_in
from msplit.serving.pool.settings import Stats
from msplit.serving.pool.steps import OF_PROCESSES
from msplit.serving.server.models import Models, Version

_REQUEST, _LABELS = ("model", "version", "protocol"), ("model", "version", "signature")
_BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0)
_BOUNDS = (*map(floatToGoString, (*_BUCKETS, math.inf)),)
_NOW = {"waiting": "Requests that wait.", "in_flight": "Steps that run."}
_GPU = {
    "memory_used_bytes": "Memory of the GPU in use, by whatever process.",
    "memory_total_bytes": "Memory of the GPU.",
    "busy_ratio": "Share of the last second in which a kernel ran.",
}
_SO_FAR = {
    "requests": "Requests that the pool took.",
    "answered": "Requests that got an answer.",
    "failed": "Requests that got an error of the engine.",
    "timed_out": "Requests that waited too long, and were not run.",
    "cancelled": "Requests that were cancelled while they waited.",
    "refused": "Requests that were refused because too many waited.",
    "rows": "Rows of the steps that ran.",
    "filled": "Rows of the steps that were nobody's.",
    "steps": "Steps that ran.",
}
_TABLES = {
    "table_rows_looked_up": "Rows that steps looked up in tables of the host's memory.",
    "table_rows_found": "Rows looked up that the cache on the GPU had.",
    "table_rows_admitted": "Rows that came into the cache.",
    "table_bus_bytes": "Bytes of rows that came over the bus, for a lookup or into the cache.",
    "table_cache_bytes": "Memory of the GPU for a cache of their rows.",
    "host_table_bytes": "Memory of the host that lookup tables take which are not on the GPU.",
    "mapped_table_bytes": "Bytes of these that are mapped files, of which the processes of a host have one copy.",
    "table_hit_rate": "Share of the rows looked up in them that the cache had.",
}
_COUNTERS = {*_SO_FAR, *LOOKUPS[:4]}

Counts = dict[tuple[str, str, str, str], list[float]]
"""Counts of requests, by model, version, protocol and status: how many, their seconds, and how many in each bucket of `_BUCKETS` and
beyond; and of pools, by model, version, signature and "": numbers in the order of `Stats`."""
_NONE = [0.0] * (len(_BUCKETS) + 3)


def added(every: Iterable[Counts]) -> Counts:
    """Sum of counts."""
    found: Counts = {}
    for key, values in chain.from_iterable(counts.items() for counts in every):
        found[key] = [*map(sum, zip(found.get(key, _NONE), values, strict=False))]
    return found


def left(counts: Counts, version: Version, models: Models) -> Counts:
    """Counts without those of a version that is closed, if it was not opened once more."""
    if version.number in models.versions.get(version.model, {}):
        return counts
    return {key: values for key, values in counts.items() if key[:2] != (version.model, str(version.number))}


class Metrics:
    """Counts requests, and collects what pools count when Prometheus asks.

    Args:
        models: Models that are served.
        others: Gives the counts of other processes, where these take all requests.
    """

    def __init__(self, models: Models, others: Callable[[], Counts] = dict) -> None:
        self._models, self._others = models, others
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests: Counts = {}
        self._lock = threading.Lock()

    def count(self, version: Version | None, protocol: str, status: str, seconds: float) -> None:
        """Counts one request. What no model was found for has no name here: clients could make up any number of them."""
        key = (
            (version.model, str(version.number), protocol, status)
            if version is not None
            else ("", "", protocol, status)
        )
        with self._lock:
            found = self._requests.get(key)
            if found is None:
                found = self._requests[key] = [*_NONE]
            found[0] += 1
            if status == "OK":
                found[1] += seconds
                found[2 + bisect_left(_BUCKETS, seconds)] += 1

    def forget(self, version: Version) -> None:
        """Drops the counts of a version that is closed; see `left`."""
        with self._lock:
            self._requests = left(self._requests, version, self._models)

    def counts(self) -> Counts:
        """Counts of this process alone. Those of pools leave out what all of their clients see."""
        with self._lock:
            found = {key: [*values] for key, values in self._requests.items()}
        for labels, pool in self._every_pool():
            waiting = pool.scheduler.stats().waiting
            shared = dict.fromkeys(OF_PROCESSES, 0)
            found[*labels, ""] = [*astuple(replace(pool.stats(), waiting=waiting, **shared))]
        return found

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """All of it, and its type: OpenMetrics or Prometheus's own, by the `Accept` of who asks."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def collect(self) -> Iterator[core.Metric]:
        """Counts of all pools, and what is told of models, GPUs and this build; called by Prometheus's registry."""
        with self._lock:
            counts = added([self._requests, self._others()])
        answers = core.CounterMetricFamily("msplit_requests", "Requests by status.", labels=(*_REQUEST, "status"))
        said = "From reading a request to its answer."
        seconds = core.HistogramMetricFamily("msplit_request_seconds", said, labels=_REQUEST)
        requests = [key for key in counts if key[3]]
        for key in requests:
            answers.add_metric(key, counts[key][0])
        for labels in dict.fromkeys(key[:3] for key in requests):
            _, total, *each = counts.get((*labels, "OK"), _NONE)
            seconds.add_metric(labels, [*zip(_BOUNDS, accumulate(each), strict=True)], total)
        yield from (answers, seconds)
        yield core.InfoMetricFamily(
            "msplit_build", "This msplit.", {"version": __version__, "python": python_version()}
        )
        ready = core.GaugeMetricFamily("msplit_model_ready", "1 while a model can answer.", labels=("model",))
        for name in [*self._models.versions]:
            ready.add_metric((name,), self._models.can_answer(name))
        yield ready
        yield from self._pools(counts)
        states = [*gpus()]
        for name, said in _GPU.items() if states else ():
            family = core.GaugeMetricFamily(f"msplit_gpu_{name}", said, labels=("gpu", "name"))
            for state in states:
                values = {"memory_used_bytes": state.used, "memory_total_bytes": state.total, "busy_ratio": state.busy}
                family.add_metric((str(state.number), state.name), values[name])
            yield family

    def _every_pool(self) -> list[tuple[tuple[str, str, str], Pool]]:
        """All pools, each with the values of `_LABELS`."""
        return [
            ((version.model, str(version.number), signature.name), signature.pool)
            for version in self._models
            for signature in version.signatures.values()
        ]

    def _pools(self, others: Counts) -> Iterator[core.Metric]:
        labels, pools = _LABELS, self._every_pool()
        info = core.InfoMetricFamily("msplit_pool", "What answers.", labels=labels)
        sizes = ("rows", "length") if any(pool.lengths for _, pool in pools) else ("rows",)
        said = f"Steps of so many {', of such '.join(sizes)}."
        steps = core.CounterMetricFamily("msplit_pool_bucket_steps", said, labels=(*labels, *sizes))
        most = core.GaugeMetricFamily("msplit_pool_max_queue", "Requests that may wait; 0: any number.", labels=labels)
        for values, pool in pools:
            info.add_metric(values, {"engine": pool.about.label, "slots": str(pool.settings.groups)})
            most.add_metric(values, pool.settings.max_queue)
            for size, count in [*pool.scheduler.steps_of.items()] if not pool.processes() else ():
                length = "" if isinstance(size, int) else str(size[0])
                steps.add_metric((*values, *(str(rows_in(size)), length)[: len(sizes)]), count)
        yield from (info, most, steps)
        stats = [
            (values, Stats(*map(sum, zip(astuple(pool.stats()), others.get((*values, ""), _NONE), strict=False))))
            for values, pool in pools
        ]
        hosted = [one for one in stats if one[1].host_table_bytes]
        for name, said in (_NOW | _SO_FAR | (_TABLES if hosted else {})).items():
            kind = core.CounterMetricFamily if name in _COUNTERS else core.GaugeMetricFamily
            family = kind(f"msplit_pool_{name}", said, labels=labels)
            for values, counts in hosted if name in _TABLES else stats:
                value = getattr(counts, name)
                family.add_metric(values, math.nan if value is None else value)
            yield family


class GpuState(NamedTuple):
    """State of a GPU now.

    Attributes:
        number: As NVML counts: `CUDA_VISIBLE_DEVICES` does not change it.
        name: Its model.
        used: Bytes of its memory that are in use, by whatever process.
        total: Bytes of its memory.
        busy: Share of the last second or so in which a kernel ran, 0 to 1.
    """

    number: int
    name: str
    used: int
    total: int
    busy: float


@functools.cache
def _nvml() -> Any:
    """The library, ready to be asked; None where it, or a driver, is missing."""
    try:
        library = import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


def _count(library: Any) -> int:
    """Number of GPUs; 0 where the driver does not answer."""
    try:
        found: int = library.nvmlDeviceGetCount()
    except library.NVMLError:
        return 0
    return found


def gpus() -> Iterator[GpuState]:
    """States of all GPUs that this process may see; none where nobody can tell. One that does not answer is left out."""
    library = _nvml()
    for index in range(0 if library is None else _count(library)):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            memory, name = library.nvmlDeviceGetMemoryInfo(handle), library.nvmlDeviceGetName(handle)
            busy = library.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except library.NVMLError:
            continue
        yield GpuState(index, name if isinstance(name, str) else name.decode(), memory.used, memory.total, busy)
