"""Spans of OpenTelemetry: one for each request, below that of its client."""

from __future__ import annotations

from time import perf_counter, time_ns
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("prometheus_client")

from msplit.serving.server import service
from msplit.serving.server.metrics import Metrics
from msplit.serving.server.models import Models, Version

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def context(**headers: str) -> service.RequestContext:
    models = Models({})
    found = service.RequestContext(service.Service(models, Metrics(models)), headers=headers)
    found.version = Version("m", 3, {})
    return found


def test_without_the_package_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "tracer", None)
    context().end("http", "GET /", "OK", perf_counter())


def test_a_request_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins that have the signatures of opentelemetry-api 1.45."""
    spans: list[dict[str, Any]] = []

    def start_span(name: str, context: Any, kind: Any, attributes: Any, links: Any = None, start_time: Any = 0) -> Any:
        span = {"name": name, "parent": context, "kind": kind, "about": attributes, "begin": start_time}
        spans.append(span)
        return SimpleNamespace(
            set_status=lambda status, why=None: span.update(status=status, why=why),
            end=lambda end_time=None: span.update(end=end_time),
        )

    monkeypatch.setattr(service, "tracer", SimpleNamespace(start_span=start_span))
    monkeypatch.setattr(service, "propagate", SimpleNamespace(extract=lambda carrier: dict(carrier)), raising=False)
    kinds = SimpleNamespace(SpanKind=SimpleNamespace(SERVER="server"), StatusCode=SimpleNamespace(ERROR="error"))
    monkeypatch.setattr(service, "trace", kinds, raising=False)
    before, start = time_ns(), perf_counter() - 0.25
    context(traceparent=PARENT).end("http", "POST /v1/models/m:predict", "OK", start)
    context().end("inference.GRPCInferenceService", "/a/B", "UNAVAILABLE", start)
    first, second = spans
    assert first["about"] == {"model": "m", "version": 3, "traceparent": PARENT, "protocol": "http", "status": "OK"}
    assert (first["name"], first["parent"], first["kind"]) == (
        "POST /v1/models/m:predict",
        {"traceparent": PARENT},
        "server",
    )
    assert 0.25e9 <= first["end"] - first["begin"] < 20e9
    assert before <= first["end"] <= time_ns()
    assert "status" not in first
    assert (second["name"], second["parent"], second["status"], second["why"]) == ("/a/B", {}, "error", "UNAVAILABLE")


def test_the_real_package_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(service, "tracer", provider.get_tracer("msplit"))
    context(traceparent=PARENT).end("http", "GET /", "NOT_FOUND", perf_counter() - 0.25)
    (span,) = kept.get_finished_spans()
    assert (span.name, span.kind.name, span.status.status_code.name) == ("GET /", "SERVER", "ERROR")
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:52]
    assert span.end_time - span.start_time >= 0.25e9
    assert span.attributes["model"] == "m"
