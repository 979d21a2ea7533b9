"""docs/examples/ray_serve.py on a local Ray. `.ci/ray` brings Ray in an environment of its own, and sets MSPLIT_RAY."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from tests.cli.runner import ROOT, SAMPLES

pytestmark = [
    pytest.mark.skipif(not os.environ.get("MSPLIT_RAY"), reason="needs Ray, which .ci/ray brings"),
    pytest.mark.tf,
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "mmoe.build"
    request = {"streams": (2,), "engine": "cuda", "device": "cpu", "effort": "fast"}
    msplit.build(SAMPLES / "mmoe_small.pb", path, **request, batches=[1, 8])
    return path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def served(build: Path) -> Iterator[tuple[Any, int, int]]:
    """A handle, and the ports of HTTP and gRPC."""
    import ray
    from ray import serve

    folder = ROOT / "docs" / "examples"
    sys.path.insert(0, str(folder))
    example = importlib.import_module("ray_serve")
    os.environ["PYTHONPATH"] = f"{folder}:{ROOT}"  # of the processes that Ray starts
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    port, grpc_port = free_port(), free_port()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        yield example.deploy(str(build), device="cpu", port=port, grpc_port=grpc_port), port, grpc_port
    finally:
        serve.shutdown()
        ray.shutdown()


def feeds(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(1 + seed % 4, 64)).astype(np.float32)}


def assert_right(build: Path, answers: list[dict[str, Any]]) -> None:
    """The answer to `feeds` of 0, 1, …"""
    with msplit.open(build) as runner:
        for seed, found in enumerate(answers):
            expected = runner.step(feeds(seed))
            assert set(found) == set(expected)
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-5)


def test_calls_from_python_get_each_its_own_answer(served: tuple[Any, int, int], build: Path) -> None:
    handle = served[0]
    assert_right(build, [one.result() for one in [handle.predict.remote(feeds(seed)) for seed in range(40)]])


def post(port: int, body: bytes) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/predict", body, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as problem:
        return problem.code, json.load(problem)


def test_http_answers_and_says_what_is_wrong(served: tuple[Any, int, int], build: Path) -> None:
    bodies = [json.dumps({"inputs": {"x": feeds(seed)["x"].tolist()}}).encode() for seed in range(20)]
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda body: post(served[1], body), bodies))
    assert {code for code, _ in found} == {200}
    assert_right(build, [answer["outputs"] for _, answer in found])
    for body, said in ((b"{", ""), (b'{"inputs": {"x": [[1]]}}', "x"), (b'{"inputs": {"y": 1}}', "no input y")):
        code, answer = post(served[1], body)
        assert code == 400
        assert said in answer["error"]


def test_tensorflow_servings_own_client_is_answered(served: tuple[Any, int, int], build: Path) -> None:
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    def asked(**arrays: Any) -> Any:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "mmoe"
        for name, value in arrays.items():
            request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
        return request

    with grpc.insecure_channel(f"127.0.0.1:{served[2]}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        known = {"metadata": (("application", "msplit"),), "timeout": 60}
        answers = [stub.Predict(asked(**feeds(seed)), **known) for seed in range(10)]
        assert_right(build, [{name: tf.make_ndarray(value) for name, value in one.outputs.items()} for one in answers])
        with pytest.raises(grpc.RpcError) as caught:
            stub.Predict(asked(x=np.ones((1, 63), np.float32)), **known)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "63" in caught.value.details()
