"""Clients that nobody changed ask the real server. It simulates streams on the CPU; models with strings are asked in .ci/clients."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("tensorflow_serving")

from msplit.serving.server import messages  # noqa: E402
from tests.cli.runner import ROOT, SAMPLES, msplit  # noqa: E402
from tests.serving.server.running import Server, free_port, start_new  # noqa: E402

pytestmark = pytest.mark.tf

PREDICT = "/tensorflow.serving.PredictionService/Predict"
OUTPUTS = ("tower_0/out/Sigmoid", "tower_1/out/Sigmoid")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    for number in (3, 12):
        shutil.copytree(SAMPLES / "two_signatures", folder / "pairs" / str(number))
    (folder / "models.config").write_text(f"""
        model_config_list {{
          config {{
            name: "pairs" base_path: "{folder / "pairs"}" model_platform: "tensorflow"
            model_version_policy {{ all {{}} }} version_labels {{ key: "stable" value: 3 }}
          }}
        }}""")
    options = ("--device", "cpu", "--cuda", "effort=fast", "--batch", "1,8", "--groups", "2", "--max_message_mib", "1")
    running = start_new(
        SAMPLES / "mmoe_small.pb", "--model_config_file", folder / "models.config", *options, "--part=signature=all"
    )
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.communicate()


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(server.address) as made:
        yield made


def rows(count: int, seed: int = 0, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width), np.float32)


def session_of(path: Path) -> Callable[[np.ndarray], list[np.ndarray]]:
    """TensorFlow's own answers."""
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        message = tf.compat.v1.GraphDef.FromString(path.read_bytes())
        tf.import_graph_def(message, name="")
    session = tf.compat.v1.Session(graph=graph)
    return lambda x: session.run([f"{name}:0" for name in OUTPUTS], {"x:0": x})


@pytest.fixture(scope="module")
def expected() -> Callable[[np.ndarray], list[np.ndarray]]:
    return session_of(SAMPLES / "mmoe_small.pb")


def request_for(model: str, inputs: dict[str, np.ndarray], **spec: Any) -> Any:
    """A request as the clients of TensorFlow Serving make it."""
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    for name, value in spec.items():
        if name == "version":
            request.model_spec.version.value = value
        else:
            setattr(request.model_spec, name, value)
    for name, array in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
    return request


def ask(channel: Any, request: Any, timeout: float = 30) -> Any:
    from tensorflow_serving.apis import prediction_service_pb2_grpc

    return prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request, timeout=timeout)


def arrays(response: Any) -> dict[str, np.ndarray]:
    import tensorflow as tf

    return {name: tf.make_ndarray(proto) for name, proto in response.outputs.items()}


# --- TensorFlow Serving over gRPC


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("key", ["x", "x:0"])
def test_answers_are_tensorflows(channel: Any, expected: Any, count: int, key: str) -> None:
    x = rows(count, count)
    response = ask(channel, request_for("mmoe_small", {key: x}))
    assert (response.model_spec.name, response.model_spec.version.value) == ("mmoe_small", 1)
    assert response.model_spec.signature_name == "serving_default"
    found = arrays(response)
    for name, value in zip(OUTPUTS, expected(x), strict=True):
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    # Many clients read the field of the type itself.
    assert list(response.outputs[OUTPUTS[0]].float_val) == found[OUTPUTS[0]].ravel().tolist()


@pytest.mark.parametrize("count", [0, 9, 30])
def test_any_number_of_rows_is_answered(channel: Any, server: Server, expected: Any, count: int) -> None:
    """The largest step has 8."""
    x = rows(count, count)
    found = arrays(ask(channel, request_for("mmoe_small", {"x": x})))
    for name, value in zip(OUTPUTS, expected(x), strict=True):
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    status, document = server.http("/v1/models/mmoe_small:predict", {"inputs": {"x": x.reshape(count, 64).tolist()}})
    if count:  # a list without a row says nothing of its width
        assert status == 200, document
        for name, value in zip(OUTPUTS, expected(x), strict=True):
            np.testing.assert_allclose(document["outputs"][name], value, rtol=1e-4, atol=1e-5)
    else:
        assert status == 400


