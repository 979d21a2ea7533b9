"""What Prometheus reads of a server."""

from __future__ import annotations

import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from msplit._version import __version__
from msplit.serving.pool.settings import Stats
from msplit.serving.server import metrics as server_metrics
from msplit.serving.server.metrics import _NONE, Metrics
from msplit.serving.server.models import Models, Version, signature_of
from tests.serving.server.trivial import BATCHES, WIDTH, pool


@pytest.fixture
def metrics() -> Any:
    with pool() as made:
        only = signature_of(made, None)
        models = Models({"double": {1: Version("double", 1, {only.name: only})}, "other": {}})
        for rows in (1, 1, 3):
            made.step({"x": np.zeros((rows, WIDTH), np.float32)})
        found = Metrics(models)
        found.count(next(iter(models)), "http", "OK", 0.01)
        yield found


def samples(text: str, read: Any = text_string_to_metric_families) -> dict[tuple[str, ...], float]:
    """Values by name and labels (in the order of their names)."""
    return {
        (one.name, *(one.labels[name] for name in sorted(one.labels))): one.value
        for family in read(text)
        for one in family.samples
    }


POOL = ("double", "serving_default", "1")


def test_counts_buckets_queue_and_build(metrics: Metrics) -> None:
    data, kind = metrics.text()
    assert kind.startswith("text/plain; version=0.0.4")
    found = samples(data.decode())
    assert {name[2]: value for name, value in found.items() if name[0] == "msplit_pool_bucket_steps_total"} == {
        str(BATCHES[0]): 2.0,
        str(BATCHES[1]): 1.0,
    }
    assert found["msplit_pool_steps_total", *POOL] == 3
    assert found["msplit_pool_rows_total", *POOL] == 6
    assert found["msplit_pool_filled_total", *POOL] == 1
    assert found["msplit_pool_max_queue", *POOL] == 6
    assert found["msplit_pool_waiting", *POOL] == 0
    assert (found["msplit_model_ready", "double"], found["msplit_model_ready", "other"]) == (1, 0)
    assert [name[2] for name in found if name[0] == "msplit_build_info"] == [__version__]
    assert [name[1:] for name in found if name[0] == "msplit_pool_info"] == [
        ("double", "double", *POOL[1:][:1], "1", "1")
    ]
    assert not [name for name in found if name[0].endswith("_created")]


@pytest.mark.parametrize("version", ["1.0.0", "0.0.1"])
def test_open_metrics_where_it_is_asked_for(metrics: Metrics, version: str) -> None:
    """Prometheus asks for several; the parser of OpenMetrics is strict, as Prometheus's is."""
    accept = f"application/openmetrics-text;version={version},text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    data, kind = metrics.text(accept)
    if version == "0.0.1":
        assert kind.startswith("text/plain")
        return
    assert kind.startswith("application/openmetrics-text")
    assert data.endswith(b"# EOF\n")
    found = samples(data.decode(), openmetrics.text_string_to_metric_families)
    assert found["msplit_pool_steps_total", *POOL] == 3
    assert not [name for name in found if name[0].endswith("_created")]


def test_counts_of_fronts_have_room_for_all_of_a_pool() -> None:
    assert len(fields(Stats)) <= len(_NONE)
    assert [one.name for one in fields(Stats)][-2:] == ["waiting", "in_flight"], (
        "`Fronts` forgets these of one that has ended"
    )


class Broken(Exception):
    pass


def library(count: int, broken: int = -1) -> SimpleNamespace:
    def handle(index: int) -> int:
        if index == broken:
            raise Broken
        return index

    return SimpleNamespace(
        NVMLError=Broken,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetName=lambda index: [b"NVIDIA H200", "NVIDIA H200"][index % 2],
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(used=1 << (30 + index), total=1 << 37),
        nvmlDeviceGetUtilizationRates=lambda index: SimpleNamespace(gpu=25 * index),
    )


def test_gpus_that_nvml_tells_of(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a library of this form takes the place of NVML's."""
    monkeypatch.setitem(sys.modules, "pynvml", library(3, broken=1))
    server_metrics._nvml.cache_clear()
    try:
        found = samples(metrics.text()[0].decode())
    finally:
        server_metrics._nvml.cache_clear()
    told = {name: value for name, value in found.items() if name[0].startswith("msplit_gpu_")}
    assert told == {
        ("msplit_gpu_memory_used_bytes", "0", "NVIDIA H200"): 1 << 30,
        ("msplit_gpu_memory_used_bytes", "2", "NVIDIA H200"): 1 << 32,
        ("msplit_gpu_memory_total_bytes", "0", "NVIDIA H200"): 1 << 37,
        ("msplit_gpu_memory_total_bytes", "2", "NVIDIA H200"): 1 << 37,
        ("msplit_gpu_busy_ratio", "0", "NVIDIA H200"): 0.0,
        ("msplit_gpu_busy_ratio", "2", "NVIDIA H200"): 0.5,
    }


def test_without_nvml_nothing_is_told(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise Broken

    lost = library(1)
    lost.nvmlDeviceGetCount = fails
    for one in (None, SimpleNamespace(NVMLError=Broken, nvmlInit=fails), lost):
        monkeypatch.setitem(sys.modules, "pynvml", one)
        server_metrics._nvml.cache_clear()
        try:
            assert b"msplit_gpu" not in metrics.text()[0]
        finally:
            server_metrics._nvml.cache_clear()
