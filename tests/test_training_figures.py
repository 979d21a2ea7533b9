"""What measures training runs without a GPU, too, on small models, and says that its times are no GPU's."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import training_models

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    training_models.write(folder, ["mmoe"], small=True)
    return folder


@pytest.fixture
def script(monkeypatch):
    """Runs a script of the benchmarks in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(name, *arguments):
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        module.main()
        return module

    return run


def test_ways_to_train_are_verified_and_measured_side_by_side(script, graphs, tmp_path, capsys):
    module = script(
        *("training", graphs, "--out", tmp_path, "--models", "mmoe:4", "--device", "cpu", "--duration", "0.01"),
        *("--streams", "2", "--ieee", "--without", "xla,inference"),
    )
    printed = capsys.readouterr().out
    assert "on the CPU, which tells nothing about a GPU" in printed
    (row,) = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert "error" not in row
    ran = {one["label"]: one for one in row["step"]["variants"]}
    assert {"TensorFlow", "msplit, 1 stream", "msplit, 2 streams", "PyTorch by hand, eager"} < ran.keys()
    assert {f"msplit, 2 streams, {mode}" for mode in module.MODES} < ran.keys()
    for label, one in ran.items():
        assert one["host_times"], f"{label}: {one['skipped']} {one['checks']}"
        assert not one["failed"], label
        assert one["checks"] or label == "TensorFlow"
    assert module.table(module.read(tmp_path / "training.json")) in printed


def test_losses_of_seeds_are_drawn_beside_tensorflows(script, graphs, tmp_path, capsys):
    options = ("--models", "mmoe", "--batch", 8, "--device", "cpu", "--steps", 4, "--seeds", 2, "--streams", 2)
    script("training_curves", graphs, "--out", tmp_path, *options)
    found = json.loads((tmp_path / "curves.json").read_text())["mmoe"]
    assert {np.shape(losses) for losses in found.values()} == {(2, 4)}
    np.testing.assert_allclose(found["msplit, IEEE"], found["TensorFlow"], rtol=1e-3)
    assert found["TensorFlow"][0] != found["TensorFlow"][1]
    assert "mmoe, msplit, TF32: 0.0" in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "training_curves.svg").read_text().count("<polyline") == 3
    script(
        "training_curves", graphs, "--out", tmp_path / "again", *options,
        *("--without", "tensorflow,msplit", "--tensorflow", tmp_path / "curves.json"),
    )  # fmt: skip
    again = json.loads((tmp_path / "again" / "curves.json").read_text())
    assert again == {"mmoe": {"TensorFlow": found["TensorFlow"]}}


def test_labels_are_a_fixed_function_of_the_inputs_and_values_of_their_seed(graphs):
    training = training_models.read(graphs / "mmoe.Adam.json")
    one, same, other = training.feeds(64, 1), training.feeds(64, 1), training.feeds(64, 2)
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["x"], other["x"])
    assert 0.2 < one["label"].mean() < 0.8
    name = "expert_0/dense_0/kernel"
    assert np.array_equal(training.state(3)[name], training.state(3)[name])
    assert not np.array_equal(training.state(3)[name], training.state(4)[name])
    assert not training.state(3)[f"{name}/Adam"].any()
    np.testing.assert_allclose(training.state()["beta2_power"], 0.999)
