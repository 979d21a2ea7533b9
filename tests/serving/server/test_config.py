"""Which models are served, and how requests share steps: from the command line, and from TensorFlow Serving's files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from msplit.errors import LoadError, MsplitError
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.server.config import ModelConfig, distinct, read_batching, read_models
from tests.cli.runner import SAMPLES, msplit
from tests.serving.server.running import free_port


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    for name in ("1", "2", "10", "tmp", "3x"):
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "models" / "4").write_text("no folder")
    return tmp_path / "models"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, [10]),
        ({"latest": 2}, [2, 10]),
        ({"latest": 0}, [1, 2, 10]),
        ({"versions": (10, 1)}, [1, 10]),
        ({"versions": (1,), "labels": {"stable": 1}}, [1]),
    ],
)
def test_versions_are_folders_with_numbers(versions: Path, config: dict, wanted: list[int]) -> None:
    found = ModelConfig("m", versions, **config).folders()
    assert found == {number: versions / str(number) for number in wanted}


@pytest.mark.parametrize("name", ["mmoe_small.pb", "two_signatures"])
def test_what_is_a_model_is_version_1(name: str) -> None:
    assert ModelConfig("m", SAMPLES / name).folders() == {1: SAMPLES / name}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"versions": (4,)}, "'m' has no version 4"),
        ({"labels": {"stable": 2}}, "label 'stable' of model 'm' is for version 2, which is not served"),
    ],
)
def test_versions_that_there_are_not(versions: Path, config: dict, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        ModelConfig("m", versions, **config).folders()


def test_a_folder_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="neither a model nor a build"):
        ModelConfig("m", tmp_path).folders()
    with pytest.raises(LoadError, match="no such file or folder"):
        ModelConfig("m", tmp_path / "nothing").folders()


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    os.mkfifo(tmp_path / "pipe")
    done = msplit("serve", tmp_path / "pipe", "--port", "0", "--rest-api-port", free_port())
    assert (done.code, done.out) == (2, "")
    assert "is not a regular file" in done.err


def test_two_models_of_one_name() -> None:
    with pytest.raises(LoadError, match="two models called 'm'"):
        distinct([ModelConfig("m", Path("a")), ModelConfig("m", Path("b"))])


def test_tensorflow_servings_list_of_models(tmp_path: Path) -> None:
    file = tmp_path / "models.config"
    file.write_text("""
      model_config_list {
        config { name: 'a' base_path: '/models/a' model_platform: "tensorflow" }
        config {
          name: 'b' base_path: '/models/b'
          model_version_policy { specific { versions: 42 versions: 43 } }
          version_labels { key: 'stable' value: 42 }
          version_labels { key: 'canary' value: 43 }
        }
        config { name: 'c' base_path: '/models/c' model_version_policy { latest { num_versions: 2 } } }
        config { name: 'd' base_path: '/models/d' model_version_policy { all: { } } }
      }""")
    assert read_models(file) == (
        ModelConfig("a", Path("/models/a")),
        ModelConfig("b", Path("/models/b"), (42, 43), 1, {"stable": 42, "canary": 43}),
        ModelConfig("c", Path("/models/c"), None, 2),
        ModelConfig("d", Path("/models/d"), None, 0),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model_config_list { config { name: 'a' base_pth: 'b' } }", "base_pth"),
        ("model_config_list { config { name: 'a' } }", "has no base_path"),
        ("model_config_list { }", "lists no model"),
        ("", "has no model_config_list"),
        ("model_config_list { config { name: 'a' base_path: 'b' model_platform: 'onnx' } }", "platform 'onnx'"),
        ("model_config_list {" * 500, "can not be read"),
        (
            "model_config_list { config { name: 'a' base_path: 'b' logging_config { sampling_config { sampling_rate: 1 } } } }",
            "model 'a' has a logging_config",
        ),
    ],
)
def test_lists_of_models_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "models.config"
    file.write_text(text)
    with pytest.raises(LoadError, match=said):
        read_models(file)


@pytest.mark.parametrize("read", [read_models, lambda path: read_batching(path, PoolSettings())])
def test_files_that_are_too_large_are_told(tmp_path: Path, read: Callable[[Path], object]) -> None:
    file = tmp_path / "large"
    with file.open("wb") as out:
        out.truncate((16 << 20) + 1)
    with pytest.raises(MsplitError, match="longer than 16 MiB"):
        read(file)


def test_tensorflow_servings_batching(tmp_path: Path) -> None:
    file = tmp_path / "batching"
    file.write_text("""
      max_batch_size { value: 128 }
      batch_timeout_micros { value: 500 }
      max_enqueued_batches { value: 10 }
      num_batch_threads { value: 8 }
      allowed_batch_sizes: 8
      allowed_batch_sizes: 128""")
    found = read_batching(file, PoolSettings(priorities=2))
    assert found == PoolSettings(8, 128, (8, 128), 500.0, 2, 1280)
    file.write_text("")
    assert read_batching(file, PoolSettings(groups=3)) == PoolSettings(groups=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_batch_size { value: 0 }", "max_batch_size is 0"),
        ("max_batch_size { value: 8 } allowed_batch_sizes: 4", "allowed_batch_sizes are"),
        ("allowed_batch_sizes: 4 allowed_batch_sizes: 2", "allowed_batch_sizes are"),
        ("pad_variable_length_inputs: true", "pad inputs"),
        ("max_batch_size: 8", "can not be read"),
    ],
)
def test_batching_that_can_not_be(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "batching"
    file.write_text(text)
    with pytest.raises(LoadError, match=said):
        read_batching(file, PoolSettings())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Nothing to serve"),
        (["missing.pb"], "missing.pb: there is no such file or folder"),
        (["--model", "mmoe_small.pb"], "write it as NAME=PATH"),
        (["a.pb", "b.pb", "--model_name", "m"], "--model-name is for one model"),
        (["--model_config_file", "missing.config"], "missing.config: the configuration can not be read: No such file"),
        ([SAMPLES / "mmoe_small.pb", "--port", "0", "--rest_api_port", "0"], "Both ports are 0"),
        ([SAMPLES / "mmoe_small.pb", "--port", "9", "--rest_api_port", "9"], "both to be on port 9"),
        ([SAMPLES / "mmoe_small.pb", "--enable_batching=false"], "Requests share steps"),
        ([SAMPLES / "mmoe_small.pb", "--groups", "few"], "'few' is neither a number of one or more nor auto"),
        ([SAMPLES / "mmoe_small.pb", "--host", "nowhere.invalid"], "can not listen on port 8500 of nowhere.invalid"),
        (
            ["--model", f"m={SAMPLES / 'mmoe_small.pb'}", "--model", f"m={SAMPLES / 'while_v1.pb'}"],
            "two models called 'm'",
        ),
        ([SAMPLES / "mmoe_small.pb", "--part", "signature=score"], "there is no signature 'score'"),
    ],
)
def test_a_mistake_is_one_message(arguments: list, said: str) -> None:
    pytest.importorskip("uvicorn")
    ports = (
        []
        if any("port" in str(one) or "host" in str(one) for one in arguments)
        else ["--port", "0", "--rest-api-port", free_port()]
    )
    done = msplit("serve", *arguments, *ports)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert "Traceback" not in done.err


def test_where_nothing_is_named_the_environment_does_as_in_tensorflow_serving_s_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("MODEL_NAME", "ranker")
    monkeypatch.setenv("MODEL_BASE_PATH", str(tmp_path))
    ports = ("--port", "0", "--rest-api-port", free_port())
    assert f"{tmp_path / 'ranker'}: there is no such file or folder" in msplit("serve", *ports).err
    named = msplit("serve", tmp_path / "other.pb", *ports).err
    assert "other.pb: there is no such file" in named
    assert "ranker" not in named


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from msplit.cli import doctor

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else found(name, *rest)
    )
    done = msplit("serve", SAMPLES / "mmoe_small.pb")
    assert (done.code, done.out) == (2, "")
    assert "serving takes what is not installed here: uvicorn\n  fix: pip install " in done.err
    (said,) = [one for one in doctor.runnable([doctor._server()], ["serve"]) if one.subject == "serve"]
    assert (said.status, said.text) == ("missing", "uvicorn is not installed: `serve` needs it")


def test_a_path_of_another_machine_is_to_be_copied() -> None:
    with pytest.raises(MsplitError, match=r"(?s)no such file.*copy it to this machine"):
        ModelConfig("m", Path("gs://bucket/model")).folders()