def test_only_outputs_that_are_asked_for_are_sent(channel: Any, expected: Any) -> None:
    x = rows(2)
    request = request_for("mmoe_small", {"x": x})
    request.output_filter.append(f"{OUTPUTS[1]}:0")
    found = arrays(ask(channel, request))
    assert list(found) == [f"{OUTPUTS[1]}:0"]
    np.testing.assert_allclose(found[f"{OUTPUTS[1]}:0"], expected(x)[1], rtol=1e-5, atol=1e-6)


def test_signatures_versions_and_labels(channel: Any) -> None:
    item = rows(3, width=10)
    found = [
        ask(channel, request_for("pairs", {"item": item}, signature_name="embed", **which))
        for which in ({}, {"version": 3}, {"version_label": "stable"})
    ]
    assert [one.model_spec.version.value for one in found] == [12, 3, 3]
    assert [one.model_spec.signature_name for one in found] == ["embed"] * 3
    values = [arrays(one) for one in found]
    assert values[0].keys() == {"vector", "norm"}
    np.testing.assert_allclose(np.linalg.norm(values[0]["vector"], axis=1), values[0]["norm"], rtol=1e-4)
    for name in ("vector", "norm"):
        np.testing.assert_array_equal(values[0][name], values[1][name])
    both = arrays(ask(channel, request_for("pairs", {"left": item, "right": item})))
    assert both["score"].shape == (3, 1)


def test_the_server_has_no_tensorflow(server: Server) -> None:
    libraries = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" in libraries
    assert "tensorflow" not in libraries


def test_metadata_is_the_saved_models(channel: Any, server: Server) -> None:
    from google.protobuf import text_format
    from tensorflow.core.protobuf import saved_model_pb2
    from tensorflow_serving.apis import get_model_metadata_pb2, prediction_service_pb2_grpc

    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "pairs"
    response = prediction_service_pb2_grpc.PredictionServiceStub(channel).GetModelMetadata(request)
    found = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(found)
    saved = saved_model_pb2.SavedModel.FromString((SAMPLES / "two_signatures" / "saved_model.pb").read_bytes())
    wanted = saved.meta_graphs[0].signature_def
    assert set(found.signature_def) == {"serving_default", "embed"}
    for name, signature in found.signature_def.items():
        for kind in ("inputs", "outputs"):
            said = {key: text_format.MessageToString(info) for key, info in getattr(signature, kind).items()}
            assert said == {key: text_format.MessageToString(info) for key, info in getattr(wanted[name], kind).items()}
        assert signature.method_name == wanted[name].method_name
    status, document = server.http("/v1/models/pairs/metadata")
    assert status == 200
    signature = document["metadata"]["signature_def"]["signature_def"]["embed"]
    assert signature["inputs"]["item"]["tensor_shape"]["dim"][1]["size"] == "10"


def test_status_lists_versions(channel: Any, server: Server) -> None:
    from tensorflow_serving.apis import get_model_status_pb2, model_service_pb2_grpc

    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "pairs"
    found = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(request).model_version_status
    assert [(one.version, one.state) for one in found] == [(12, 30), (3, 30)]
    assert server.http("/v1/models/pairs")[1]["model_version_status"][0] == {
        "version": "12",
        "state": "AVAILABLE",
        "status": {"error_code": "OK", "error_message": ""},
    }
    assert server.http("/v1/models/pairs/versions/3")[1]["model_version_status"][0]["version"] == "3"


# --- What is wrong


def tensor(dtype: int, dims: tuple[int, ...], content: bytes = b"", **values: Any) -> Any:
    proto = messages.TensorProto(dtype=dtype, tensor_content=content, **values)
    for size in dims:
        proto.tensor_shape.dim.add().size = size
    return proto


def raw(**inputs: Any) -> bytes:
    request = messages.PredictRequest()
    request.model_spec.name = "mmoe_small"
    for name, proto in inputs.items():
        request.inputs[name].CopyFrom(proto)
    return request.SerializeToString()


