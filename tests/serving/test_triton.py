"""What is written for Triton, and what Triton's Python backend gets of it. `test_triton_server.py` has the real server."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.errors import MsplitError, WriteError
from msplit.serving import triton_model
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.triton import PARAMETER, export
from tests.cli.runner import SAMPLES, contents, fine, unchanged
from tests.cli.runner import msplit as run

pytest.importorskip("torch", reason="PyTorch, the cuda engine's kernel library, is not installed")

TITLE = f"# Made by msplit {msplit.__version__}.\n"
CONFIG = """name: "mmoe"
backend: "python"
max_batch_size: 4
input {
  name: "x"
  data_type: TYPE_FP32
  dims: [64]
}
output {
  name: "tower_0/out/Sigmoid"
  data_type: TYPE_FP32
  dims: [1]
}
output {
  name: "tower_1/out/Sigmoid"
  data_type: TYPE_FP32
  dims: [1]
}
instance_group { count: 1 kind: KIND_CPU }  # a process per GPU: what is in flight at once is up to the pool
dynamic_batching {  # hands over what has arrived: the pool joins what waits, and delays it where it is told to
  preferred_batch_size: [1, 4]
  max_queue_delay_microseconds: 0
}
parameters { key: "msplit" value { string_value: "{\\"source\\": \\"build\\", \\"device\\": \\"cpu\\", \\"pool\\": \
{\\"groups\\": 2, \\"max_delay_us\\": 50.0, \\"priorities\\": 2, \\"max_queue\\": 9, \\"retries\\": 1}}" } }
"""
SETTINGS = PoolSettings(groups=2, max_delay_us=50.0, priorities=2, max_queue=9)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the sample with experts, for one row and for four, on simulated streams."""
    path = tmp_path_factory.mktemp("triton") / "mmoe.build"
    request = {"streams": (2,), "engine": "cuda", "device": "cpu", "effort": "fast"}
    msplit.build(SAMPLES / "mmoe_small.pb", path, **request, batches=[1, 4])
    return path


def test_a_build_is_written_with_what_triton_has_to_know(build: Path, tmp_path: Path) -> None:
    with unchanged(build):
        made = export(build, tmp_path / "models", SETTINGS)
    assert (made.name, made.path, made.max_batch) == ("mmoe", tmp_path / "models" / "mmoe", 4)
    assert (made.path / "config.pbtxt").read_text() == TITLE + CONFIG
    assert contents(made.path / "1" / "build") == contents(build)
    with msplit.open(made.path / "1" / "build") as opened:  # which it would refuse where others may write
        assert set(opened.step({"x": np.ones((3, 64), np.float32)})) == {"tower_0/out/Sigmoid", "tower_1/out/Sigmoid"}


def test_a_model_is_written_as_the_build_of_it_is(build: Path, tmp_path: Path) -> None:
    fine("export", SAMPLES / "mmoe_small.pb", "--triton", tmp_path, "--batch", "1,4", "--device", "cpu")
    fine("export", build, "--triton", tmp_path, "--name", "other")
    texts = [(tmp_path / name / "config.pbtxt").read_text().splitlines() for name in ("mmoe_small", "other")]
    assert [line for line in texts[0] if "parameters" not in line and 'name: "mmoe_small"' not in line] == [
        line for line in texts[1] if "parameters" not in line and 'name: "other"' not in line
    ]
    assert (tmp_path / "mmoe_small" / "1" / "mmoe_small.pb").read_bytes() == (SAMPLES / "mmoe_small.pb").read_bytes()


def test_what_has_no_axis_beside_its_rows_gets_one_in_triton(tmp_path: Path) -> None:
    made = export(SAMPLES / "keras_lookup", tmp_path)
    text = (made.path / "config.pbtxt").read_text()
    assert 'name: "city"\n  data_type: TYPE_STRING\n  dims: [1]  reshape { shape: [] }' in text
    assert "KIND_GPU" in text
    assert only_folders(made.path / "1") == {"keras_lookup"}


