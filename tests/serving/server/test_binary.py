"""Tensors in binary behind the JSON of the Open Inference Protocol, as Triton's client for HTTP sends and wants them; compressed bodies."""

from __future__ import annotations

import gzip
import json
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("uvicorn")

from msplit.serving.server import json_body, messages  # noqa: E402
from msplit.serving.server.tensors import Refusal  # noqa: E402
from tests.serving.server.running import Server, start_trivial  # noqa: E402
from tests.serving.server.trivial import WIDTH  # noqa: E402

HEAD = "inference-header-content-length"
X = np.arange(4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)
TENSOR = {"name": "x", "shape": [4, WIDTH], "datatype": "FP32", "parameters": {"binary_data_size": X.nbytes}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start_trivial()
    yield running
    running.process.kill()
    running.process.communicate()


def infer(server: Server, body: bytes, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{server.rest}/v2/models/double/infer", body, named)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read(), {name.lower(): value for name, value in answer.headers.items()}
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read(), {}


def packed(values: bytes = X.tobytes(), tensor: dict[str, Any] = TENSOR, **others: Any) -> tuple[bytes, str]:
    head = json.dumps({"inputs": [tensor], **others}).encode()
    return head + values, str(len(head))


def arrays(data: bytes, size: int) -> dict[str, np.ndarray]:
    """Outputs of an answer, by the sizes that its head tells."""
    found, position = {}, size
    for one in json.loads(data[:size])["outputs"]:
        if "data" in one:
            value = np.array(one["data"], np.float32)
        else:
            end = position + one["parameters"]["binary_data_size"]
            value, position = np.frombuffer(data[position:end], np.float32), end
        found[one["name"]] = value.reshape(one["shape"])
    assert position == len(data)
    return found


@pytest.mark.parametrize(
    ("asked", "binary"),
    [
        ({"parameters": {"binary_data_output": True}}, {"y", "first"}),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": True}}, {"name": "first"}]}, {"y"}),
        (
            {
                "parameters": {"binary_data_output": True},
                "outputs": [{"name": "y", "parameters": {"binary_data": False}}, {"name": "first"}],
            },
            {"first"},
        ),
        ({}, set()),
    ],
)
def test_values_behind_the_json(server: Server, asked: dict[str, Any], binary: set[str]) -> None:
    body, head = packed(id="7", **asked)
    status, data, headers = infer(server, body, **{HEAD: head})
    assert status == 200, data
    assert headers["content-type"] == ("application/octet-stream" if binary else "application/json")
    assert (HEAD in headers) == bool(binary)
    size = int(headers.get(HEAD, len(data)))
    said = json.loads(data[:size])
    assert (said["id"], said["model_name"]) == ("7", "double")
    assert {one["name"] for one in said["outputs"] if "data" not in one} == binary
    found = arrays(data, size)
    np.testing.assert_array_equal(found["y"], 2 * X)
    np.testing.assert_array_equal(found["first"], X[:, 0])


WRONG = {
    "too few bytes": (packed(X.tobytes()[:-4]), "bytes came"),
    "too many bytes": (packed(X.tobytes() + b"1234"), "128 bytes of binary data; 132 came"),
    "a negative size": (packed(tensor={**TENSOR, "parameters": {"binary_data_size": -1}}), "binary_data_size"),
    "a size that is none": (packed(tensor={**TENSOR, "parameters": {"binary_data_size": True}}), "binary_data_size"),
    "parameters that are none": (packed(tensor={**TENSOR, "parameters": [1]}), "must be an object"),
    "values twice": (packed(tensor={**TENSOR, "data": [1.0]}), "data beside it"),
    "another shape": (packed(tensor={**TENSOR, "shape": [3, WIDTH]}), "128 bytes came"),
    "a vast shape": (packed(tensor={**TENSOR, "shape": [1 << 70, WIDTH]}), "no array has"),
    "a negative shape": (packed(tensor={**TENSOR, "shape": [-4, WIDTH]}), "negative"),
    "another type": (packed(tensor={**TENSOR, "datatype": "INT32"}), "the model takes float32"),
    "a head beyond the body": ((packed()[0], "100000"), "of a body of"),
    "a head that is no number": ((packed()[0], "-3"), HEAD),
    "a head in the middle": ((packed()[0], "9"), "JSON"),
    "no head": ((packed()[0], None), "JSON"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told(server: Server, name: str) -> None:
    (body, head), said = WRONG[name]
    status, data, _ = infer(server, body, **({} if head is None else {HEAD: head}))
    assert status == 400, data
    assert said in json.loads(data)["error"]


@pytest.mark.parametrize("parameter", ["classification", "shared_memory_region"])
def test_what_is_not_done_is_not_left_out(server: Server, parameter: str) -> None:
    body, head = packed(outputs=[{"name": "y", "parameters": {parameter: 3}}])
    assert infer(server, body, **{HEAD: head})[0] == 501


def test_strings_are_behind_their_lengths() -> None:
    texts = ["ab", "", "é"]
    values = b"".join(len(one.encode()).to_bytes(4, "little") + one.encode() for one in texts)
    size = {"binary_data_size": len(values)}
    body, head = packed(values, {"name": "s", "shape": [3], "datatype": "BYTES", "parameters": size})
    from msplit.serving.pool.ports import Port

    ports = {"s": Port("object", (None,))}
    found = json_body.read_open(bytearray(body), int(head))[1](ports)["s"]
    assert [bytes(one) for one in found] == [one.encode() for one in texts]
    assert all(type(one) is bytes for one in found)
    with pytest.raises(Refusal, match="lengths do not fit"):
        json_body.read_open(bytearray(body[:-1].replace(str(len(values)).encode(), b"13")), int(head))[1](ports)


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
def test_a_compressed_request_is_read(server: Server, kind: str) -> None:
    body, head = packed(parameters={"binary_data_output": True})
    data = gzip.compress(body) if kind == "gzip" else zlib.compress(body)
    status, answer, headers = infer(server, data, content_encoding=kind, **{HEAD: head})
    assert status == 200, answer
    np.testing.assert_array_equal(arrays(answer, int(headers[HEAD]))["y"], 2 * X)
    for broken in (data[:-9], data + b"x", b"x" + data):
        status, answer, _ = infer(server, broken, content_encoding=kind, **{HEAD: head})
        assert (status, kind in json.loads(answer)["error"]) == (400, True)


def test_a_few_bytes_do_not_become_many(server: Server) -> None:
    bomb = gzip.compress(bytes(80 << 20), 1)
    assert len(bomb) < 1 << 20
    status, answer, _ = infer(server, bomb, content_encoding="gzip")
    assert (status, "67,108,864 bytes" in json.loads(answer)["error"]) == (429, True)


@pytest.mark.parametrize(
    ("accept", "compressed"), [("gzip, deflate", True), ("br;q=1, gzip;q=0.5", True), ("gzip;q=0", False), ("", False)]
)
def test_a_large_answer_is_compressed_for_who_takes_it(accept: str, compressed: bool) -> None:
    from starlette.requests import Request

    from msplit.serving.server import rest
    from msplit.serving.server.metrics import Metrics
    from msplit.serving.server.models import Models
    from msplit.serving.server.service import Service

    async def handler(call: rest.HttpCall) -> Any:
        return b"1" * size

    async def ask() -> Any:
        request = Request(
            {"type": "http", "method": "GET", "path": "/", "headers": [(b"accept-encoding", accept.encode())]}
        )
        return await rest._answer(Service(models, Metrics(models)), 9, handler, request)

    import asyncio

    models = Models({})
    for size in (100, 1 << 16):
        answer = asyncio.run(ask())
        assert (answer.headers.get("content-encoding") == "gzip") == (compressed and size > 100)
        assert (gzip.decompress(answer.body) if "content-encoding" in answer.headers else answer.body) == b"1" * size


def test_a_compressed_request_over_grpc_is_read(server: Server) -> None:
    request = messages.ModelInferRequest(model_name="double", raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=X.shape)
    with grpc.insecure_channel(server.address, compression=grpc.Compression.Gzip) as own:
        ask = own.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", None, messages.ModelInferResponse.FromString
        )
        answer = ask(request.SerializeToString(), timeout=20)
    np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32), 2 * X.ravel())


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/double:classify", 400),  # of a signature that takes no examples
        ("/v1/models/nobody/versions/1:regress", 404),
        ("/v2/systemsharedmemory/status", 501),
        ("/v2/models/double/stats", 501),
        ("/v1/models/double:explain", 400),  # as TensorFlow Serving says it
        ("/v2/models/nobody", 404),
        ("/v3", 404),
        ("/", 404),
    ],
)
def test_paths_that_there_are_not(server: Server, path: str, status: int) -> None:
    found, answer = server.http(path, {} if ":" in path else None)
    assert (found, answer.keys()) == (status, {"error"})