BYTES = rows(2).tobytes()
HOSTILE = {
    "no message": (b"\xff\xff\xff\xff", "INVALID_ARGUMENT", "no PredictRequest"),
    "nothing": (b"", "INVALID_ARGUMENT", "ModelSpec has no name specified"),
    "shape larger than the content": (raw(x=tensor(1, (3, 64), BYTES)), "INVALID_ARGUMENT", "512 bytes came"),
    "negative size": (raw(x=tensor(1, (-2, 64), BYTES)), "INVALID_ARGUMENT", "negative"),
    "two negative sizes": (raw(x=tensor(1, (-2, -64), BYTES)), "INVALID_ARGUMENT", "negative"),
    "sizes whose product wraps": (raw(x=tensor(1, (1 << 62, 1 << 62, 1 << 62), BYTES)), "INVALID_ARGUMENT", "came"),
    "a huge size and one value": (raw(x=tensor(1, (1 << 40, 64), float_val=[1.0])), "INVALID_ARGUMENT", "batch"),
    "a million dimensions": (raw(x=tensor(1, (1 << 62,) * 60_000, float_val=[1.0])), "INVALID_ARGUMENT", "dimensions"),
    "more values than fit": (raw(x=tensor(1, (1,), float_val=[1.0] * 9)), "INVALID_ARGUMENT", "9 values came"),
    "another type": (raw(x=tensor(2, (1, 64), rows(1).astype(np.float64).tobytes())), "INVALID_ARGUMENT", "float64"),
    "a type that there is not": (raw(x=tensor(999, (2, 64), BYTES)), "INVALID_ARGUMENT", "dtype_999"),
    "a resource": (raw(x=tensor(20, (2, 64), BYTES)), "INVALID_ARGUMENT", "resource"),
    "strings": (raw(x=tensor(7, (1, 64), string_val=[b"a"] * 64)), "INVALID_ARGUMENT", "float32"),
    "another rank": (raw(x=tensor(1, (128,), BYTES)), "INVALID_ARGUMENT", "x"),
    "another width": (raw(x=tensor(1, (4, 32), BYTES)), "INVALID_ARGUMENT", "x"),
    "too many rows": (raw(x=tensor(1, (2049, 64), rows(2049).tobytes())), "INVALID_ARGUMENT", "batch of 2049"),
    "more rows of one value than a step has": (raw(x=tensor(1, (9, 64), float_val=[1.0])), "INVALID_ARGUMENT", "of 9"),
    "no input": (raw(), "INVALID_ARGUMENT", "no value for input x"),
    "an input too many": (
        raw(x=tensor(1, (2, 64), BYTES), y=tensor(1, (2, 64), BYTES)),
        "INVALID_ARGUMENT",
        "no input 'y'",
    ),
    "a name that commands": (
        raw(x=tensor(1, (2, 64), BYTES), **{"\n::error::\x1b[2J": tensor(1, (1,), b"\0" * 4)}),
        "INVALID_ARGUMENT",
        r"\n::error::\x1b",
    ),
    "too large": (raw(x=tensor(1, (8192, 64), bytes(8192 * 256))), "RESOURCE_EXHAUSTED", "larger than max"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_told_and_harms_nobody(channel: Any, expected: Any, name: str) -> None:
    data, code, said = HOSTILE[name]
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(PREDICT)(data, timeout=30)
    assert caught.value.code().name == code, caught.value.details()
    assert said in caught.value.details()
    assert "Traceback" not in caught.value.details()
    assert "\n" not in caught.value.details()
    x = rows(2, 7)
    np.testing.assert_allclose(
        arrays(ask(channel, request_for("mmoe_small", {"x": x})))[OUTPUTS[0]], expected(x)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("spec", "code", "said"),
    [
        ({"model": "nobody"}, "NOT_FOUND", "Servable not found for request: Latest(nobody)"),
        ({"version": 7}, "NOT_FOUND", "Servable not found for request: Specific(pairs, 7)"),
        ({"version": -1}, "NOT_FOUND", "Specific(pairs, -1)"),
        ({"version_label": "canary"}, "INVALID_ARGUMENT", "Unrecognized servable version label: canary"),
        ({"signature_name": "regress"}, "INVALID_ARGUMENT", '"regress" not found in signature def'),
    ],
)
def test_what_there_is_not_is_not_found(channel: Any, spec: dict[str, Any], code: str, said: str) -> None:
    spec = {"model": "pairs", **spec}
    model = spec.pop("model")
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, request_for(model, {"item": rows(1, width=10)}, **spec))
    assert caught.value.code().name == code
    assert said in caught.value.details()


def test_not_a_number_is_one_clients_own_business(channel: Any, expected: Any) -> None:
    x = rows(1, 5)
    bad = np.full((1, 64), np.nan, np.float32)
    with ThreadPoolExecutor(16) as threads:
        answers = threads.map(
            lambda number: arrays(ask(channel, request_for("mmoe_small", {"x": bad if number % 2 else x}))), range(64)
        )
        for number, answer in enumerate(answers):
            if number % 2:
                assert np.isnan(answer[OUTPUTS[0]]).all()
            else:
                np.testing.assert_allclose(answer[OUTPUTS[0]], expected(x)[0], rtol=1e-5, atol=1e-6)


def test_a_deadline_ends_the_wait(channel: Any) -> None:
    codes = set()
    for _ in range(50):  # on a busy machine the answer may be there before gRPC looks at its clock
        try:
            ask(channel, request_for("mmoe_small", {"x": rows(1)}), timeout=1e-6)
        except grpc.RpcError as told:
            codes.add(told.code())
            break
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}


