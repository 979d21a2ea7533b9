"""gRPC's calls: each is answered once, by any thread, and what becomes of those that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")

from msplit.serving.server import rpc  # noqa: E402
from tests.serving.server.running import free_port  # noqa: E402

PREDICT = rpc.PATHS[0]
MOST = 1 << 16


class Running:
    """A server that echoes, but for requests that begin with what is to be done."""

    def __init__(self) -> None:
        self.stopping, self.cancelled, self.late = threading.Event(), threading.Event(), []
        self.left: list[float | None] = []
        self.health = b"healthy"
        made = rpc.GrpcServer(self.take, self.stopping, MOST, health=lambda data: data or self.health)
        self.server, self.port = made, free_port()
        assert self.server.start("127.0.0.1", self.port)

    def take(self, call: rpc.GrpcCall, data: bytes, left: float | None) -> None:
        self.left.append(left)
        if data == b"fail":
            call.fail(3, "no – é")
        elif data == b"never":
            call.cancel = self.cancelled.set
        elif data == b"later":
            self.late.append(call)
            threading.Timer(0.05, call.answer, (b"at last",)).start()
        elif data == b"raise":
            raise RuntimeError("of a handler")
        else:
            call.answer(data)
            if call.path == PREDICT:
                call.answer(b"once more")
                call.fail(13, "and once more")


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    asyncio.run(made.server.end())
    assert not made.server.open


@pytest.fixture
def ask(running: Running) -> Iterator[Any]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{running.port}", options=options) as channel:
        yield channel.unary_unary(PREDICT)


def test_a_call_is_answered_once(ask: Any, running: Running) -> None:
    for size in (0, 1, 1000, MOST):
        assert ask(bytes(size), timeout=20) == bytes(size)
    with pytest.raises(grpc.RpcError) as caught:
        ask(b"fail", timeout=20)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "no – é")
    assert all(0 < left < 21 for left in running.left)
    assert ask(b"x") == b"x"
    assert running.left[-1] is None


def test_any_thread_answers(ask: Any) -> None:
    assert [one.result() for one in [ask.future(b"later", timeout=20) for _ in range(20)]] == [b"at last"] * 20


def test_who_has_gone_is_not_waited_for(ask: Any, running: Running) -> None:
    asked = ask.future(b"never")
    time.sleep(0.05)
    asked.cancel()
    assert running.cancelled.wait(20)
    with pytest.raises(grpc.RpcError) as caught:
        ask(b"never", timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert ask(b"x", timeout=20) == b"x"


def test_what_fails_inside_ends_nothing(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(grpc.RpcError):
        ask(b"raise", timeout=0.1)
    assert "of a handler" in caplog.text
    assert ask(b"x", timeout=20) == b"x"


def test_what_is_too_large_is_refused(ask: Any, running: Running) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(bytes(MOST + 1), timeout=20)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not running.server.open


@pytest.mark.parametrize("path", ["/tensorflow.serving.PredictionService/Explain", "/x/y", "/"])
def test_an_unknown_method_is_unimplemented(running: Running, path: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(path)(b"", timeout=20)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def test_a_port_that_is_taken_is_not_shared(running: Running) -> None:
    other = rpc.GrpcServer(running.take, running.stopping, MOST)
    assert not other.start("127.0.0.1", running.port)


@pytest.mark.parametrize("stays", [True, False])
def test_who_watches_health_is_told_changes_and_the_end(running: Running, stays: bool) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=20)
        assert next(watch) == b"healthy"
        for health in (b"ill", b"healthy"):
            running.health = health
            assert next(watch) == health
        if stays:
            running.health = b"gone"
            running.stopping.set()
            assert list(watch) == [b"gone"]
        else:
            watch.cancel()
        ended = time.monotonic() + 20
        while running.server.watchers or running.server.open:
            assert time.monotonic() < ended
            time.sleep(0.01)


def test_it_ends_when_calls_are_answered_and_waits_no_longer_than_it_may(running: Running, ask: Any) -> None:
    late, never = ask.future(b"later"), ask.future(b"never")
    while len(running.late) + len(running.left) < 3:
        time.sleep(0.001)
    start = time.monotonic()
    asyncio.run(running.server.end(0.3))
    assert 0.25 < time.monotonic() - start < 15
    assert late.result() == b"at last"
    with pytest.raises(grpc.RpcError) as caught:
        never.result(20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not running.server.open


def test_it_ends_at_once_while_it_waits_for_the_end(running: Running, ask: Any) -> None:
    async def both() -> None:
        waits = asyncio.create_task(running.server.end(10.0))
        await asyncio.sleep(0.05)
        await running.server.end()
        await waits

    never = ask.future(b"never")
    while not running.left:
        time.sleep(0.001)
    start = time.monotonic()
    asyncio.run(both())
    assert time.monotonic() - start < 9
    assert never.code() is grpc.StatusCode.UNAVAILABLE


def test_an_answer_after_the_end_goes_nowhere(running: Running, ask: Any) -> None:
    """gRPC's own check of it would end the process."""
    asked = ask.future(b"later")
    while not running.late:
        time.sleep(0.001)
    running.server.open.clear()
    asyncio.run(running.server.end())
    running.server.open[running.late[0]] = True
    running.late[0].answer(b"too late")
    assert not running.server.open
    with pytest.raises(grpc.RpcError):
        asked.result(20)
