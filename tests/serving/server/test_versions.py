"""Versions come and go while a server runs: what is served, what clients are told of it, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from msplit.errors import LoadError  # noqa: E402
from msplit.progress import Progress, silent  # noqa: E402
from msplit.serving.server import messages, tensors, versions  # noqa: E402
from msplit.serving.server.config import ModelConfig, read_models  # noqa: E402
from msplit.serving.server.metrics import Metrics  # noqa: E402
from msplit.serving.server.models import Version, VersionState, signature_of  # noqa: E402
from msplit.serving.server.service import RequestContext, Service  # noqa: E402
from msplit.serving.server.tensors import Refusal  # noqa: E402
from msplit.serving.server.versions import Polling, Versions  # noqa: E402
from tests.cli.runner import SAMPLES  # noqa: E402
from tests.serving.server import trivial  # noqa: E402
from tests.serving.server.asking import answer  # noqa: E402
from tests.serving.server.running import Server, start  # noqa: E402

SOON = 30.0
PREDICT = "/tensorflow.serving.PredictionService/Predict"


def wait(true: Callable[[], Any]) -> None:
    """Waits until something is so, on whatever machine."""
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


# --- Models that take no time


class Folder:
    """Base path of models whose versions are folders with a file `model`, which is one if it says so."""

    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, list[tuple[str, int]]()
        self.hold = threading.Event()
        self.hold.set()

    def add(self, number: int, text: str = "whole", name: str = "m") -> Path:
        written, folder = self.path / "written", self.path / name / str(number)
        written.mkdir()
        (written / "model").write_text(text)
        folder.parent.mkdir(exist_ok=True)
        return written.rename(folder)

    def open(self, name: str, number: int, path: Path, progress: Progress) -> Version:
        self.opened.append((name, number))
        while not self.hold.wait(0.002):
            progress("compiling", 0.0)
        if (path / "model").read_text() != "whole":
            raise LoadError("is broken", where=str(path), fix="write it again")
        only = signature_of(trivial.pool(), None)
        return Version(name, number, {only.name: only})

    def config(self, **options: Any) -> ModelConfig:
        return ModelConfig("m", self.path / "m", **options)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.add(1)
    return made


class Served:
    """Versions of a folder, with what a client sees."""

    def __init__(self, folder: Folder, *configs: ModelConfig, poll: float = 0.004) -> None:
        self.versions = Versions(folder.open, Polling(poll))
        self.versions.start(configs or [folder.config()], silent)
        self.models = self.versions.models
        self.service = Service(self.models, Metrics(self.models))

    def numbers(self, name: str = "m") -> list[int]:
        return sorted(self.models.versions.get(name, {}))

    def states(self, name: str = "m") -> dict[int, str]:
        return {number: status.state.name for number, status in self.models.states(name).items()}

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.versions.close()


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({}, [2], [3]),
        ({"latest": 2}, [1, 2], [2, 3]),
        ({"latest": 0}, [1, 2], [1, 2, 3]),
        ({"versions": (1,)}, [1], [1]),
        ({"latest": 2, "labels": {"stable": 2}}, [1, 2], [2, 3]),
    ],
)
def test_policies_say_which_versions_follow_each_other(
    folder: Folder, options: dict, before: list[int], after: list[int]
) -> None:
    folder.add(2)
    with Served(folder, folder.config(**options)) as served:
        assert served.numbers() == before
        folder.add(3)
        wait(lambda: served.numbers() == after)
        gone = {*before} - {*after}
        wait(lambda: all(served.states()[number] == "END" for number in gone))
        if options.get("labels"):
            assert served.models.find("m", label="stable").number == 2


def test_states_are_those_of_tensorflow_serving(folder: Folder) -> None:
    """START while it may still be written, LOADING, AVAILABLE; of the one before UNLOADING while a request is in flight, then END."""
    with Served(folder) as served:
        assert served.states() == {1: "AVAILABLE"}
        context = RequestContext(served.service)
        context.find("m")
        folder.hold.clear()
        folder.add(2)
        wait(lambda: served.states() == {2: "LOADING", 1: "AVAILABLE"})
        folder.hold.set()
        wait(lambda: served.states() == {2: "AVAILABLE", 1: "UNLOADING"})
        time.sleep(0.03)
        assert served.states() == {2: "AVAILABLE", 1: "UNLOADING"}
        context.leave()
        wait(lambda: served.states() == {2: "AVAILABLE", 1: "END"})
    assert [int(state) for state in VersionState] == [10, 20, 30, 40, 50]


def test_requests_in_flight_are_answered_by_the_version_that_they_began_with(folder: Folder) -> None:
    """Whatever is asked while versions change, nobody is refused, and an answer comes from the version that was found."""
    with Served(folder) as served, ThreadPoolExecutor(4) as threads:
        over, rows = threading.Event(), np.ones((1, trivial.WIDTH), np.float32)

        def ask() -> set[int]:
            found = set()
            while not over.is_set():
                context = RequestContext(served.service)
                version = context.find("m")
                answer = version.signature("").pool.step({"x": rows})
                assert (answer["y"] == 2).all()
                found.add(version.number)
                context.leave()
            return found

        asking = [threads.submit(ask) for _ in range(4)]
        try:
            for number in range(2, 12):
                folder.add(number)
                wait(lambda number=number: served.numbers() == [number])
        finally:
            over.set()
        assert {*range(2, 11)} <= set().union(*(each.result() for each in asking))


def test_a_broken_version_is_told_once_and_the_old_one_stays(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    with Served(folder) as served:
        broken = folder.add(2, "half")
        wait(lambda: served.states() == {2: "END", 1: "AVAILABLE"})
        assert "is broken" in served.models.states("m")[2].why
        looks = len(folder.opened)
        time.sleep(0.04)
        assert len(folder.opened) == looks, "it was tried again without need"
        assert caplog.text.count("model m version 2: can not be opened") == 1
        (broken / "model").write_text("whole")
        wait(lambda: served.states() == {2: "AVAILABLE", 1: "END"})


def test_a_version_that_had_no_room_is_tried_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_AGAIN", 0.01)
    with Served(folder) as served:
        folder.add(2, "half")
        wait(lambda: folder.opened.count(("m", 2)) == 1 + versions._RETRIES)
        time.sleep(0.05)
        assert folder.opened.count(("m", 2)) == 1 + versions._RETRIES
        assert served.numbers() == [1]


def test_a_folder_that_is_still_being_written_is_not_taken(folder: Folder) -> None:
    with Served(folder, poll=0.0) as served:
        half = folder.path / "m" / "2"
        for write in (
            half.mkdir,
            lambda: (half / "part").write_text("of it"),
            lambda: (half / "part").rename(half / "model"),
            lambda: (half / "model").write_text("whole"),
        ):
            write()
            served.versions._look()
            assert served.numbers() == [1]
            assert served.states()[2] == "START"
            assert ("m", 2) not in folder.opened
        served.versions._look()
        assert served.numbers() == [2]
        assert folder.opened.count(("m", 2)) == 1


def test_what_is_written_while_it_is_opened_is_opened_anew(folder: Folder) -> None:
    with Served(folder) as served:
        folder.hold.clear()
        late = folder.add(2)
        wait(lambda: ("m", 2) in folder.opened)
        (late / "more").write_text("of it")
        folder.hold.set()
        wait(lambda: served.numbers() == [2])
        assert folder.opened.count(("m", 2)) == 2


def test_what_goes_while_it_is_written_is_at_its_end(folder: Folder) -> None:
    with Served(folder) as served:
        folder.hold.clear()
        new = folder.add(2)
        wait(lambda: ("m", 2) in folder.opened)
        shutil.rmtree(new)
        folder.hold.set()
        wait(lambda: served.states() == {2: "END", 1: "AVAILABLE"})


def test_a_base_path_that_is_gone_changes_nothing(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    with Served(folder) as served:
        (folder.path / "m").rename(folder.path / "away")
        wait(lambda: "versions of before stay" in caplog.text)
        assert served.numbers() == [1]
        (folder.path / "away").rename(folder.path / "m")
        folder.add(2)
        wait(lambda: served.numbers() == [2])
    assert caplog.text.count("versions of before stay") == 1


def test_without_a_wait_nothing_is_looked_for(folder: Folder) -> None:
    with Served(folder, poll=0.0) as served:
        folder.add(2)
        time.sleep(0.03)
        assert served.numbers() == [1]
        served.versions.change("load", "m").result(SOON)
        assert served.numbers() == [2]


def test_a_server_that_stops_waits_for_no_version_to_be_opened(folder: Folder) -> None:
    with Served(folder) as served:
        folder.hold.clear()
        folder.add(2)
        wait(lambda: ("m", 2) in folder.opened)
        asked = served.versions.change("load", "m")
    assert not served.versions._thread.is_alive()
    with pytest.raises(Refusal, match="the server is stopping"):
        asked.result(SOON)


def test_load_and_unload(folder: Folder) -> None:
    with Served(folder) as served:
        first = served.models.find("m")
        served.versions.change("unload", "m").result(SOON)
        assert served.numbers() == []
        with pytest.raises(Refusal, match="not found"):
            served.models.find("m")
        wait(lambda: served.states() == {1: "END"})
        folder.add(2)
        time.sleep(0.03)
        assert served.numbers() == [], "a model that was unloaded comes back by load only"
        served.versions.change("load", "m").result(SOON)
        assert served.numbers() == [2]
        (folder.path / "m" / "2" / "model").write_text("whole")  # written anew, as --force does
        second = served.models.find("m")
        served.versions.change("load", "m").result(SOON)
        assert served.models.find("m") not in (first, second)
        (folder.path / "m" / "2" / "model").write_text("half")
        with pytest.raises(Refusal, match="is broken"):
            served.versions.change("load", "m").result(SOON)
        assert served.states()[2] == "AVAILABLE"
        for kind in ("load", "unload"):
            with pytest.raises(Refusal, match="no model 'nobody'"):
                served.versions.change(kind, "nobody").result(SOON)


def listed(**models: tuple[Path, dict[str, int]]) -> Any:
    """A ModelServerConfig: name -> base path and labels."""
    config = messages.ModelServerConfig()
    for name, (path, labels) in models.items():
        config.model_config_list.config.add(
            name=name, base_path=str(path), model_platform="tensorflow", version_labels=labels
        )
    return config


def test_a_configuration_is_taken_whole_or_not_at_all(folder: Folder) -> None:
    folder.add(7, name="n")
    folder.add(8, "half", name="o")
    with Served(folder) as served:
        one = served.models.find("m")
        m, n, o = (folder.path / name for name in "mno")
        served.versions.change("reload", listed(m=(m, {"stable": 1}), n=(n, {}))).result(SOON)
        assert (served.numbers("m"), served.numbers("n")) == ([1], [7])
        assert served.models.find("m") is one, "it was opened once more"
        assert served.models.find("m", label="stable") is one
        for config, said in (
            (listed(n=(n, {"new": 9}), o=(o, {})), "label 'new'"),
            (listed(n=(n, {}), o=(o, {})), "is broken"),
            (listed(n=(n, {}), p=(folder.path / "p", {})), "no such file"),
            (messages.ModelServerConfig(), "no model_config_list"),
        ):
            with pytest.raises(Refusal, match=said):
                served.versions.change("reload", config).result(SOON)
            assert (served.numbers("m"), served.numbers("n"), served.numbers("o")) == ([1], [7], [])
            assert served.models.find("m", label="stable") is one
        served.versions.change("reload", listed(n=(n, {}))).result(SOON)
        assert (served.numbers("m"), served.numbers("n")) == ([], [7])
        wait(lambda: served.states("m") == {1: "END"})
        folder.add(9, name="n")
        wait(lambda: served.numbers("n") == [9])


def test_versions_in_a_row_leave_nothing_behind(folder: Folder) -> None:
    """Of each a request over gRPC and one over HTTP's way; afterwards there is as much of everything as with the first ones."""
    known = weakref.WeakSet[Version]()

    def left() -> tuple[int, ...]:
        metrics, statuses = served.service.metrics, served.models.statuses["m"]
        inside = (metrics._requests, served.service.heads._known)
        versions = served.versions
        own = (statuses, versions._seen, versions._failed, versions._opened, versions._closing, *inside)
        return threading.active_count(), *map(len, own)

    async def ask(number: int) -> None:
        request = messages.PredictRequest()
        request.model_spec.name = "m"
        tensors.to_tensor_proto(np.ones((1, trivial.WIDTH), np.float32), request.inputs["x"], as_content=True)
        status, data = await answer(served.service, PREDICT, request.SerializeToString(), None)
        assert (status, messages.PredictResponse.FromString(data).model_spec.version.value) == (0, number)

    with Served(folder) as served:
        for number in range(2, 82):
            folder.add(number)
            wait(lambda number=number: served.states().get(number) == "AVAILABLE")
            known.add(served.models.find("m"))
            asyncio.run(ask(number))
            shutil.rmtree(folder.path / "m" / str(number - 1), ignore_errors=True)
            # One that is served no more is, for a moment, neither among those that are to be closed nor closed.
            wait(lambda number=number: served.states().get(number - 1, "END") == "END" and not served.versions._closing)
            assert len(served.numbers()) == len(served.versions._opened) == 1
            if number == 21:
                before = left()
        assert left() == before
        gc.collect()
        assert len(known) <= 2, "a version is kept"