def test_many_clients_get_their_own_answers(server: Server, expected: Any) -> None:
    before = steps(server)

    def client(seed: int) -> None:
        with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
            for turn in range(12):
                x = rows(1 + (seed + turn) % 3, 1000 * seed + turn)
                found = arrays(ask(own, request_for("mmoe_small", {"x": x})))
                for name, value in zip(OUTPUTS, expected(x), strict=True):
                    np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(client, range(8)))
    ran, answered = (after - first for after, first in zip(steps(server), before, strict=True))
    assert answered >= 96  # one that was given up before may have its answer only now
    assert ran < answered, "no two requests shared a step"


def steps(server: Server) -> tuple[float, float]:
    text = server.text("/metrics")
    where = r'\{model="mmoe_small",signature="serving_default",version="1"\} ([\d.]+)'
    return tuple(float(re.search(f"msplit_pool_{name}_total{where}", text)[1]) for name in ("steps", "answered"))


# --- TensorFlow Serving over HTTP


def test_rows_and_columns(server: Server, expected: Any) -> None:
    x = rows(2, 3)
    wanted = expected(x)
    status, answer = server.http("/v1/models/mmoe_small:predict", {"instances": x.tolist()})
    assert status == 200, answer
    for column, name in enumerate(OUTPUTS):
        np.testing.assert_allclose([row[name] for row in answer["predictions"]], wanted[column], rtol=1e-5, atol=1e-6)
    for inputs in (x.tolist(), {"x": x.tolist()}):
        status, answer = server.http("/v1/models/mmoe_small/versions/1:predict", {"inputs": inputs})
        assert status == 200, answer
        np.testing.assert_allclose(answer["outputs"][OUTPUTS[1]], wanted[1], rtol=1e-5, atol=1e-6)
    item = rows(2, width=10).tolist()
    body = {"signature_name": "embed", "instances": [{"item": one} for one in item]}
    status, answer = server.http("/v1/models/pairs/labels/stable:predict", body)
    assert status == 200, answer
    assert [row.keys() for row in answer["predictions"]] == [{"vector", "norm"}] * 2
    # A single output has no name.
    status, answer = server.http("/v1/models/pairs:predict", {"inputs": {"left": item, "right": item}})
    assert np.shape(answer["outputs"]) == (2, 1)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("mmoe_small:predict", b"{", 400, "JSON Parse error"),
        ("mmoe_small:predict", b"[" * 100_000, 400, "JSON Parse error"),
        ("mmoe_small:predict", b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "x"),
        ("mmoe_small:predict", [1], 400, "no JSON object"),
        ("mmoe_small:predict", {}, 400, "Missing 'inputs' or 'instances' key"),
        ("mmoe_small:predict", {"inputs": [], "instances": []}, 400, "both"),
        ("mmoe_small:predict", {"instances": []}, 400, "'instances'"),
        ("mmoe_small:predict", {"instances": [[1.0] * 63]}, 400, "x"),
        ("mmoe_small:predict", {"instances": [["a"] * 64]}, 400, "the request has strings"),
        ("mmoe_small:predict", {"instances": [[1.0] * 64, [1.0]]}, 400, "different lengths"),
        ("mmoe_small:predict", {"instances": [{"y": [1.0]}]}, 400, "no input 'y'"),
        ("mmoe_small:predict", {"signature_name": 1, "instances": [1]}, 400, "must be a string"),
        ("pairs:predict", {"instances": [[1.0] * 10]}, 400, "name them"),
        ("nobody:predict", {"instances": [1]}, 404, "Servable not found for request: Latest(nobody)"),
        ("pairs/versions/4:predict", {"instances": [1]}, 404, "Specific(pairs, 4)"),
        ("pairs/versions/x:predict", {"instances": [1]}, 400, "Failed to convert version: x to numeric."),
        (f"pairs/versions/{1 << 63}", None, 400, f"Failed to convert version: {1 << 63} to numeric."),
        ("mmoe_small:predict", b"[" + b" " * (2 << 20), 429, "bytes"),
        ("mmoe_small:explain", {"instances": [1]}, 400, "Malformed request: POST /v1/models/mmoe_small:explain"),
    ],
)
def test_errors_over_http(server: Server, path: str, body: Any, status: int, said: str) -> None:
    found, answer = server.http(f"/v1/models/{path}", body)
    assert (found, answer.keys()) == (status, {"error"}), answer
    assert said in answer["error"]


