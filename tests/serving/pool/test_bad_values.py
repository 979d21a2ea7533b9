"""A value that a model can not take is the fault of whoever sent it: told as such, of that request alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import msplit
from msplit.errors import InvalidInput
from msplit.serving.server.tensors import StatusCode, refusal

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of five rows."""
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        ids = tf.compat.v1.placeholder(tf.int32, [None], name="ids")
        table = tf.constant(np.arange(10, dtype=np.float32).reshape(5, 2))
        tf.multiply(tf.gather(table, ids), 2.0, name="y")
    path = tmp_path_factory.mktemp("lookup") / "lookup.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return path


@pytest.mark.parametrize("engine", ["cuda", "tensorflow"])
def test_an_id_outside_of_its_table_is_the_clients_fault(lookup: Path, engine: str) -> None:
    request = {"streams": (1,), "engine": engine, "device": "cpu", "effort": "fast"}
    with msplit.pool(lookup, **request, groups=1, batches=(1, 4)) as pool:
        good = {"ids": np.array([4], np.int32)}
        wanted = pool.step(good)["y"]
        for wrong in (5, -1, 1 << 30):
            with pytest.raises(InvalidInput) as caught:
                pool.submit({"ids": np.array([wrong], np.int32)}).result(20)
            told = refusal(caught.value, ran=True)
            assert told.code is StatusCode.INVALID_ARGUMENT
            assert "--" not in told.said
            assert "report" not in told.said
        np.testing.assert_array_equal(pool.step(good)["y"], wanted)
