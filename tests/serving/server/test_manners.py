"""A server as a cluster wants it: live before it is ready, not ready before it ends, with logs that name the request."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("uvicorn")

from msplit.serving.server import messages, tensors  # noqa: E402
from tests.serving.server.running import Server, start_trivial  # noqa: E402
from tests.serving.server.trivial import BROKEN, WIDTH  # noqa: E402

PREDICT = "/tensorflow.serving.PredictionService/Predict"
STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
HEALTH = "/grpc.health.v1.Health/"
ROWS = {"instances": [[1.0] * WIDTH]}
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def call(server: Server, path: str, request: Any, answer: str, **options: Any) -> Any:
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
        ask = own.unary_unary(path, type(request).SerializeToString, getattr(messages, answer).FromString)
        return ask.with_call(request, timeout=20, **options)


def predict(server: Server, first: float = 1.0, **options: Any) -> Any:
    request = messages.PredictRequest()
    request.model_spec.name = "double"
    tensors.to_tensor_proto(np.full((1, WIDTH), first, np.float32), request.inputs["x"], as_content=True)
    return call(server, PREDICT, request, "PredictResponse", **options)


def health(server: Server, name: str = "") -> int:
    request = messages.HealthCheckRequest(service=name)
    return call(server, f"{HEALTH}Check", request, "HealthCheckResponse")[0].status


def state(server: Server) -> list[tuple[int, int]]:
    request = messages.GetModelStatusRequest()
    request.model_spec.name = "double"
    found = call(server, STATUS, request, "GetModelStatusResponse")[0]
    return [(one.version, one.state) for one in found.model_version_status]


def soon(true: Callable[[], bool]) -> None:
    ended = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ended
        time.sleep(0.01)


def http(server: Server, path: str, body: Any = None, **headers: str) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.rest}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode(), lower(answer.headers)
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read().decode(), lower(problem.headers)


def lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@pytest.mark.parametrize("options", [(), ("log=text",), ("log=json", "fronts=2")], ids=["as it is", "text", "fronts"])
def test_what_a_client_asks_for_can_not_fill_the_log(options: tuple[str, ...]) -> None:
    """Another protocol is not spoken: the request is answered as any other, and what is no HTTP by one status."""
    server = start_trivial(*options)
    try:
        for upgrade in ("websocket", "h2c", "nonsense\x1b[2J"):
            keys = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}
            with contextlib.closing(HTTPConnection("127.0.0.1", server.rest, timeout=20)) as client:
                for path, wanted in (("/v1/models/double", 200), ("/nowhere", 404)):
                    client.request("GET", path, headers={"Connection": "Upgrade", "Upgrade": upgrade, **keys})
                    answer = client.getresponse()
                    assert (answer.status, answer.getheader("upgrade")) == (wanted, None)
                    assert json.loads(answer.read())
        with socket.create_connection(("127.0.0.1", server.rest), timeout=20) as client:
            client.sendall(b"GET\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400")
    finally:
        code, said = server.stop()
    assert code == 0
    assert not re.search("(?i)upgrade|websocket|invalid", said)


def test_it_is_live_and_not_ready_until_its_models_are(tmp_path: Path) -> None:
    running = start_trivial(f"until={tmp_path / 'go'}", until="listening:")
    try:
        for path in ("/healthz", "/livez", "/v2/health/live"):
            assert running.http(path) == (200, {"live": True})
        for path in ("/readyz", "/v2/health/ready"):
            assert running.http(path) == (503, {"error": "models are being opened: double"})
        assert running.http("/v2/models/double/ready")[0] == 503
        assert running.http("/v1/models/double:predict", ROWS) == (503, {"error": "model double is being opened"})
        assert running.http("/v1/models/nobody:predict", ROWS)[0] == 404
        with pytest.raises(grpc.RpcError) as caught:
            predict(running)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "model double is being opened"
        assert [health(running), health(running, "double")] == [2, 2]
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            health(running, "nobody")
        assert state(running) == [(1, 20)]
        assert "msplit_pool" in running.text("/metrics")
        with grpc.insecure_channel(running.address) as own:
            kinds = messages.HealthCheckRequest.SerializeToString, messages.HealthCheckResponse.FromString
            watches = [
                own.unary_stream(f"{HEALTH}Watch", *kinds)(messages.HealthCheckRequest(service=name), timeout=20)
                for name in ("", "double", "nobody")
            ]
            assert [next(one).status for one in watches] == [2, 2, 3]
            (tmp_path / "go").touch()
            assert [next(one).status for one in watches[:2]] == [1, 1]
            assert [health(running), health(running, "double")] == [1, 1]
            assert running.http("/readyz") == (200, {"ready": True})
            assert running.http("/v2/models/double/ready") == (200, {"ready": True})
            assert state(running) == [(1, 30)]
            np.testing.assert_array_equal(predict(running)[0].outputs["first"].float_val, [1.0])
            code, _ = running.stop()
            assert code == 0
            assert [[one.status for one in watch] for watch in watches] == [[2], [2], []]
    finally:
        running.process.kill()


def test_it_ends_while_its_models_are_opened(tmp_path: Path) -> None:
    running = start_trivial(f"until={tmp_path / 'go'}", until="listening:")
    code, said = running.stop(signal.SIGINT)
    assert code == -signal.SIGINT, said  # as Python ends by a KeyboardInterrupt, which `msplit` takes
    assert said.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("fronts", [1, 2])
def test_it_goes_on_answering_while_it_is_not_ready_any_more(fronts: int) -> None:
    running = start_trivial("lame_duck=1.5", *([f"fronts={fronts}"] if fronts > 1 else ()))
    try:
        running.process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        soon(lambda: running.http("/readyz") == (503, {"error": "the server is stopping"}))
        assert running.http("/healthz") == (200, {"live": True})
        # Each front end hears of it at its own time.
        soon(lambda: [health(running), health(running, "double")] == [2, 2])
        status, _, headers = http(running, "/v1/models/double:predict", ROWS)
        assert (status, headers["connection"]) == (200, "close"), "its connection would keep a client here"
        predict(running)
        assert time.monotonic() - begun < 1.5, "it was the lame duck's time that all this took"
        running.process.communicate(timeout=20)
        assert running.process.returncode == 0
        assert time.monotonic() - begun >= 1.5
    finally:
        running.process.kill()


def test_a_second_signal_ends_it_at_once() -> None:
    running = start_trivial("lame_duck=60")
    try:
        running.process.send_signal(signal.SIGTERM)
        soon(lambda: running.http("/readyz")[0] == 503)
        assert running.stop()[0] == 0
    finally:
        running.process.kill()


@pytest.fixture(scope="module")
def logged() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """A server that logs in JSON, and what it has said when it has ended."""
    running = start_trivial("log=json", "access=1")
    found: list[list[dict[str, Any]]] = []

    def said() -> list[dict[str, Any]]:
        if not found:
            ids = {"x-request-id": "a-1", "traceparent": PARENT}
            for path in ("/v1/models/double:predict", "/v1/models/nobody:predict"):
                _, _, headers = http(running, path, ROWS, **ids)
                assert {name: headers.get(name) for name in ids} == ids
            _, _, headers = http(running, "/healthz", **{"x-request-id": "a b\tc", "traceparent": "00-1-2-3"})
            assert not {"x-request-id", "traceparent"} & {name.lower() for name in headers}
            _, got = predict(running, metadata=[*ids.items(), ("other", "1")])
            assert dict(got.initial_metadata()) == ids
            with pytest.raises(grpc.RpcError) as caught:
                predict(running, BROKEN, metadata=[("x-request-id", "a-2")])
            assert dict(caught.value.initial_metadata()) == {"x-request-id": "a-2"}
            body = {"id": "of\nKServe", "inputs": [{"name": "x", "shape": [1, WIDTH], "datatype": "FP32"}]}
            body["inputs"][0]["data"] = [BROKEN] * WIDTH
            http(running, "/v2/models/double/infer", body)
            http(running, "/a%0a::error::%1b[2J")
            code, text = running.stop()
            assert code == 0, text
            found.append([json.loads(line) for line in text.splitlines()])
        return found[0]

    yield said
    running.process.kill()


def test_each_line_is_json_and_has_a_time_and_a_level(logged: Callable[[], list[dict[str, Any]]]) -> None:
    assert [one["message"] for one in logged()][-1] == "stopping: SIGTERM came"
    for one in logged():
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["time"])
        assert one["level"] in ("INFO", "ERROR")


def test_the_access_log_names_the_request(logged: Callable[[], list[dict[str, Any]]]) -> None:
    mine = [one for one in logged() if one.get("request_id") == "a-1"]
    assert [(one["protocol"], one["message"], one["status"], one.get("model"), one.get("version")) for one in mine] == [
        ("http", "POST /v1/models/double:predict", "OK", "double", 1),
        ("http", "POST /v1/models/nobody:predict", "NOT_FOUND", None, None),
        ("tensorflow.serving.PredictionService", PREDICT, "OK", "double", 1),
    ]
    assert {one["traceparent"] for one in mine} == {PARENT}
    assert all(0 <= one["seconds"] < 20 for one in mine)


def test_an_error_is_logged_with_its_cause_and_its_request(logged: Callable[[], list[dict[str, Any]]]) -> None:
    errors = [one for one in logged() if one["level"] == "ERROR"]
    assert [one["request_id"] for one in errors] == ["a-2", "of\nKServe"]
    for one in errors:
        assert (one["model"], one["version"]) == ("double", 1)
        assert one["message"] == "a request failed: the key is under /home/mat"
        assert one["cause"].startswith("Traceback (most recent call last):")
        assert one["cause"].endswith("RuntimeError: the key is under /home/mat")


def test_text_has_a_line_for_each_record_whatever_a_client_says() -> None:
    running = start_trivial("log=text", "access=1")
    try:
        http(running, "/a%0a::error::%1b[2J", **{"x-request-id": "b-1"})
        body = {"id": "1\n2", "inputs": [{"name": "x", "shape": [1, WIDTH], "datatype": "FP32"}]}
        body["inputs"][0]["data"] = [BROKEN] * WIDTH
        http(running, "/v2/models/double/infer", body)
        _, said = running.stop()
    finally:
        running.process.kill()
    lines = said.splitlines()
    assert [line for line in lines if not re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z (INFO|ERROR) |    ", line)] == []
    access = next(line for line in lines if "b-1" in line)
    assert r"GET /a::error::\x1b[2J request_id" in access
    assert "\x1b" not in said
    error = next(line for line in lines if " ERROR " in line)
    assert error.endswith(r'the key is under /home/mat model="double" version=1 request_id="1\n2"')
    assert "    RuntimeError: the key is under /home/mat" in lines


def test_without_a_share_no_request_is_logged() -> None:
    running = start_trivial("log=json")
    http(running, "/v1/models/double:predict", ROWS)
    _, said = running.stop()
    assert [json.loads(line)["message"] for line in said.splitlines()] == ["stopping: SIGTERM came"]


def test_a_signal_while_a_model_is_opened_is_no_fault(tmp_path: Path, caplog: Any) -> None:
    from msplit.serving.server.config import ModelConfig
    from msplit.serving.server.versions import Polling, Versions

    def opens(*of_what: Any) -> Any:
        raise KeyboardInterrupt

    (tmp_path / "m.pb").touch()
    made = Versions(opens, Polling())
    with contextlib.closing(made), pytest.raises(KeyboardInterrupt):
        made.start([ModelConfig("m", tmp_path / "m.pb")], lambda what, share: None)
    assert "fault" not in caplog.text
    assert "can not be opened" not in caplog.text
    assert made.models.unready == ("m",)
