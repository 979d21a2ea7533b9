"""What counts the answers of a soak finds the wrong ones, the lost ones, and versions that go back."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")

from msplit.errors import ProcessLost  # noqa: E402
from msplit.serving.server import messages, tensors  # noqa: E402

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


class Doubling:
    """A pool that doubles numbers, but for what its turns say: another's answer, an error, or nothing at all."""

    def __init__(self, turns: dict[int, str]) -> None:
        self.turns, self.count, self.seen = turns, 0, Counter[bytes]()

    def submit(self, feeds: Any) -> Future[Any]:
        turn, future = self.turns.get(self.count, ""), Future[Any]()
        self.count += 1
        self.seen[feeds["x"].tobytes()] += 1
        if turn == "lost":
            future.set_exception(ProcessLost("its process ended"))
        elif turn == "nothing":
            future.set_exception(TimeoutError())
        else:
            future.set_result({"y": 2 * (feeds["x"][::-1] if turn == "wrong" else feeds["x"])})
        return future


def test_requests_of_a_soak_differ_and_each_answer_is_looked_at(tmp_path: Path) -> None:
    processes = importlib.import_module("processes")
    rows = np.arange(1, 9, dtype=np.float32).reshape(8, 1, 1)
    known = {"count": 8, "rowed": {"x", "y"}, "inputs": {"x": rows}, "answers": {"y": 2 * rows}}
    (tmp_path / "rows").write_bytes(pickle.dumps(known))
    # The third answer is asked for again, and has an error once more.
    pool = Doubling({5: "wrong", 9: "lost", 20: "nothing"})
    found = processes.soaked(pool, str(tmp_path / "rows"), 100, 400, 3, 6, 4, 1e12)
    assert found == {"requests": 400, "right": 398, "wrong": 1, "ProcessLost": 1, "without an answer": 1}
    assert max(count for request, count in pool.seen.items()) == 2, "only the one that was lost is asked twice"
    assert sum(count == 2 for count in pool.seen.values()) == 1
    twice = Doubling(dict.fromkeys(range(3), "lost"))
    found = processes.soaked(twice, str(tmp_path / "rows"), 0, 1, 3, 6, 1, 1e12)
    assert found == {"requests": 1, "ProcessLost": 1, "ProcessLost, again": 1}
    assert processes.soaked(Doubling({}), str(tmp_path / "rows"), 0, 9, 3, 6, 4, 0.0) == {}


class Failing(grpc.RpcError):
    def __init__(self, code: Any) -> None:
        self._code = code

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return "told"


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Any:
    soak = importlib.import_module("soak_server")
    feeds = {
        kind: [{"x": np.full((2, 1), number, np.float32)} for number in range(soak.DISTINCT)] for kind in soak.KINDS
    }
    answers = [
        {kind: [{"y": one["x"] + 100 * build} for one in every] for kind, every in feeds.items()}
        for build in range(soak.BUILDS)
    ]
    made = soak.Asking({"port": 1, "rest": 1}, {"feeds": feeds, "answers": answers}, 0)
    made.random = SimpleNamespace(randrange=lambda most: 3)
    monkeypatch.setattr(soak, "time", SimpleNamespace(sleep=lambda seconds: None))
    return made


def answered(asking: Any, *replies: Any) -> list[bool]:
    """Has the server reply so, one after the other: a version, or an error. Tells which requests had an answer."""
    left = iter(replies)

    def call(body: bytes, timeout: float) -> bytes:
        reply = next(left)
        if isinstance(reply, grpc.StatusCode):
            raise Failing(reply)
        said = messages.PredictResponse()
        said.model_spec.version.value = reply[0]
        tensors.to_tensor_proto(np.full((2, 1), 3 + 100 * reply[1], np.float32), said.outputs["y"], as_content=True)
        return said.SerializeToString()

    encode, decode, _, message = asking.ways["tensorflow"]
    asking.ways["tensorflow"] = (encode, decode, call, message)
    found = []
    while left.__length_hint__():
        found.append(asking.ask("one row"))
    return found


def test_a_client_knows_the_answer_of_each_version(asking: Any) -> None:
    assert answered(asking, (1, 1), (3, 0), (4, 1)) == [True] * 3
    assert not asking.counts.bad
    assert answered(asking, (5, 1)) == [True]
    assert asking.counts.bad == {"wrong answers": 1}, "version 5 is of build 2"
    assert answered(asking, (4, 1)) == [True]
    assert asking.counts.bad == {"wrong answers": 1, "went back": 1}


def test_a_client_tries_once_more(asking: Any) -> None:
    gone, late = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
    assert answered(asking, gone, (1, 1), gone, gone, late, (1, 1)) == [True, False, True]
    assert asking.counts.errors == {"UNAVAILABLE: told": 2, "UNAVAILABLE: told, again": 1, "no answer": 1}
    assert asking.counts.bad == {"lost to a client that tries once more": 1, "lost without an error": 1}
