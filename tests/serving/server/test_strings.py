"""A server of a build without TensorFlow in its process: strings over REST and gRPC, answered as TensorFlow answers them."""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import msplit
from tests import forked, string_models
from tests.run.test_host_builds import QUICK, answers
from tests.serving.server.running import Server, started

grpc = pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("tensorflow_serving")
pytest.importorskip("torch")

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, np.ndarray], Any]]:
    """The server, what it is asked, and TensorFlow's answers."""
    folder = tmp_path_factory.mktemp("strings")
    feeds = string_models.wide_deep(folder / "model")
    msplit.build(str(folder / "model"), folder / "build", batches=[1, 8], **QUICK)
    command = ["tests.without_tensorflow", "serve", folder / "build", "--model_name", "words"]
    begin = functools.partial(forked.Popen, server=forked.SERVED, quick=True)
    server = started(begin, lambda port, rest: [*command, "--port", port, "--rest_api_port", rest])
    yield server, feeds, answers(folder / "model", feeds)
    assert server.stop()[0] == 0


def plain(text: bytes) -> Any:
    """A string as JSON has it."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(text).decode()}


@pytest.mark.parametrize("rows", [8, 3])
def test_over_rest(served: Any, rows: int) -> None:
    server, feeds, (expected,) = served[0], served[1], served[2].values()
    words, numbers = feeds["word"][:rows], feeds["number"][:rows]
    instances = [
        {"word": [plain(word)], "number": [int(number)]} for (word,), (number,) in zip(words, numbers, strict=True)
    ]
    status, answer = server.http("/v1/models/words:predict", {"instances": instances})
    assert status == 200
    np.testing.assert_allclose(answer["predictions"], expected[:rows], rtol=1e-4, atol=1e-6)


def test_over_grpc(served: Any) -> None:
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2

    server, feeds, (expected,) = served[0], served[1], served[2].values()
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "words"
    request.inputs["word"].CopyFrom(tf.make_tensor_proto(feeds["word"].tolist(), tf.string, feeds["word"].shape))
    request.inputs["number"].CopyFrom(tf.make_tensor_proto(feeds["number"]))
    with grpc.insecure_channel(server.address) as channel:
        ask = channel.unary_unary(
            "/tensorflow.serving.PredictionService/Predict",
            predict_pb2.PredictRequest.SerializeToString,
            predict_pb2.PredictResponse.FromString,
        )
        (found,) = ask(request, timeout=60).outputs.values()
    np.testing.assert_allclose(tf.make_ndarray(found), expected, rtol=1e-4, atol=1e-6)


def test_what_the_model_can_not_take_is_a_client_error(served: Any) -> None:
    status, answer = served[0].http("/v1/models/words:predict", {"instances": [{"word": [3], "number": [1]}]})
    assert status == 400
    assert "word" in answer["error"]
