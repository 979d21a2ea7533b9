"""From files to what is served: signatures, and the requests that a SavedModel brings to be warmed up with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

from msplit.errors import LoadError, MsplitError
from msplit.run.request import RunRequest
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.server import making, messages, tensors
from msplit.serving.server.config import ModelConfig
from msplit.serving.server.models import Models, Version, signature_of
from msplit.serving.server.tensors import Refusal
from tests.serving.server import trivial


@pytest.fixture
def version() -> Iterator[Version]:
    with trivial.pool() as pool:
        only = signature_of(pool, None)
        yield Version("double", 1, {only.name: only}, ("other",))


@pytest.mark.tf
def test_warm_up_requests_are_run_as_tensorflow_serving_writes_them(version: Version, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow_serving")
    import tensorflow as tf
    from tensorflow_serving.apis import model_pb2, predict_pb2, prediction_log_pb2, regression_pb2

    def log(value: np.ndarray) -> bytes:
        spec = model_pb2.ModelSpec(name="double", signature_name="serving_default")
        request = predict_pb2.PredictRequest(model_spec=spec, inputs={"x": tf.make_tensor_proto(value)})
        made = prediction_log_pb2.PredictionLog(predict_log=prediction_log_pb2.PredictLog(request=request))
        return made.SerializeToString()

    other = prediction_log_pb2.PredictionLog(
        regress_log=prediction_log_pb2.RegressLog(request=regression_pb2.RegressionRequest())
    )
    good = np.ones((2, trivial.WIDTH), np.float32)
    file = tmp_path / "tf_serving_warmup_requests"

    def write(*logs: bytes) -> None:
        with tf.io.TFRecordWriter(str(file)) as writer:
            for one in logs:
                writer.write(one)

    write(log(good), other.SerializeToString(), log(good[:1]))
    making._warm_up(version, file)
    assert version.signature("").pool.stats().answered == 2
    write(log(good), log(good[:, :3]))
    with pytest.raises(LoadError, match=r"warm-up request 1 fails: .*x"):
        making._warm_up(version, file)
    write(b"\x07\x00")
    with pytest.raises(LoadError, match="warm-up request 0 fails"):
        making._warm_up(version, file)


def test_models_are_found_by_name_number_and_label(version: Version) -> None:
    models = Models({"double": {1: version, 7: version}}, {"double": {"stable": 1}})
    assert models.find("double") is models.find("double", 7) is models.find("double", label="stable") is version
    for asked, said in (
        (("nobody",), "Latest(nobody)"),
        (("double", 2), "Specific(double, 2)"),
        (("double", None, "new"), "label: new"),
    ):
        with pytest.raises(Refusal) as caught:
            models.find(*asked)
        assert said in caught.value.said


def test_a_signature_that_is_not_served_is_told_apart_from_one_that_there_is_not(version: Version) -> None:
    assert version.signature("") is version.signature("serving_default")
    with pytest.raises(Refusal, match="the server was started without it"):
        version.signature("other")
    with pytest.raises(Refusal, match="double has serving_default"):
        version.signature("another")


def test_who_names_no_signature_gets_no_other_one_by_chance(version: Version) -> None:
    (only,) = version.signatures.values()
    assert Version("double", 1, {"first": only}).signature("") is only
    with pytest.raises(Refusal, match="double has no serving_default: signature_name has to be one of first, second"):
        Version("double", 1, {"first": only, "second": only}).signature("")


@pytest.mark.tf
def test_what_can_not_be_served_is_named(tmp_path: Path) -> None:
    import tensorflow as tf

    specs = {"action": [tf.TensorSpec([None, 8], tf.float32, name="x")], "initial": []}
    module = tf.Module()
    module.action = tf.function(lambda x: {"y": tf.tanh(x)}, input_signature=specs["action"])
    module.initial = tf.function(lambda: {"state": tf.zeros([1, 8])}, input_signature=[])
    tf.saved_model.save(module, tmp_path / "m", signatures={"action": module.action, "initial": module.initial})
    request = {"engine": "cuda", "device": "cpu", "effort": "fast", "streams": (1,)}
    configs = [ModelConfig("policy", tmp_path / "m")]
    with (
        pytest.raises(MsplitError) as told,
        making.ready(configs, RunRequest.of(**request), PoolSettings(batches=(1, 4)), signatures=making.ALL),
    ):
        pass
    assert told.value.where == "policy, signature initial"
    assert "--max-batch and --batch" in told.value.fix
    assert "--part signature=" in told.value.fix


def test_answers_are_in_the_fields_of_their_types_or_in_tensor_content() -> None:
    value: Any = np.array([[0.5, -1.0]], np.float32)
    for as_content, field in ((True, "tensor_content"), (False, "float_val")):
        proto = messages.TensorProto()
        tensors.to_tensor_proto(value, proto, as_content=as_content)
        assert [one.name for one, _ in proto.ListFields()] == ["dtype", "tensor_shape", field]
