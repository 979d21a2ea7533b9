"""Metrics of a server for Prometheus: requests as its clients saw them, and the counts of its pools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from msplit.serving.server.models import Models, Version

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUCKETS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0)
_NOW = {"waiting": "Requests that wait.", "in_flight": "Steps that run."}
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

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Counts of all pools; called by Prometheus's registry."""
        labels = ("model", "version", "signature")
        stats = [
            ((version.model, str(version.number), signature.name), asdict(signature.pool.stats()))
            for version in self._models
            for signature in version.signatures.values()
        ]
        for families, kind in ((_NOW, GaugeMetricFamily), (_SO_FAR, CounterMetricFamily)):
            for name, said in families.items():
                family = kind(f"msplit_pool_{name}", said, labels=labels)
                for values, counts in stats:
                    family.add_metric(values, counts[name])
                yield family
