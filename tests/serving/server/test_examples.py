"""Classify, Regress and MultiInference of TensorFlow Serving with `tf.Example`s: its own clients, and its answers."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

grpc = pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("tensorflow_serving")
pytest.importorskip("torch")

import msplit  # noqa: E402
from msplit.inputs.examples import encode  # noqa: E402
from msplit.progress import silent  # noqa: E402
from msplit.run.request import RunRequest  # noqa: E402
from msplit.serving.pool.ports import Port  # noqa: E402
from msplit.serving.pool.settings import PoolSettings  # noqa: E402
from msplit.serving.server import examples, json_body, making, messages  # noqa: E402
from msplit.serving.server.config import ModelConfig  # noqa: E402
from msplit.serving.server.metrics import Metrics  # noqa: E402
from msplit.serving.server.models import Signature, Version  # noqa: E402
from msplit.serving.server.service import InferenceRequest, Service  # noqa: E402
from msplit.serving.server.tensors import Refusal, StatusCode  # noqa: E402
from tests import forked  # noqa: E402
from tests.example_models import CLASSIFY, LABELS, PREDICT, REGRESS, export  # noqa: E402
from tests.fuzz.requests import damaged  # noqa: E402
from tests.run.test_host_builds import QUICK  # noqa: E402
from tests.serving.server.asking import answer  # noqa: E402
from tests.serving.server.running import Server, started  # noqa: E402
from tests.string_models import example, strings  # noqa: E402

pytestmark = pytest.mark.tf
NAMES = [label.decode() for label in LABELS]
OPTIONS = ("--part=signature=all", "--engine", "tensorflow", "--batch", "1,4", "--groups", "1", "--pool", "max-rows=12")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "model"
    export(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    begin = functools.partial(forked.Popen, server=forked.TENSORFLOW, quick=True)
    command = ["msplit", "serve", "--model", f"m={model}", *OPTIONS]
    running = started(begin, lambda port, rest: [*command, "--port", port, "--rest_api_port", rest])
    yield running
    assert running.stop()[0] == 0


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[Any]:
    from tensorflow_serving.apis import prediction_service_pb2_grpc

    with grpc.insecure_channel(server.address) as channel:
        yield prediction_service_pb2_grpc.PredictionServiceStub(channel)


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[..., tuple[Any, Any]]:
    """TensorFlow's scores and sums of serialized examples."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(model)).signatures

    def ask(*rows: bytes) -> tuple[Any, Any]:
        named = {"inputs": tf.constant(rows)}
        return loaded["scores"](**named)["scores"].numpy(), loaded["regression"](**named)["outputs"].numpy()

    return ask


def asked(kind: str, rows: list[bytes], signature: str = "", context: bytes | None = None) -> Any:
    """A request of TensorFlow Serving's for classes or regressions."""
    import tensorflow as tf
    from tensorflow_serving.apis import classification_pb2, regression_pb2

    request = getattr({"Classification": classification_pb2, "Regression": regression_pb2}[kind], f"{kind}Request")()
    request.model_spec.name, request.model_spec.signature_name = "m", signature
    listed = request.input.example_list if context is None else request.input.example_list_with_context
    listed.examples.extend(map(tf.train.Example.FromString, rows))
    if context is not None:
        listed.context.MergeFromString(context)
    return request


ROWS = [
    {"price": [1.5], "clicks": [3], "word": [b"\xff\xfe"]},
    {"price": [-2.0]},
    {"price": [0.25], "word": [b"cat"], "unknown": [1.0]},
]


def serialized(*rows: dict[str, list[Any]]) -> list[bytes]:
    return [example(**row) for row in rows]


def test_classes_and_scores(stub: Any, expected: Any) -> None:
    rows = serialized(*ROWS)
    response = stub.Classify(asked("Classification", rows), timeout=60)
    found = [[(one.label, one.score) for one in row.classes] for row in response.result.classifications]
    assert [[label for label, _ in row] for row in found] == [NAMES] * 3
    np.testing.assert_allclose([[score for _, score in row] for row in found], expected(*rows)[0], rtol=1e-6)
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("m", 1, "serving_default")


