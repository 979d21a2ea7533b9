"""Metrics of a server for Prometheus: requests as its clients saw them, and the counts of its pools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from platform import python_version

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from msplit._version import __version__
from msplit.serving.server.gpus import gpus
from msplit.serving.server.models import Models, Version

_BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0)
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


class Metrics:
    """Counts requests, and collects what pools count when Prometheus asks."""

    def __init__(self, models: Models) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # of each series the time it began: twice as many
        self._models = models
        self._registry = CollectorRegistry()
        labels = ("model", "version", "protocol")
        self._answers = Counter("msplit_requests", "Requests by status.", (*labels, "status"), registry=self._registry)
        said = "From reading a request to its answer."
        self._seconds = Histogram("msplit_request_seconds", said, labels, buckets=_BUCKETS, registry=self._registry)
        self._registry.register(self)
        self._known: dict[tuple[Version | None, str, str], tuple[Counter, Histogram]] = {}

    def count(self, version: Version | None, protocol: str, status: str, seconds: float) -> None:
        """Counts one request. What no model was found for has no name here: clients could make up any number of them."""
        key = (version, protocol, status)
        found = self._known.get(key)
        if found is None:
            labels = (version.model, str(version.number), protocol) if version is not None else ("", "", protocol)
            found = self._known[key] = self._answers.labels(*labels, status), self._seconds.labels(*labels)
        found[0].inc()
        if status == "OK":
            found[1].observe(seconds)

    def forget(self, version: Version) -> None:
        """Drops the counts of a version that is closed."""
        gone = (version.model, str(version.number))
        for key in [key for key in [*self._known] if key[0] is version]:
            del self._known[key]
            if any(one is not None and (one.model, str(one.number)) == gone for one, *_ in [*self._known]):
                continue  # it was opened once more, and goes on counting
            with contextlib.suppress(KeyError):  # it may be gone with another status
                self._seconds.remove(*gone, key[1])
            self._answers.remove(*gone, *key[1:])

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """All of it, and its type: OpenMetrics or Prometheus's own, by the `Accept` of who asks."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def collect(self) -> Iterator[Metric]:
        """Counts of all pools, and what is told of models, GPUs and this build; called by Prometheus's registry."""
        yield InfoMetricFamily("msplit_build", "This msplit.", {"version": __version__, "python": python_version()})
        ready = GaugeMetricFamily("msplit_model_ready", "1 while a model can answer.", labels=("model",))
        for name in [*self._models.versions]:
            ready.add_metric((name,), self._models.can_answer(name))
        yield ready
        yield from self._pools()
        states = [*gpus()]
        for name, said in _GPU.items() if states else ():
            family = GaugeMetricFamily(f"msplit_gpu_{name}", said, labels=("gpu", "name"))
            for state in states:
                values = {"memory_used_bytes": state.used, "memory_total_bytes": state.total, "busy_ratio": state.busy}
                family.add_metric((str(state.number), state.name), values[name])
            yield family

    def _pools(self) -> Iterator[Metric]:
        labels = ("model", "version", "signature")
        pools = [
            ((version.model, str(version.number), signature.name), signature.pool)
            for version in self._models
            for signature in version.signatures.values()
        ]
        info = InfoMetricFamily("msplit_pool", "What answers.", labels=labels)
        steps = CounterMetricFamily("msplit_pool_bucket_steps", "Steps of so many rows.", labels=(*labels, "rows"))
        most = GaugeMetricFamily("msplit_pool_max_queue", "Requests that may wait; 0: any number.", labels=labels)
        for values, pool in pools:
            info.add_metric(values, {"engine": pool.about.label, "slots": str(pool.settings.groups)})
            most.add_metric(values, pool.settings.max_queue)
            for bucket, count in [*pool.scheduler.steps_of.items()] if not pool.processes() else ():
                steps.add_metric((*values, str(bucket)), count)
        yield from (info, most, steps)
        stats = [(values, asdict(pool.stats())) for values, pool in pools]
        for families, kind in ((_NOW, GaugeMetricFamily), (_SO_FAR, CounterMetricFamily)):
            for name, said in families.items():
                family = kind(f"msplit_pool_{name}", said, labels=labels)
                for values, counts in stats:
                    family.add_metric(values, counts[name])
                yield family
