"""Training on data that the graph reads itself, to their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.training import data as training_data
from msplit.training.loop import TrainSettings, train
from msplit.training.trainer import Trainer
from tests.cli.runner import msplit
from tests.training.models import ON_TENSORFLOW, regression

pytestmark = pytest.mark.tf

SIMULATED = {"engine": "cuda", "device": "cpu", "streams": (1,), "effort": "fast"}


def counting(path: Path) -> Path:
    """A .meta whose steps add the next number of a dataset, 1 to 20, to a variable: what was read shows in it."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        numbers = tf.data.Dataset.range(1, 21).map(lambda one: tf.cast(one, tf.float32))
        number = v1.data.make_one_shot_iterator(numbers).get_next()
        total = v1.get_variable("total", (), initializer=v1.zeros_initializer(), use_resource=True)
        tf.identity(number * 2.0, name="loss")
        with tf.control_dependencies([total.assign_add(tf.multiply(number, 1.0))]):
            step = v1.train.get_or_create_global_step()
            tf.group(step.assign_add(1), name="train_op")
        v1.global_variables_initializer()
        v1.train.export_meta_graph(str(path), saver_def=v1.train.Saver().as_saver_def())
    return path


@pytest.mark.parametrize("request_", [ON_TENSORFLOW, SIMULATED], ids=["tensorflow", "cuda"])
def test_training_ends_where_the_graphs_own_data_end(request_: dict[str, Any], tmp_path: Path) -> None:
    if request_["engine"] == "cuda":
        pytest.importorskip("torch")
    model = counting(tmp_path / "model.meta")
    with Trainer(model, ["train_op"], ["loss"], **request_) as trainer:
        found = train(trainer, training_data.own_data(trainer.specs, {}), TrainSettings(fetch_every=1))
        state = trainer.variables
    assert found.stopped == ""
    read = [float(one.values["loss"]) / 2 for one in found.fetched]
    assert read == list(np.arange(21 - len(read), 21))  # the cuda engine has read some to make itself ready
    assert len(read) == (20 if request_["engine"] == "tensorflow" else found.steps)
    assert len(read) >= 10
    assert float(state["total"]) == sum(read)
    assert int(state["global_step"]) == found.steps == len(read)


def test_the_command_needs_no_data_where_the_graph_has_them(tmp_path: Path) -> None:
    more = ("--target", "train_op", "--fetch", "loss", "--engine", "tensorflow")
    done = msplit("train", counting(tmp_path / "model.meta"), *more, "--save", tmp_path / "out", "--format", "json")
    assert done.code == 0
    assert done.json["steps"] == 20
    assert (tmp_path / "out" / "model-20.index").exists()
    fed = msplit("train", regression(tmp_path / "fed.meta"), *more)
    assert (fed.code, fed.out) == (2, "")
    assert "nothing gives input" in fed.err