@pytest.mark.parametrize(("signature", "labels", "scored"), [("labels", NAMES, False), ("scores", ["", "", ""], True)])
def test_what_a_model_does_not_give_is_empty(
    server: Server, stub: Any, expected: Any, signature: str, labels: list[str], scored: bool
) -> None:
    rows = serialized(*ROWS)
    wanted = expected(*rows)[0] if scored else np.zeros((3, 3))
    found = stub.Classify(asked("Classification", rows, signature), timeout=60).result.classifications
    assert [[one.label for one in row.classes] for row in found] == [labels] * 3
    np.testing.assert_allclose([[one.score for one in row.classes] for row in found], wanted, rtol=1e-6)
    body = {"signature_name": signature, "examples": [{"price": 0.25, "word": "cat"}]}
    status, answer = server.http("/v1/models/m:classify", body)
    assert status == 200
    assert [label for label, _ in answer["results"][0]] == labels
    np.testing.assert_allclose([score for _, score in answer["results"][0]], wanted[2], rtol=1e-6)


@pytest.mark.parametrize("signature", ["regression", "flat"])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_regressions_of_any_number_of_rows(stub: Any, expected: Any, signature: str, count: int) -> None:
    rows = serialized(*ROWS * 3)[:count]
    found = stub.Regress(asked("Regression", rows, signature), timeout=60).result.regressions
    np.testing.assert_allclose([one.value for one in found], expected(*rows)[1][:, 0], rtol=1e-6)


def test_a_context_is_merged_into_each_example(server: Server, stub: Any, expected: Any) -> None:
    """Features of an example go before those of the context."""
    context = {"price": [7.0], "word": [b"dog"], "clicks": [2]}
    merged = serialized(*({**context, **row} for row in ({}, *ROWS)))
    request = asked("Regression", serialized({}, *ROWS), "regression", example(**context))
    found = stub.Regress(request, timeout=60).result.regressions
    np.testing.assert_allclose([one.value for one in found], expected(*merged)[1][:, 0], rtol=1e-6)
    rows = [{}, {"price": [1.5], "clicks": True}, {"word": {"b64": base64.b64encode(b"\xff").decode()}}]
    merged = serialized(*({**context, **row} for row in ({}, {"price": [1.5], "clicks": [1]}, {"word": [b"\xff"]})))
    body = {"context": {"price": 7.0, "word": ["dog"], "clicks": 2}, "examples": rows, "signature_name": "regression"}
    status, answer = server.http("/v1/models/m:regress", body)
    assert status == 200, answer
    np.testing.assert_allclose(answer["results"], expected(*merged)[1][:, 0], rtol=1e-6)


def test_over_rest(server: Server, expected: Any) -> None:
    examples = [
        {"price": 1.5, "clicks": [3], "word": {"b64": base64.b64encode(b"\xff\xfe").decode()}},
        {"price": [-2.0], "clicks": []},
        {"price": 0.25, "word": "cat", "unknown": ["a", "b"]},
    ]
    status, answer = server.http("/v1/models/m/versions/1:classify", {"examples": examples})
    assert (status, answer.keys()) == (200, {"results"})
    assert [[label for label, _ in row] for row in answer["results"]] == [NAMES] * 3
    found = [[score for _, score in row] for row in answer["results"]]
    np.testing.assert_allclose(found, expected(*serialized(*ROWS))[0], rtol=1e-6)
    long = {**examples[0], "unknown": [0.5] * 50_000}  # read in pieces
    status, answer = server.http(
        "/v1/models/m:regress", {"signature_name": "flat", "examples": [long, examples[1]] * 2}
    )
    wanted = expected(*serialized(*ROWS[:2]))[1][:, 0]
    np.testing.assert_allclose(answer["results"], [*wanted, *wanted], rtol=1e-6)


