"""A server whose model runs in processes says that it is not ready while none is there."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")
pytest.importorskip("prometheus_client")

from msplit.serving.server import messages, rpc
from msplit.serving.server.metrics import Metrics
from msplit.serving.server.models import Models, Signature, Version
from msplit.serving.server.service import Service
from tests import forked
from tests.serving.pool.remote import DEADLY, kill, opened, wait, whole
from tests.serving.pool.test_pool import in_a_loop
from tests.serving.server.asking import answer

INFER = next(path for path in rpc.PATHS if path.endswith("/ModelInfer"))


def request(value: float) -> bytes:
    made = messages.ModelInferRequest(model_name="m")
    for name, array in (("x", np.full((4, 2), value)), ("k", np.zeros(()))):
        made.inputs.add(name=name, datatype="FP64", shape=array.shape)
        made.raw_input_contents.append(array.tobytes())
    return made.SerializeToString()


def test_it_is_ready_as_long_as_a_process_is() -> None:
    with forked.instead(forked.POOLED), opened(1) as pool:
        models = Models({"m": {1: Version("m", 1, {"serving_default": Signature("serving_default", pool)})}})

        async def ask() -> None:
            service = Service(models, Metrics(models))

            async def ready() -> list[Any]:
                said = []
                for method, kind in (("ServerReady", "ServerReadyResponse"), ("ModelReady", "ModelReadyResponse")):
                    data = messages.ModelReadyRequest(name="m").SerializeToString() if "Model" in method else b""
                    status, found = await answer(service, INFER.replace("ModelInfer", method), data, None)
                    assert status == 0
                    said.append(getattr(messages, kind).FromString(found).ready)
                status, found = await answer(service, "/grpc.health.v1.Health/Check", b"", None)
                return [*said, messages.HealthCheckResponse.FromString(found).status == 1]

            assert await ready() == [True] * 3
            status, data = await answer(service, INFER, request(2.0), None)
            assert status == 0
            found = messages.ModelInferResponse.FromString(data)
            assert np.frombuffer(found.raw_output_contents[0]).tolist() == [6.0] * 8
            kill(pool)
            while pool.ready:
                await asyncio.sleep(0)
            assert await ready() == [False] * 3
            status, data = await answer(service, INFER, request(3.0), None)
            assert status == 0, "it waited for the next process"
            assert await ready() == [True] * 3
            assert await answer(service, INFER, request(DEADLY), None) == (
                14,
                b"the process of cpu:0 ended while it had the request",
            )
            assert not service.stopping.is_set()

        in_a_loop(ask())
        wait(lambda: whole(pool))
