"""Several processes take the requests of one server: all serve what one has decided, and any of them may end at any time."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("uvicorn")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from msplit.errors import LoadError, MsplitError  # noqa: E402
from msplit.progress import silent  # noqa: E402
from msplit.serving.server import fronts, messages, run  # noqa: E402
from msplit.serving.server.config import ModelConfig  # noqa: E402
from msplit.serving.server.models import Signature, Version  # noqa: E402
from msplit.serving.server.versions import Polling, Versions  # noqa: E402
from tests import forked  # noqa: E402
from tests.serving.pool.remote import SLOW, alive, shared, started, wait  # noqa: E402
from tests.serving.server.running import Server, free_port, start_trivial  # noqa: E402

INFER = "/inference.GRPCInferenceService/ModelInfer"
RELOAD = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
COUNT = 2


def opened(name: str, number: int, path: Path, progress: Any) -> Version:
    """A version whose model is that of `remote`, in a process of its own."""
    if (path / "wrong").exists():
        raise LoadError("it is wrong", where=str(path), fix="mend it")
    return Version(name, number, {"serving_default": Signature("serving_default", started(1, groups=2))})


class Running:
    """A server in this process, with its fronts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.where = (
            folder,
            run.Listening(port=free_port(), rest_port=free_port(), grace=5.0, fronts=COUNT),
        )
        self.server = Server(None, self.where.port, self.where.rest_port, "")  # type: ignore[arg-type]
        self.fronts: Any = None

    def pids(self) -> list[int]:
        return [front.process.pid for front in self.fronts._fronts]

    def infer(self, value: float = 1.0) -> int:
        """Version that has answered, rightly, over a connection of its own."""
        with grpc.insecure_channel(self.server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
            request = messages.ModelInferRequest(model_name="m")
            for name, array in (("x", np.full((1, 2), value)), ("k", np.zeros(()))):
                request.inputs.add(name=name, datatype="FP64", shape=array.shape)
                request.raw_input_contents.append(array.tobytes())
            found = messages.ModelInferResponse.FromString(
                own.unary_unary(INFER)(request.SerializeToString(), timeout=20)
            )
        assert np.frombuffer(found.raw_output_contents[0]).tolist() == [3 * value] * 2
        return int(found.model_version)

    def versions(self) -> set[int]:
        """Versions that answer over a dozen connections, so that each front is asked."""
        return {self.infer(float(number)) for number in range(12)}

    def change(self, kind: str, status: int = 200) -> None:
        url, said = f"http://127.0.0.1:{self.server.rest}/v2/repository/models/m/{kind}", 200
        try:
            urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=60).close()
        except urllib.error.HTTPError as problem:
            said = problem.code
        assert said == status

    def counted(self) -> dict[tuple[str, ...], float]:
        return {
            (one.name, *one.labels.values()): one.value
            for family in text_string_to_metric_families(self.server.text("/metrics"))
            for one in family.samples
        }


def starting() -> Versions:
    """Versions that are yet to be opened."""
    made = Versions(opened, Polling())
    made.models.opening = ["m"]
    return made


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("m")
    (folder / "1").mkdir()
    made, before = Running(folder), shared()
    with (
        forked.instead(forked.TENSORFLOW if forked.BESIDE else forked.POOLED),
        closing(starting()) as versions,
        run.held(made.where) as ports,
        run.answering(versions.models, made.where, ports) as made.fronts,
    ):
        assert made.server.http("/v2/health/ready") == (503, {"error": "models are being opened: m"})
        versions.start([ModelConfig("m", folder)], silent)
        made.fronts.settle()
        assert made.server.http("/v2/models/m/ready")[0] == 200
        yield made
        pids = made.pids()
    assert not any(map(alive, pids))
    assert shared() == before


