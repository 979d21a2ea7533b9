"""Clients of a server, in processes of their own, against one that says what it is asked."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")

from msplit.errors import EngineError, MsplitError  # noqa: E402
from msplit.serving.loadtest.clients import PROTOCOLS, TENSORFLOW, Channel, ServerUnderTest  # noqa: E402
from msplit.serving.loadtest.dispatcher import RowShare, Watch, drive  # noqa: E402
from msplit.serving.loadtest.generator import ANSWERED, LINE, OVER, SENT, RequestState  # noqa: E402
from msplit.serving.server import decode, messages, tensors  # noqa: E402
from tests.cli.runner import fine, msplit  # noqa: E402
from tests.serving.loadtest.fakes import ANSWERS, DISTINCT, FEEDS, FakeModel, FakePool, instead, table  # noqa: E402
from tests.serving.loadtest.test_load import MMOE, QUICK  # noqa: E402

Answer = Callable[[int], Mapping[str, Any] | Any]


class Methods(grpc.GenericRpcHandler):
    """Both protocols; counts who asks. An answer that is a status code is a refusal."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self.peers = answer, Counter[str]()

    def service(self, details: Any) -> Any:
        kind = self._predict if details.method.endswith("/Predict") else self._infer
        return grpc.unary_unary_rpc_method_handler(kind)

    def _found(self, number: int, context: Any) -> Mapping[str, Any]:
        self.peers[context.peer()] += 1
        found = self._answer(number)
        if isinstance(found, grpc.StatusCode):
            context.abort(found, "no, with \x1b[31m colours")
        return found

    def _predict(self, data: bytes, context: Any) -> bytes:
        request = messages.PredictRequest.FromString(data)
        assert request.model_spec.name == "mmoe_small"
        response = messages.PredictResponse()
        number = int(decode.array_of(request.inputs["x"], "x")[0, 0])
        for name, value in self._found(number, context).items():
            tensors.to_tensor_proto(value, response.outputs[name], as_content=False)
        return response.SerializeToString()

    def _infer(self, data: bytes, context: Any) -> bytes:
        request = messages.ModelInferRequest.FromString(data)
        assert request.model_name == "mmoe_small"
        response = messages.ModelInferResponse()
        (asked,) = request.inputs
        number = int(decode.array_of_infer(asked, request.raw_input_contents[0])[0, 0])
        for name, value in self._found(number, context).items():
            response.outputs.add(name=name, datatype=tensors.open_name(value.dtype.name), shape=value.shape)
            response.raw_output_contents.append(b"".join(tensors.raw_content(value)))
        return response.SerializeToString()


@contextmanager
def serving(answer: Answer = lambda number: ANSWERS[number]) -> Iterator[tuple[str, Methods]]:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        methods = Methods(answer)
        server.add_generic_rpc_handlers((methods,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}", methods
        finally:
            server.stop(None)


def until(most: int) -> tuple[str, ...]:
    """Runs end after so many requests, on a slow machine, too."""
    return ("--measure", "seconds=20", "--measure", f"requests={most}")


def asked(address: str, *more: str) -> tuple[Any, ...]:
    return ("load", MMOE, *QUICK, "--server", address, "--clients", "4", *more)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_all_clients_ask_and_every_answer_is_right(protocol: str) -> None:
    with serving() as (address, methods), instead(FakeModel()):
        done = fine(*asked(address, "--server", f"protocol={protocol}", "--server", "processes=2", "--format", "json"))
    server, echo = done.json["arms"]
    assert (done.json["wrong"], done.json["failed"]) == (0, 0)
    assert len(methods.peers) == 2
    (point,) = server["points"]
    assert point["runs"][0]["checked"] == methods.peers.total() - DISTINCT - 1  # but for plain ones
    assert point["runs"][0]["most_in_flight"] <= 4
    assert echo["label"] == "echo"


def test_wrong_answers_refusals_and_errors_of_a_server_are_told() -> None:
    count = Counter[str]()

    def answer(number: int) -> Any:
        count["all"] += 1
        if count["all"] <= DISTINCT + 1:
            return ANSWERS[number]
        if number == 3:
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        if number == 5:
            return grpc.StatusCode.INTERNAL
        return ANSWERS[8 if number == 7 else number]

    with serving(answer) as (address, _), instead(FakeModel()):
        done = msplit(*asked(address, "--server", "processes=1", *until(200)))
    said = " ".join(done.out.split())
    assert done.code == 1
    assert "of the prepared ones 7, has the answer of 8" in said
    assert "% refused" in said
    assert "failed: the server says INTERNAL: no, with \\x1b[31m colours" in said


def test_no_server_and_no_such_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msplit.serving.loadtest.clients._CONNECT", 0.2)
    before = set(threading.enumerate())
    with pytest.raises(EngineError, match=r"no server answers at 127\.0\.0\.1:9"):
        Channel(ServerUnderTest("127.0.0.1:9", "m"), FEEDS)
    for trying in set(threading.enumerate()) - before:
        trying.join(10)
        assert not trying.is_alive()  # nobody goes on trying
    with serving(lambda number: grpc.StatusCode.NOT_FOUND) as (address, _), instead(FakeModel()):
        done = msplit(*asked(address, "--server", "processes=1"))
    assert (done.code, done.out) == (2, "")
    assert "the server says NOT_FOUND: no, with" in done.err
    assert "\x1b" not in done.err


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(MsplitError, match="no protocol 'http'"):
        ServerUnderTest("a:1", "m", "http")
    with pytest.raises(MsplitError, match="99 processes"):
        ServerUnderTest("a:1", "m", TENSORFLOW, 99)


def test_each_process_answers_its_share_of_the_rows() -> None:
    made = table(1000)
    made.request[:] = np.arange(1000) % DISTINCT
    made.counters[SENT], made.counters[OVER] = 1000, 1
    for number in (2, 0, 1):
        before = int((made.status == RequestState.DONE).sum())
        drive(made, FakePool(), FEEDS, Watch(made, lambda: None), part=RowShare(number, 3))
        rows = np.flatnonzero(made.status == RequestState.DONE)
        assert len(rows) - before == len(range(number, 1000, 3)) == made.counters[ANSWERED + LINE * number]
        assert set(range(number, 1000, 3)) <= set(rows.tolist())
    assert made.answers == 1000
    assert (made.outputs["id"] == made.request).all()
    made.clear()
    assert made.answers == 0