def test_a_list_of_models_is_read_again(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """What is in it holds once it is changed; up to then, what a client asked for. A list that is wrong changes nothing, and is told."""
    folder.add(3, name="n")
    file = folder.path / "models.config"

    def write(*names: str) -> None:
        text = "".join(f"config {{ name: '{name}' base_path: '{folder.path / name}' }}" for name in names)
        written = folder.path / "list"
        written.write_text(f"model_config_list {{ {text} }}")
        written.rename(file)

    write("m")
    made = Versions(folder.open, Polling(0.0, lambda: read_models(file), 0.004))
    with contextlib.closing(made):
        made.start(read_models(file), silent)
        made.change("reload", listed(n=(folder.path / "n", {}))).result(SOON)
        time.sleep(0.03)
        assert {*made.models.versions} == {"n"}
        write("m", "n")
        wait(lambda: {*made.models.versions} == {"m", "n"})
        write("m", "m")
        wait(lambda: "two models called 'm'" in caplog.text)
        write("n", "o")
        wait(lambda: "no such file" in caplog.text)
        assert {*made.models.versions} == {"m", "n"}
        folder.add(1, name="o")
        wait(lambda: {*made.models.versions} == {"n", "o"})
    assert caplog.text.count("the list of models") == 2


def test_what_is_configured_is_taken_again_at_once(folder: Folder) -> None:
    """Without a look at folders or the list in between: new versions, other models, and what a client has changed. Or nothing is."""
    file = folder.path / "models.config"

    def configured(*names: str) -> None:
        text = "".join(f"config {{ name: '{name}' base_path: '{folder.path / name}' }}" for name in names)
        file.write_text(f"model_config_list {{ {text} }}")

    def numbers() -> dict[str, list[int]]:
        return {name: sorted(versions) for name, versions in made.models.versions.items()}

    configured("m")
    made = Versions(folder.open, Polling(0.0, lambda: read_models(file)))
    with contextlib.closing(made):
        made.start(read_models(file), silent)
        folder.add(2)
        folder.add(1, name="n")
        made.change("reread", None, "done").result(SOON)
        assert numbers() == {"m": [2]}
        configured("m", "n")
        made.change("reread", None).result(SOON)
        assert numbers() == {"m": [2], "n": [1]}
        made.change("unload", "m").result(SOON)
        made.change("reread", None).result(SOON)
        assert numbers() == {"m": [2], "n": [1]}
        for wrong in ("n", "o"), ("n", "n"), ():
            configured(*wrong)
            with pytest.raises(Refusal):
                made.change("reread", None).result(SOON)
            assert numbers() == {"m": [2], "n": [1]}
    with Served(folder) as served:  # what no file says stays
        served.versions.change("reread", None).result(SOON)
        assert served.numbers() == [2]


# --- The real server


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    msplit = pytest.importorskip("msplit")
    made = tmp_path_factory.mktemp("built") / "build"
    msplit.build(SAMPLES / "mmoe_small.pb", made, batches=[1], engine="cuda", device="cpu", effort="fast")
    return made


@pytest.fixture(scope="module")
def server(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    base = tmp_path_factory.mktemp("served") / "m"
    shutil.copytree(build, base / "1")
    running = start("--model_base_path", base, "--file_system_poll_wait_seconds", "0.05", "--device", "cpu")
    yield running, base
    if running.process.poll() is None:
        running.process.kill()
        running.process.communicate()


@pytest.mark.tf
def test_clients_see_versions_come_and_go(server: tuple[Server, Path], build: Path) -> None:
    """TensorFlow Serving's clients over gRPC and HTTP, KServe's repository over both."""
    pytest.importorskip("tensorflow_serving")
    from tensorflow_serving.apis import get_model_status_pb2, model_management_pb2, model_service_pb2_grpc

    running, base = server
    rows = {"instances": [[1.0] * 64]}

    def states(name: str = "m") -> list[tuple[int, str]]:
        found = running.http(f"/v1/models/{name}")[1].get("model_version_status", [])
        return [(int(one["version"]), one["state"]) for one in found]

    def index(**asked: Any) -> Any:
        status, found = running.http("/v2/repository/index", asked)
        assert status == 200
        return [(one["name"], one["version"], one["state"]) for one in found]

    assert states() == [(1, "AVAILABLE")]
    half = base / "2"
    half.mkdir()
    for path in sorted(build.iterdir(), reverse=True):  # what a copy leaves that was broken off
        if path.is_file() and path.name != "weights.bin":
            shutil.copy(path, half)
    wait(lambda: states() == [(2, "END"), (1, "AVAILABLE")])
    status, found = running.http("/v1/models/m/versions/2")
    assert (status, found["model_version_status"][0]["status"]["error_code"]) == (200, "FAILED_PRECONDITION")
    assert "weights.bin" in found["model_version_status"][0]["status"]["error_message"]
    assert running.http("/v1/models/m:predict", rows)[0] == 200
    shutil.copytree(build, half, dirs_exist_ok=True)
    wait(lambda: states() == [(2, "AVAILABLE"), (1, "END")])
    assert running.http("/v1/models/m/versions/1:predict", rows)[0] == 404
    assert running.http("/v1/models/m/versions/2:predict", rows)[0] == 200
    assert running.http("/v1/models/m/versions/3")[0] == 404
    assert 'msplit_requests_total{model="m",protocol="http",status="OK",version="2"}' in running.text("/metrics")
    assert 'version="1"' not in running.text("/metrics")

    assert index() == [("m", "2", "READY"), ("m", "1", "UNAVAILABLE")]
    assert index(ready=True) == [("m", "2", "READY")]
    assert running.http("/v2/repository/models/nobody/load", b"")[0] == 404
    assert running.http("/v2/repository/models/m/load", {"parameters": {"config": {"string_param": "{}"}}})[0] == 400
    request = urllib.request.Request(f"http://127.0.0.1:{running.rest}/v2/repository/models/m/unload", b"")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read() == b""
    assert running.http("/v1/models/m:predict", rows)[0] == 404
    with grpc.insecure_channel(running.address) as channel:

        def open_method(name: str, **asked: Any) -> Any:
            kinds = (getattr(messages, f"{name}{end}") for end in ("Request", "Response"))
            request, response = kinds
            path = f"/inference.GRPCInferenceService/{name}"
            return channel.unary_unary(path, request.SerializeToString, response.FromString)(
                request(**asked), timeout=60
            )

        open_method("RepositoryModelLoad", model_name="m")
        assert next((one.version, one.state) for one in open_method("RepositoryIndex").models) == ("2", "READY")
        with pytest.raises(grpc.RpcError, match="no model 'nobody'"):
            open_method("RepositoryModelUnload", model_name="nobody")

        stub = model_service_pb2_grpc.ModelServiceStub(channel)

        def reload(**models: Path) -> Any:
            request = model_management_pb2.ReloadConfigRequest()
            for name, path in models.items():
                config = request.config.model_config_list.config.add()
                config.name, config.base_path, config.model_platform = name, str(path), "tensorflow"
                if name == "again":
                    config.version_labels["stable"] = 2
            return stub.HandleReloadConfigRequest(request, timeout=60)

        with pytest.raises(grpc.RpcError, match="no such file") as told:
            reload(m=base, other=base.parent / "nothing")
        assert told.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert states()[0] == (2, "AVAILABLE")
        assert reload(again=base).status.error_code == 0
        assert running.http("/v1/models/again/labels/stable:predict", rows)[0] == 200
        assert running.http("/v1/models/m:predict", rows)[0] == 404
        asked = get_model_status_pb2.GetModelStatusRequest()
        asked.model_spec.name = "again"
        found = stub.GetModelStatus(asked).model_version_status
        assert [(one.version, one.state, one.status.error_code) for one in found] == [(2, 30, 0)]
    code, said = running.stop()
    assert code == 0
    assert said.count("model m version 2: can not be opened") == 1