def test_whom_a_client_asks_next_has_followed_its_change(running: Running) -> None:
    for number in (2, 3):
        (running.folder / str(number)).mkdir()
        running.change("load")
        assert running.versions() == {number}
        assert running.server.http("/v1/models/m")[1]["model_version_status"][0]["version"] == str(number)
    (running.folder / "4").mkdir()
    (running.folder / "4" / "wrong").touch()
    running.change("load", 412)
    assert running.versions() == {3}
    config = messages.ReloadConfigRequest()
    one = config.config.model_config_list.config.add(name="m", base_path=str(running.folder))
    one.model_version_policy.specific.versions[:] = [2, 3]
    one.version_labels["old"] = 2
    with grpc.insecure_channel(running.server.address) as own:
        own.unary_unary(RELOAD)(config.SerializeToString(), timeout=20)
        assert running.versions() == {3}
        for _ in range(12):
            status, said = running.server.http("/v1/models/m/labels/old")
            assert (status, said["model_version_status"][0]["version"]) == (200, "2")
        one.model_version_policy.specific.versions[:] = [9]
        with pytest.raises(grpc.RpcError, match="has no version 9"):
            own.unary_unary(RELOAD)(config.SerializeToString(), timeout=20)
        del one.version_labels["old"]
        one.model_version_policy.latest.num_versions = 1
        (running.folder / "4" / "wrong").unlink()
        own.unary_unary(RELOAD)(config.SerializeToString(), timeout=20)
    assert running.versions() == {4}
    running.change("unload")
    with pytest.raises(grpc.RpcError, match="Servable not found"):
        running.infer()
    running.change("load")
    assert running.versions() == {4}


def test_no_request_fails_while_versions_come_and_go(running: Running) -> None:
    """One of them takes long, in a version that is to be closed: that waits for it."""

    def flood() -> list[int]:
        found = [running.infer()]
        while found[-1] != 6:
            found.append(running.infer(float(len(found))))
        return found

    with ThreadPoolExecutor(3) as threads:
        slow = threads.submit(running.infer, SLOW + 0.5)
        asking = [threads.submit(flood) for _ in range(2)]
        for number in (5, 6):
            (running.folder / str(number)).mkdir()
            running.change("load")
        for one in asking:
            assert {6} <= {*one.result()} <= {4, 5, 6}
        assert slow.result() == 4


def test_one_that_is_killed_is_started_again_and_its_counts_stay(running: Running) -> None:
    key = ("msplit_requests_total", "m", "inference.GRPCInferenceService", "OK", "6")
    before = running.counted()[key]
    for _ in range(12):
        running.infer()
    wait(lambda: running.counted()[key] >= before + 12)  # a request is counted when its answer is on its way
    expected = running.counted()[key] + 12
    victim = running.pids()[0]
    os.kill(victim, signal.SIGKILL)
    wait(lambda: victim not in running.pids() and all(one.up for one in running.fronts._fronts))
    assert running.versions() == {6}
    wait(lambda: running.counted()[key] == expected)
    found = running.counted()
    assert found["msplit_pool_requests_total", "m", "serving_default", "6"] >= 12
    assert found["msplit_pool_steps_total", "m", "serving_default", "6"] >= 12


def test_one_that_hangs_is_replaced(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "_DEAF", 0.1)
    victim = running.pids()[1]
    os.kill(victim, signal.SIGSTOP)

    def replaced() -> bool:
        running.fronts._look(float("inf"))
        return victim not in running.pids() and all(one.up for one in running.fronts._fronts)

    wait(replaced)
    assert running.versions() == {6}


def test_a_port_that_is_taken_is_told_and_not_shared(running: Running) -> None:
    for count in (1, COUNT):
        where = run.Listening(port=running.where.port, rest_port=0, fronts=count)
        with pytest.raises(MsplitError, match="can not listen on port"), run.held(where):
            pass


def test_nothing_is_left_of_a_server_that_is_killed() -> None:
    server = start_trivial("fronts=2")
    children = _listening(server.rest)
    server.process.kill()
    server.process.communicate()
    assert len(children) == 2
    wait(lambda: not any(map(alive, children)))
    wait(lambda: _is_free(server))  # the system takes their sockets back a moment later


def _is_free(server: Server) -> bool:
    """True where another server can have its ports."""
    try:
        with run.held(run.Listening(port=server.port, rest_port=server.rest)):
            return True
    except MsplitError:
        return False


def _listening(port: int) -> list[int]:
    """Processes that listen on a port."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        values = line.split()
        if values[3] == "0A" and int(values[1].rpartition(":")[2], 16) == port:
            inodes.add(f"socket:[{values[9]}]")
    found = set[int]()
    for one in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # either may be gone by now
            if os.readlink(one) in inodes:
                found.add(int(one.parts[2]))
    return sorted(found)