def test_several_inferences_at_once(stub: Any, expected: Any) -> None:
    from tensorflow_serving.apis import inference_pb2

    rows = serialized(*ROWS)
    request = inference_pb2.MultiInferenceRequest(input=asked("Regression", rows).input)
    for signature, method in (("regression", REGRESS), ("", CLASSIFY), ("labels", CLASSIFY)):
        task = request.tasks.add(method_name=method)
        task.model_spec.name, task.model_spec.signature_name = "m", signature
    sums, classes, labels = stub.MultiInference(request, timeout=60).results
    scores, totals = expected(*rows)
    found = [one.value for one in sums.regression_result.regressions]
    np.testing.assert_allclose(found, totals[:, 0], rtol=1e-6)
    for result, wanted in ((classes, scores), (labels, np.zeros((3, 3)))):
        answers = result.classification_result.classifications
        assert [[one.label for one in row.classes] for row in answers] == [NAMES] * 3
        np.testing.assert_allclose([[one.score for one in row.classes] for row in answers], wanted, rtol=1e-6)
    assert [one.model_spec.signature_name for one in (sums, classes, labels)] == [
        "regression",
        "serving_default",
        "labels",
    ]

    def refused(code: Any, said: str, **changed: Any) -> None:
        other = inference_pb2.MultiInferenceRequest.FromString(request.SerializeToString())
        for name, value in changed.items():
            setattr(other.tasks[1] if name == "method_name" else other.tasks[1].model_spec, name, value)
        with pytest.raises(grpc.RpcError, match=said) as caught:
            stub.MultiInference(other, timeout=60)
        assert caught.value.code() is code

    wrong = grpc.StatusCode.INVALID_ARGUMENT
    refused(grpc.StatusCode.UNIMPLEMENTED, "Unsupported signature method_name", method_name=PREDICT)
    refused(wrong, "is none for regression", method_name=REGRESS)
    refused(wrong, "Duplicate evaluation of signature: regression", signature_name="regression")
    refused(wrong, "must access the same model name", name="other")
    refused(wrong, "empty model name", name="")
    refused(wrong, "to be float32", signature_name="wide", method_name=REGRESS)
    with pytest.raises(grpc.RpcError, match="there are no tasks"):
        stub.MultiInference(inference_pb2.MultiInferenceRequest(input=request.input), timeout=60)


@pytest.mark.parametrize(
    ("method", "kind", "signature", "rows", "said"),
    [
        ("Classify", "Classification", "", [], "Input is empty."),
        ("Classify", "Classification", "", [{}], "feature price is required|price"),
        ("Classify", "Classification", "", [{"price": [1]}], "price"),
        ("Classify", "Classification", "", ROWS * 5, "more than 12 examples came, the most that are taken"),
        ("Classify", "Classification", "regression", ROWS, "is none for classification; it has inputs -> outputs"),
        ("Regress", "Regression", "", ROWS, "is none for regression; it has inputs -> classes, scores"),
        ("Regress", "Regression", "predict", ROWS, "Expected one input Tensor 'inputs'"),
        ("Regress", "Regression", "nothing", ROWS, "not found in signature def"),
        ("Regress", "Regression", "wide", ROWS, r"Expected output outputs to be float32 \[3\] or \[3, 1\], but got"),
    ],
)
def test_what_is_refused(stub: Any, method: str, kind: str, signature: str, rows: Any, said: str) -> None:
    with pytest.raises(grpc.RpcError, match=said) as caught:
        getattr(stub, method)(asked(kind, serialized(*rows), signature), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_request_for_no_model_is_wrong(stub: Any) -> None:
    from tensorflow_serving.apis import classification_pb2, predict_pb2

    for ask, request in (
        (stub.Predict, predict_pb2.PredictRequest),
        (stub.Classify, classification_pb2.ClassificationRequest),
    ):
        with pytest.raises(grpc.RpcError, match="ModelSpec has no name specified") as caught:
            ask(request(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "'examples' must be a list of at least one"),
        ({"examples": []}, "'examples' must be a list of at least one"),
        ({"examples": {}}, "'examples' must be a list of at least one"),
        ({"examples": [1]}, "example 0 must be an object of features"),
        ({"examples": [{"price": 1.0}], "context": []}, "context must be an object of features"),
        ({"examples": [{"price": 1.0}, {"price": None}]}, "example 1: a feature is a list of strings or of numbers"),
        ({"examples": [{"price": [[1.0]]}]}, "example 0: a feature is a list"),
        ({"examples": [{"price": {"b64": "%"}}]}, "example 0: "),
        ({"examples": [{"price": 1e300}]}, "example 0: "),
        ({"examples": [{"price": 1.0, "clicks": 1 << 63}]}, "more than 64 bits"),
        ({"examples": [{"price": 1.0, "\ud800": 1}]}, "example 0: "),
        ({"examples": [{"price": "a"}]}, "price"),
        ({"examples": [{"price": 1.0}] * 13}, "more than 12 examples came"),
        ({"examples": [{"price": 1.0}], "signature_name": 1}, "'signature_name' key must be a string value."),
        ({"examples": [{"price": 1.0}], "signature_name": "flat"}, "is none for classification"),
    ],
)  # fmt: skip
def test_what_is_refused_over_rest(server: Server, body: Any, said: str) -> None:
    status, answer = server.http("/v1/models/m:classify", body)
    assert (status, answer.keys()) == (400, {"error"})
    assert said in answer["error"]


