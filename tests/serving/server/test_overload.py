"""What a server does under more than it can do, when something breaks inside, and when it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("uvicorn")

from msplit.serving.server import decode, messages, rpc, tensors  # noqa: E402
from tests.serving.server.running import Server, free_port, start_trivial  # noqa: E402
from tests.serving.server.trivial import BROKEN, LOST, LOST_SLOWLY, MOST, SLOW, WIDTH, WRONG  # noqa: E402

ALONE = pytest.mark.parametrize("server", [("log=text",)], ids=["alone"], indirect=True)
"""Only for a server without front ends: steps that take long cost several processes several times as much."""


@pytest.fixture(scope="module", params=[("log=text",), ("fronts=2", "log=text")], ids=["alone", "fronts"])
def server(request: Any) -> Iterator[Server]:
    running = start_trivial(*request.param)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.communicate()


@pytest.fixture
def channel(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as made:
        yield made


def ask(channel: Any, first: float = 0.0, rows: int = 1, timeout: float | None = 20) -> np.ndarray:
    return decode.array_of(asked(channel, first, rows, timeout).result().outputs["y"], "y")


def asked(channel: Any, first: float, rows: int = 1, timeout: float | None = 20) -> Any:
    request = messages.PredictRequest(output_filter=["y"])
    request.model_spec.name = "double"
    tensors.to_tensor_proto(row(first, rows), request.inputs["x"], as_content=True)
    call = channel.unary_unary(
        "/tensorflow.serving.PredictionService/Predict",
        messages.PredictRequest.SerializeToString,
        messages.PredictResponse.FromString,
    )
    return call.future(request, timeout=timeout)


def row(first: float, rows: int = 1) -> np.ndarray:
    return np.full((rows, WIDTH), first, np.float32) + np.arange(WIDTH, dtype=np.float32)


def test_answers_find_who_asked(server: Server) -> None:
    def client(seed: int) -> None:
        with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
            for turn in range(40):
                first = float(seed * 40 + turn) / 2
                np.testing.assert_array_equal(ask(own, first, 1 + turn % 4), 2 * row(first, 1 + turn % 4))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(client, range(6)))


@ALONE
def test_too_many_requests_are_refused_and_the_others_answered(channel: Any, server: Server) -> None:
    def one(number: int) -> str:
        try:
            np.testing.assert_array_equal(ask(channel, SLOW), 2 * row(SLOW))
        except grpc.RpcError as problem:
            return f"{problem.code().name}: {problem.details()}"
        return "answered"

    with ThreadPoolExecutor(3 * MOST) as threads:
        found = sorted(threads.map(one, range(3 * MOST)))
    refused = f"RESOURCE_EXHAUSTED: {MOST} requests wait already, the most that may"
    assert set(found) == {refused, "answered"}
    assert found.count("answered") >= MOST
    np.testing.assert_array_equal(ask(channel, 1.0), 2 * row(1.0))


@ALONE
def test_what_waits_too_long_is_not_run(channel: Any, server: Server) -> None:
    before = gone(server.text("/metrics"))
    for _ in range(
        20
    ):  # on a busy machine the request may come too late to wait, or its client give up before it was sent
        slow = threading.Thread(target=ask, args=(channel, SLOW))
        slow.start()
        time.sleep(0.1)
        with contextlib.suppress(grpc.RpcError):
            ask(channel, 1.0, timeout=0.1)
        slow.join()
        ended = time.monotonic() + 1
        while time.monotonic() < ended:
            if gone(server.text("/metrics")) > before:
                return
            time.sleep(0.02)
    pytest.fail("each was run")


def gone(text: str) -> float:
    """Requests that were not run: too late, or cancelled since their client had gone."""
    lines = [
        line
        for line in text.splitlines()
        if line.startswith(("msplit_pool_timed_out_total", "msplit_pool_cancelled_total"))
    ]
    assert len(lines) == 2
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_faults_inside_are_logged_and_not_told(channel: Any, server: Server) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, BROKEN)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error; the server's log has more"
    status, answer = server.http("/v1/models/double:predict", {"instances": row(BROKEN).tolist()})
    assert (status, answer) == (500, {"error": "internal error; the server's log has more"})
    np.testing.assert_array_equal(ask(channel, 1.0), 2 * row(1.0))


def test_a_server_whose_gpu_fails_says_so_and_ends() -> None:
    """Whoever watches it starts another one: this process can not go on."""
    running = start_trivial()
    try:
        with grpc.insecure_channel(running.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
            np.testing.assert_array_equal(ask(own, 1.0), 2 * row(1.0))
            with pytest.raises(grpc.RpcError) as caught:
                ask(own, LOST)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == FAILED
            for path in ("/v2/health/ready", "/readyz"):
                assert running.http(path) == (503, {"error": FAILED})
            for first in (1.0, LOST):
                with pytest.raises(grpc.RpcError) as caught:
                    ask(own, first)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert caught.value.details() == FAILED
        said, _ = running.process.communicate(timeout=20)
        assert running.process.returncode == 2
        assert FAILED in said
    finally:
        running.process.kill()


def runs(text: str) -> bool:
    """True while a step runs."""
    return any(line.startswith("msplit_pool_in_flight{") and line.endswith(" 1.0") for line in text.splitlines())


FAILED = "the GPU failed: CUDA error: an illegal memory access was encountered"


def test_a_server_whose_gpu_fails_while_nobody_waits_ends() -> None:
    """Its client goes when the step runs. One that goes after so many ms goes before that where the machine is busy, and nothing fails."""
    running = start_trivial()
    try:
        with grpc.insecure_channel(running.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
            going = asked(own, LOST_SLOWLY)
            while not going.done() and not runs(running.text("/metrics")):
                time.sleep(0.01)
            going.cancel()
        said, _ = running.process.communicate(timeout=20)
        assert running.process.returncode == 2
        assert FAILED in said
    finally:
        running.process.kill()


def test_a_value_that_the_model_can_not_take_is_the_clients_fault(channel: Any, server: Server) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, WRONG)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "GatherV2 failed: index out of range in self"
    status, answer = server.http("/v1/models/double:predict", {"instances": row(WRONG).tolist()})
    assert (status, answer) == (400, {"error": "GatherV2 failed: index out of range in self"})
    np.testing.assert_array_equal(ask(channel, 1.0), 2 * row(1.0))


@pytest.mark.parametrize("options", [(), ("fronts=2",)])
def test_who_asks_while_it_stops_gets_an_answer(options: tuple[str, ...]) -> None:
    """Nothing is cancelled, and no connection is accepted and closed without a word."""
    running = start_trivial(*options)
    said: list[str] = []
    over = threading.Event()

    def client() -> None:
        with grpc.insecure_channel(running.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
            while not over.is_set():
                try:
                    ask(own, 1.0)
                    said.append("answered")
                except grpc.RpcError as problem:
                    said.append(problem.code().name)
                    time.sleep(0.002)

    def browser() -> None:
        while not over.is_set():
            try:
                with socket.create_connection(("127.0.0.1", running.rest), 10) as connection:
                    connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
                    said.append(connection.recv(12).decode() or "nothing")
            except ConnectionRefusedError:
                time.sleep(0.002)
            except OSError as problem:
                said.append(type(problem).__name__)

    try:
        threads = [threading.Thread(target=one) for one in (*[client] * 6, browser, browser)]
        for thread in threads:
            thread.start()
        ended = time.monotonic() + 60
        while said.count("answered") < 6 or "HTTP/1.1 200" not in said:
            assert time.monotonic() < ended
            time.sleep(0.01)
        code, told = running.stop()
        over.set()
        for thread in threads:
            thread.join()
        assert code == 0, told
        assert set(said) <= {"answered", "UNAVAILABLE", "HTTP/1.1 200", "HTTP/1.1 503"}
        assert {"answered", "UNAVAILABLE", "HTTP/1.1 200"} <= set(said)
        assert "Traceback" not in told
    finally:
        running.process.kill()


def test_no_connection_comes_about_while_it_ends() -> None:
    """gRPC would cancel what such a client asks. Connections that nobody has looked at yet are ended, too."""

    async def run() -> None:
        made = rpc.GrpcServer(lambda call, data, left: call.answer(b""), threading.Event(), 1 << 20)
        port = free_port()
        assert made.start("127.0.0.1", port)
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as before:
                rpc._hang_up(port)
                with pytest.raises((ConnectionRefusedError, TimeoutError)):
                    socket.create_connection(("127.0.0.1", port), 0.3).close()
                with contextlib.suppress(ConnectionResetError):
                    while before.recv(1 << 16):  # gRPC's greeting, and then the end
                        pass
        finally:
            await made.end()

    asyncio.run(run())


@ALONE
def test_overload_over_http(server: Server) -> None:
    body = {"signature_name": "serving_default", "instances": row(SLOW).tolist()}
    with ThreadPoolExecutor(3 * MOST) as threads:
        found = [
            status
            for status, _ in threads.map(lambda _: server.http("/v1/models/double:predict", body), range(3 * MOST))
        ]
    assert set(found) == {200, 429}


def test_it_finishes_what_it_has(server: Server) -> None:
    """The last test: the server is gone afterwards."""
    with grpc.insecure_channel(server.address) as own, pytest.raises(grpc.RpcError):
        ask(own, BROKEN)
    found: list[Any] = []

    def client() -> None:
        with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
            found.append(ask(own, SLOW))

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.15)
    code, said = server.stop()
    for thread in threads:
        thread.join()
    assert code == 0, said
    assert len(found) == 3
    for answer in found:
        np.testing.assert_array_equal(answer, 2 * row(SLOW))
    assert "RuntimeError: the key is under /home/mat" in said  # the log has what no client gets
