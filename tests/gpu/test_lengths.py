"""On a GPU: rows of any length, loops that end early, and tables of vectors under keys give what TensorFlow gives, captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit

pytest.importorskip("tensorflow.python")
pytest.importorskip("torch")
from msplit.engines.base import MASKED_LOOPS
from tests.engines.cuda.cases import outputs_of_tensorflow
from tests.engines.cuda.control_flow import frames_of, graph_of_function, spec
from tests.engines.cuda.frontend import test_masked_loops as loops
from tests.engines.cuda.test_keyed_tables import saved
from tests.run import test_lengths as lengths

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"engine": "cuda", "streams": 4, "precision": "ieee"}


@pytest.mark.parametrize("way", ["prepared", "build"])
def test_rows_of_any_length(way: str, tmp_path: Path) -> None:
    flat = lengths.model(tmp_path, (lengths.places, lengths.attention, lengths.norm, lengths.history))
    if way == "build":
        msplit.build(flat, tmp_path / "build", batches=[1, 4], lengths=[3, lengths.LONGEST], **OPTIONS)
        runner = msplit.open(tmp_path / "build")
    else:
        runner = msplit.prepare(flat, batch=4, lengths=[3, lengths.LONGEST], **OPTIONS)
    with runner:
        for length in (1, 2, 3, 4, 7, 8):
            for rows in (1, 3, 9):
                some = [lengths.row(length, 100 * rows + number) for number in range(rows)]
                feeds = {name: np.concatenate([one[name] for one in some]) for name in ("x", "mask")}
                got, expected = runner.step(feeds), lengths.run(flat, feeds)
                for name, value in expected.items():
                    assert got[name].shape == value.shape
                    if name == "best":  # nearly equal values may be in either order
                        assert (got[name] == value).mean() > 0.9
                    else:
                        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5)


def rnn(x: Any, sizes: Any) -> Any:
    import tensorflow as tf

    gates = np.random.default_rng(1).standard_normal((2 * loops.UNITS, 4 * loops.UNITS)).astype(np.float32)
    cell = loops.Lstm(tf.constant(gates))
    outputs, (c, h) = tf.compat.v1.nn.dynamic_rnn(cell, x, sequence_length=sizes, dtype=tf.float32)
    return outputs, c, h


@pytest.mark.parametrize("how", [{}, {"fuse": False, "group": False}])
@pytest.mark.parametrize("kind", ["rnn", "decoder", "longest"])
def test_loops_that_end_early_are_captured(kind: str, how: dict[str, Any]) -> None:
    if kind == "rnn":
        flat, fed = frames_of(lambda tf, *_: rnn(*loops.placeholders())), list(loops.sequences())
    elif kind == "decoder":
        flat = graph_of_function(loops.decoder(6, loops.by_and), spec([2, loops.UNITS]))
        fed = loops.rows_of_decoder()
    else:
        flat = graph_of_function(loops.longest_of, spec([3, loops.UNITS]), spec([None], "int32", "lengths"))
        rng = np.random.default_rng(2)
        fed = [
            {flat.inputs[0].name: rng.standard_normal((3, loops.UNITS)).astype(np.float32), "lengths": np.int32(some)}
            for some in ([0, 0, 0], [3, 1, 2], [11, 2, 1], [12, 20, 3])
        ]
    shapes = {name: value.shape for name, value in fed[0].items()}
    with msplit.prepare(flat, shapes=shapes, **OPTIONS, **how) as runner:
        assert runner.facts["captured"] is True
        assert runner.facts[MASKED_LOOPS]
        for feeds in fed:
            found, expected = runner.step(feeds), outputs_of_tensorflow(flat, feeds)
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["mutable", "dense"])
def test_rows_under_keys(kind: str, tmp_path: Path) -> None:
    """Keys that are there, and others, of which a step has more than the table."""
    import tensorflow as tf

    rng = np.random.default_rng(3)
    keys = np.unique(rng.integers(0, 1 << 40, 20_000))
    rows = rng.standard_normal((len(keys), 12)).astype(np.float32)
    path = saved(tmp_path / "model", kind, keys, rows)
    function = tf.saved_model.load(str(path)).signatures["serving_default"]
    with msplit.prepare(path, batch=4096, **OPTIONS) as runner:
        for share in (0.0, 0.5, 1.0):
            known = rng.random(4096) < share
            ids = np.where(known, rng.choice(keys, 4096), rng.integers(-(1 << 62), 1 << 62, 4096))
            feeds = {"ids": ids.astype(np.int64), "other": rng.standard_normal(4096).astype(np.float32)}
            found, expected = (
                runner.step(feeds),
                function(**{name: tf.constant(value) for name, value in feeds.items()}),
            )
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value.numpy(), err_msg=name)