def test_what_can_not_be_told_apart_from_a_number_is_kept(server: Server) -> None:
    status, answer = server.http("/v1/models/mmoe_small:predict", b'{"instances": [[NaN' + b", 1" * 63 + b"]]}")
    assert status == 200
    assert np.isnan(answer["predictions"][0][OUTPUTS[0]]).all()


def test_prometheus_gets_numbers(server: Server) -> None:
    server.http("/v1/models/mmoe_small:predict", {"instances": [[0.0] * 64]})
    server.http("/v1/models/made-up-by-a-client:predict", {})
    text = server.text("/monitoring/prometheus/metrics")
    assert 'msplit_requests_total{model="mmoe_small",protocol="http",status="OK",version="1"}' in text
    assert "msplit_request_seconds_bucket" in text
    assert "made-up" not in text


# --- Open Inference Protocol; Triton's own client asks in .ci/clients


def open_call(channel: Any, method: str, request: Any) -> Any:
    answer = getattr(messages, f"{method}Response")
    call = channel.unary_unary(
        f"/inference.GRPCInferenceService/{method}", type(request).SerializeToString, answer.FromString
    )
    return call(request, timeout=30)


def test_open_inference(channel: Any, expected: Any, server: Server) -> None:
    x = rows(2, 11)
    request = messages.ModelInferRequest(model_name="mmoe_small", id="7")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    tensor.contents.fp32_contents.extend(x.ravel().tolist())
    request.outputs.add(name=OUTPUTS[1])
    for packed in (False, True):
        if packed:
            tensor.ClearField("contents")
            request.raw_input_contents.append(x.tobytes())
        answer = open_call(channel, "ModelInfer", request)
        assert (answer.model_name, answer.model_version, answer.id) == ("mmoe_small", "1", "7")
        assert [(one.name, one.datatype, list(one.shape)) for one in answer.outputs] == [(OUTPUTS[1], "FP32", [2, 1])]
        found = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(2, 1)
        np.testing.assert_allclose(found, expected(x)[1], rtol=1e-5, atol=1e-6)
    body = {"id": "7", "inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 64], "data": x.ravel().tolist()}]}
    status, document = server.http("/v2/models/mmoe_small/infer", body)
    assert status == 200, document
    by_name = {one["name"]: one for one in document["outputs"]}
    np.testing.assert_allclose(by_name[OUTPUTS[0]]["data"], expected(x)[0].ravel(), rtol=1e-5, atol=1e-6)
    assert by_name[OUTPUTS[0]]["shape"] == [2, 1]


def test_open_metadata(channel: Any, server: Server) -> None:
    assert open_call(channel, "ServerLive", messages.ServerLiveRequest()).live
    assert open_call(channel, "ServerReady", messages.ServerReadyRequest()).ready
    assert open_call(channel, "ModelReady", messages.ModelReadyRequest(name="pairs", version="12")).ready
    assert open_call(channel, "ServerMetadata", messages.ServerMetadataRequest()).name == "msplit"
    said = open_call(channel, "ModelMetadata", messages.ModelMetadataRequest(name="pairs"))
    assert {(one.name, one.datatype, tuple(one.shape)) for one in said.inputs} == {
        ("left", "FP32", (-1, 10)),
        ("right", "FP32", (-1, 10)),
    }
    assert [(one.name, list(one.shape)) for one in said.outputs] == [("score", [-1, 1])]
    assert server.http("/v2/models/pairs")[1]["versions"] == ["3", "12"]
    assert server.http("/v2/health/ready") == (200, {"ready": True})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.inputs[0].shape.__setitem__(0, 1 << 60), "bytes came"),
        (lambda one: one.inputs[0].shape.__setitem__(0, -2), "negative"),
        (lambda one: setattr(one.inputs[0], "datatype", "FP128"), "unknown type 'FP128'"),
        (lambda one: setattr(one.inputs[0], "datatype", "BYTES"), "strings whose lengths"),
        (lambda one: one.raw_input_contents.append(b""), "raw_input_contents"),
        (lambda one: one.inputs[0].contents.fp32_contents.append(1.0), "beside raw_input_contents"),
        (lambda one: one.outputs.add(name="nothing"), "not found"),
        (lambda one: setattr(one, "model_version", "one"), "is a number"),
    ],
)
def test_open_inference_refuses(channel: Any, change: Callable[[Any], Any], said: str) -> None:
    request = messages.ModelInferRequest(model_name="mmoe_small", raw_input_contents=[BYTES])
    request.inputs.add(name="x", datatype="FP32", shape=[2, 64])
    change(request)
    with pytest.raises(grpc.RpcError) as caught:
        open_call(channel, "ModelInfer", request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in caught.value.details()


# --- The page


@pytest.mark.parametrize("number", [0, 1])
def test_the_pages_examples_run(server: Server, number: int) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    example = re.findall(r"^```python[^\n]*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[number]
    example = example.replace(":8500", f":{server.port}").replace(":8501", f":{server.rest}")
    exec(compile(example, "example", "exec"), {"__name__": "example"})


# --- The end


def health(channel: Any, name: str = "") -> int:
    call = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        messages.HealthCheckRequest.SerializeToString,
        messages.HealthCheckResponse.FromString,
    )
    return call(messages.HealthCheckRequest(service=name), timeout=10).status


def test_health(channel: Any) -> None:
    assert health(channel) == health(channel, "tensorflow.serving.PredictionService") == 1
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        health(channel, "nobody")


def test_a_port_that_is_taken_is_told_before_anything_is_compiled(server: Server) -> None:
    done = msplit("serve", SAMPLES / "mmoe_small.pb", "--port", server.port, "--rest-api-port", "0")
    assert (done.code, done.out) == (2, "")
    assert f"can not listen on port {server.port} of 127.0.0.1: Address already in use" in done.err
    assert "fix: choose another" in done.err


def test_it_ends_when_what_is_in_flight_is_answered(server: Server, expected: Any) -> None:
    """The last test: the server is gone afterwards."""
    x = rows(1)
    statuses, answered, stop = [], [], threading.Event()
    watch = []

    def watching() -> None:
        with grpc.insecure_channel(server.address) as own:
            call = own.unary_stream("/grpc.health.v1.Health/Watch", None, messages.HealthCheckResponse.FromString)
            watch.extend(one.status for one in call(b"", timeout=60))

    def client() -> None:
        with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
            while not stop.is_set():
                try:
                    found = arrays(ask(own, request_for("mmoe_small", {"x": x})))
                    np.testing.assert_allclose(found[OUTPUTS[0]], expected(x)[0], rtol=1e-5, atol=1e-6)
                    answered.append(time.perf_counter())
                except grpc.RpcError as problem:
                    statuses.append(problem.code().name)
                    return

    threads = [threading.Thread(target=target) for target in (watching, *[client] * 4)]
    for thread in threads:
        thread.start()
    while len(answered) < 20:
        time.sleep(0.01)
    code, said = server.stop()
    stop.set()
    for thread in threads:
        thread.join()
    assert code == 0, said
    assert set(statuses) <= {"UNAVAILABLE"}, "a request that was taken was not answered"
    assert watch == [1, 2]
    assert "Traceback" not in said
    assert free_port()