def test_metadata_has_the_methods_of_the_model(server: Server, stub: Any) -> None:
    from tensorflow_serving.apis import get_model_metadata_pb2

    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "m"
    found = get_model_metadata_pb2.SignatureDefMap()
    stub.GetModelMetadata(request, timeout=60).metadata["signature_def"].Unpack(found)
    methods = {name: one.method_name for name, one in found.signature_def.items()}
    assert methods == {
        "serving_default": CLASSIFY, "labels": CLASSIFY, "scores": CLASSIFY,
        "regression": REGRESS, "flat": REGRESS, "wide": REGRESS, "predict": PREDICT,
    }  # fmt: skip
    default = found.signature_def["serving_default"]
    assert [*default.inputs] == ["inputs"]
    assert sorted(default.outputs) == ["classes", "scores"]
    definitions = server.http("/v1/models/m/metadata")[1]["metadata"]["signature_def"]["signature_def"]
    assert definitions["regression"]["method_name"] == REGRESS


# --- A build, and messages that no client writes


@contextmanager
def built(model: Path, path: Path) -> Iterator[Service]:
    """What answers requests for a build."""
    made = msplit.build(model, path, batches=[2], **QUICK)
    assert made.manifest.method == CLASSIFY
    with making.ready(
        [ModelConfig("m", path)], RunRequest(device="cpu"), PoolSettings(groups=1), progress=silent
    ) as models:
        yield Service(models, Metrics(models))


def test_a_build_answers_alike(model: Path, tmp_path: Path, expected: Any) -> None:
    rows = serialized(*ROWS)
    wanted = expected(*rows)[0]

    def ask(service: Service, data: bytes, method: str = "Classify") -> tuple[int, bytes]:
        return asyncio.run(answer(service, f"/tensorflow.serving.PredictionService/{method}", data, 20.0))

    with built(model, tmp_path / "build") as service:
        status, data = ask(service, asked("Classification", rows).SerializeToString())
        assert status == 0, data
        response = messages.ClassificationResponse.FromString(data)
        found = [[one.score for one in row.classes] for row in response.result.classifications]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        assert [one.label for one in response.result.classifications[2].classes] == NAMES

        # Parts of a request are merged, and of a choice the last one counts; examples that are none are the client's fault.
        def request(*inputs: bytes) -> bytes:
            head = messages.ClassificationRequest()
            head.model_spec.name = "m"
            return head.SerializeToString() + b"".join(part(2, one) for one in inputs)

        def listed(*some: bytes) -> bytes:
            return part(1, b"".join(part(1, one) for one in some))

        with_context = part(2, part(2, rows[1]) + part(1, b"") + part(2, example(word=[b"cat"], price=[0.25])))
        for data, result in (
            (request(listed(rows[0]) + listed(rows[1]), listed(rows[2])), wanted),
            (request(with_context, listed(rows[1])), wanted[1:2]),
            (request(listed(rows[1]) + with_context), wanted[2:]),
        ):
            status, said = ask(service, data)
            assert status == 0, said
            response = messages.ClassificationResponse.FromString(said)
            scores = [[one.score for one in row.classes] for row in response.result.classifications]
            np.testing.assert_allclose(scores, result, rtol=1e-5)
        invalid = StatusCode.INVALID_ARGUMENT.grpc
        for data in (
            b"\xff",
            request(b"\x0a"),
            request(b""),
            request(part(3, b"")),
            request(listed(b"no example")),
            request(listed(b"")),
            request(b"\x08\x01"),
            request(part(1, b"\x08\x01")),
        ):
            assert ask(service, data)[0] == invalid, data
        many = part(2, part(2, rows[0] + part(9, bytes(1 << 20))) + part(1, b"") * 65)
        assert ask(service, request(many)) == (
            StatusCode.RESOURCE_EXHAUSTED.grpc,
            b"the context takes 1,048,634 bytes for each of 65 examples, more than 67,108,864",
        )


def part(number: int, data: bytes) -> bytes:
    """A field of a message."""
    from msplit.serving.server import tensors

    return b"".join(tensors.field(number, [data]))