def only_folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_where_rows_are_not_independent_triton_joins_nothing(tmp_path: Path) -> None:
    text = (export(SAMPLES / "ragged_sparse", tmp_path).path / "config.pbtxt").read_text()
    assert "max_batch_size: 0\n" in text
    assert "dynamic_batching" not in text
    assert 'name: "tags"\n  data_type: TYPE_INT64\n  dims: [1, 2]' in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--name", "a/b"), "can be no name"),
        (("--name", ""), "can be no name"),
        (("--triton", "gone/models"), "does not exist"),
    ],
)
def test_what_can_not_be_is_refused_and_leaves_nothing(
    arguments: tuple[str, ...], said: str, build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = SAMPLES / "mmoe_small.pb"
    done = run("export", model, *(() if "--triton" in arguments else ("--triton", "models")), *arguments)
    assert done.code == 2
    assert said in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_this_name_stays_unless_it_is_to_be_replaced(build: Path, tmp_path: Path) -> None:
    export(build, tmp_path, name="one")
    with unchanged(tmp_path), pytest.raises(WriteError, match="is there already"):
        export(build, tmp_path, SETTINGS, name="one")
    export(build, tmp_path, SETTINGS, name="one", force=True)
    assert 'groups\\": 2' in (tmp_path / "one" / "config.pbtxt").read_text()


def test_a_damaged_build_is_not_exported(build: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(build, damaged)
    (damaged / "weights.bin").write_bytes(b"?")
    with pytest.raises(MsplitError):
        export(damaged, tmp_path / "models")
    assert not (tmp_path / "models").exists()


class Sender:
    """Takes answers as Triton does."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.there = threading.Event()

    def send(self, response: Any, flags: int) -> None:
        assert flags == 1
        self.sent.append(response)
        self.there.set()


class Asked:
    """A request as Triton's Python backend has it."""

    def __init__(self, arrays: dict[str, Any], timeout: int = 0, parameters: str = "{}") -> None:
        self.arrays, self.sender, self._timeout, self._parameters = arrays, Sender(), timeout, parameters

    def get_response_sender(self) -> Sender:
        return self.sender

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        return self._parameters

    def answer(self) -> Any:
        assert self.sender.there.wait(30)
        (response,) = self.sender.sent
        return response


def _tensor(name: str, values: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, as_numpy=lambda: values)


BACKEND = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    Tensor=_tensor,
    TritonError=type("TritonError", (SimpleNamespace,), {"INVALID_ARG": 3, "UNAVAILABLE": 4, "INTERNAL": 1}),
    InferenceResponse=lambda tensors=(), error=None: SimpleNamespace(tensors=tensors, error=error),
    get_input_tensor_by_name=lambda request, name: (
        _tensor(name, request.arrays[name]) if name in request.arrays else None
    ),
)
BACKEND.TritonError.__init__ = lambda self, said, code: SimpleNamespace.__init__(self, said=said, code=code)


@pytest.fixture
def served(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model as Triton makes it of what was written."""
    monkeypatch.setattr(triton_model, "backend", BACKEND)
    made = export(build, tmp_path, PoolSettings(groups=2, priorities=2))
    model = triton_model.TritonPythonModel()
    model.initialize(
        {"model_config": json.dumps(config_of(made.path)), "model_repository": str(made.path), "model_version": "1"}
    )
    yield model
    model.finalize()


def config_of(path: Path) -> dict[str, Any]:
    """What Triton makes of a configuration, as far as the model looks at it."""
    text = (path / "config.pbtxt").read_text()
    parameter = text.partition("string_value: ")[2].partition(" } }")[0]
    ends = {
        kind: [{"name": part.partition('"')[2].partition('"')[0]} for part in text.split(f"\n{kind} {{")[1:]]
        for kind in ("input", "output")
    }
    return {**ends, "parameters": {PARAMETER: {"string_value": json.loads(parameter)}}}


def test_requests_are_answered_each_with_its_own(served: Any, build: Path) -> None:
    rng = np.random.default_rng(3)
    asked = [Asked({"x": rng.normal(size=(1 + n % 4, 64)).astype(np.float32)}) for n in range(12)]
    served.execute(asked[:5])
    served.execute(asked[5:])
    with msplit.open(build) as runner:
        for one in asked:
            response = one.answer()
            assert response.error is None
            expected = runner.step(one.arrays)
            for tensor in response.tensors:
                np.testing.assert_allclose(tensor.as_numpy(), expected[tensor.name], rtol=1e-5)
                assert len(tensor.as_numpy()) == len(one.arrays["x"])


def test_what_a_request_lacks_is_its_error_alone(served: Any) -> None:
    right = np.ones((1, 64), np.float32)
    asked = [
        Asked({"x": np.ones((1, 63), np.float32)}),
        Asked({}),
        Asked({"x": right}, parameters='{"msplit_priority": 2}'),
        Asked({"x": right}, parameters='{"msplit_priority": 1}'),
        Asked({"x": np.broadcast_to(np.float32(1), (1, 64))}),
    ]
    served.execute(asked)
    found = [one.answer().error for one in asked]
    assert [error and error.code for error in found] == [3, 3, 3, None, 3]
    assert "63" in found[0].said
    assert "an input is missing" in found[1].said
    assert "priority" in found[2].said
    assert "NumPy" in found[4].said


def test_what_waited_too_long_may_be_tried_again(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked({"x": np.ones((1, 64), np.float32)}, timeout=7_000_000)
    heard = []
    real = served._pool.submit
    monkeypatch.setattr(
        served._pool, "submit", lambda feeds, **how: heard.append(how) or real(feeds, **{**how, "timeout": 0})
    )
    held = [real({"x": np.ones((4, 64), np.float32)}) for _ in range(64)]
    served.execute([asked])
    assert heard == [{"priority": 0, "timeout": 7.0}]
    assert asked.answer().error.code == 4
    for one in held:
        one.result(30)


def test_a_configuration_that_was_changed_is_told(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = export(build, tmp_path)
    config = config_of(made.path)
    config["input"] = [{"name": "y"}]
    with pytest.raises(MsplitError, match="differ in x, y"):
        triton_model.TritonPythonModel().initialize(
            {"model_config": json.dumps(config), "model_repository": str(made.path), "model_version": "1"}
        )


@pytest.mark.parametrize(("given", "seen"), [("", "1"), ("4,6", "6"), ("4", "1")])
def test_an_instance_sees_its_own_gpu(given: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    triton_model._see_only("1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