def test_whatever_comes_is_read_as_protobuf_reads_it_or_refused() -> None:
    """Damaged, repeated and mixed requests: examples and context are those that protobuf finds, merged by it."""
    random = Random(0)
    pool = SimpleNamespace(
        inputs={"inputs": Port("object", (None,), 100)}, outputs={"scores": Port("float32", (None, 3))}
    )
    version = Version("m", 1, {"serving_default": Signature("serving_default", pool)})  # type: ignore[arg-type]
    context: Any = SimpleNamespace(find=lambda *_: version, timeout=None)

    def some() -> bytes:
        return encode(
            {random.choice("abc"): random.choice([[b"x"], [1], [1.5], []]) for _ in range(random.randrange(3))}
        )

    read = 0
    for _ in range(2000):
        request = messages.ClassificationRequest()
        request.model_spec.name = "m"
        listed = request.input.example_list
        if random.random() < 0.5:
            listed = request.input.example_list_with_context
            listed.context.MergeFromString(some())
        for _ in range(random.randrange(4)):
            listed.examples.add().MergeFromString(some())
        data = request.SerializeToString() * random.choice([1, 1, 2])
        for _ in range(random.randrange(3)):
            data = damaged(data, random)
        try:
            theirs = messages.ClassificationRequest.FromString(data).input
        except DecodeError:
            theirs = None  # what is wrong inside of an example the model refuses
        try:
            found = examples.read_classify(context, data).feeds["inputs"]
        except Refusal as problem:
            refused, found = problem.said, None
        kind = theirs.WhichOneof("kind") if theirs is not None else None
        if found is None:
            assert kind is None or not getattr(theirs, kind).examples or "no name" in refused, (data, refused)
            continue
        if theirs is not None:
            wanted = [type(one).FromString(b"") for one in getattr(theirs, kind).examples]
            for whole, one in zip(wanted, getattr(theirs, kind).examples, strict=True):
                if kind == "example_list_with_context":
                    whole.MergeFrom(theirs.example_list_with_context.context)
                whole.MergeFrom(one)
            assert [*map(type(wanted[0]).FromString, found)] == wanted
            read += 1
    assert read > 500


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"scores": np.zeros((2, 3), np.float64)}, r"scores to be float32 \[2, classes\], but got float64 \[2, 3\]"),
        ({"scores": np.zeros(2, np.float32)}, r"but got float32 \[2\]"),
        ({"scores": np.zeros((3, 2), np.float32)}, r"but got float32 \[3, 2\]"),
        ({"classes": np.zeros((2, 2), np.int64)}, r"classes to be object \[2, classes\], but got int64"),
        (
            {"classes": np.full((2, 2), b"a", object), "scores": np.zeros((2, 3), np.float32)},
            r"as classes \[2, 2\], but got float32 \[2, 3\]",
        ),
        ({"classes": np.full((2, 2), b"\xff", object)}, "no UTF-8"),
        ({"outputs": np.zeros((2, 2), np.float32)}, r"outputs to be float32 \[2\] or \[2, 1\]"),
        ({"outputs": np.zeros(2, np.int32)}, "but got int32"),
    ],
)
def test_outputs_that_are_no_classes(outputs: Any, said: str) -> None:
    version: Any = SimpleNamespace(model="m", number=1)
    request = InferenceRequest(None, version, SimpleNamespace(name="s"), {"inputs": strings(b"", b"")})  # type: ignore[arg-type]
    with pytest.raises(Refusal, match=said):
        examples.write(None, request, outputs)  # type: ignore[arg-type]


def test_labels_that_are_no_text_are_bytes_in_json() -> None:
    request = InferenceRequest(None, None, None, {"inputs": strings(b"")})  # type: ignore[arg-type]
    outputs = {"classes": strings(b"a", b"\xff")[None], "scores": np.array([[0.1, np.nan]], np.float32)}
    assert (
        json_body.results(*examples.results_of(request, outputs))
        == b'{"results": [[["a", 0.1], [{"b64": "/w=="}, NaN]]]}'
    )


def test_a_long_feature_is_read_in_pieces_and_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    numbers = [*range(60_000)]
    body = json.dumps({"examples": [{"x": numbers, "s": "a"}], "signature_name": "s"}).encode()
    name, read = examples.read_json(body)
    head, (row,) = read(1)
    assert (name, head) == ("s", b"")
    assert tf.train.Example.FromString(row) == tf.train.Example.FromString(example(x=numbers, s=[b"a"]))
    monkeypatch.setattr(examples, "_LONGEST_FEATURE", 1 << 18)
    with pytest.raises(Refusal, match="example 0 has a feature of more than 262,144 bytes") as caught:
        read(1)
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
