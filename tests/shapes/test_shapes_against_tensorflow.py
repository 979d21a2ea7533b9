"""msplit's shape inference against TensorFlow's: on the sample graphs, and op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.shapes import infer
from tests.shapes import op_zoo, tf_graphs

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
# custom_op.pb is not here: TensorFlow can not import ops that it does not have.
GRAPHS = [
    "mmoe_small.pb", "towers_small.pb", "lstm_small.pb", "while_v1.pb", "cond_v1.pb", "inception_v3_stripped.pb", "training.meta",
    "training_resource.meta", "control_flow_v2", "feature_columns", "gru_while", "keras_inception", "keras_lookup", "ragged_sparse",
    "tf1_saved_model",
]  # fmt: skip


@pytest.mark.tf
@pytest.mark.parametrize("name", GRAPHS)
def test_sample_agrees_with_tensorflow_and_nothing_that_it_knows_is_missing(name: str) -> None:
    flat = flatten(read(SAMPLES / name))
    shapes = infer(flat, batch=7)
    theirs = tf_graphs.static_shapes(tf_graphs.graph_def(flat, shapes))
    contradictions, gaps = tf_graphs.differences(flat, shapes, theirs)
    assert contradictions == []
    assert gaps == []


def _flat(graph_def: Any, folder: Path) -> Any:
    path = folder / "zoo.pb"
    path.write_bytes(graph_def.SerializeToString())
    return flatten(read(path))


@pytest.mark.tf
@pytest.mark.parametrize("batch", [None, 1, 6])
def test_every_op_agrees_with_tensorflows_static_shapes(batch: int | None, tmp_path: Path) -> None:
    graph = op_zoo.build(batch)
    flat = _flat(graph, tmp_path)
    given = {name: (batch, *sizes) for name, sizes in op_zoo.SIZES.items()}
    contradictions, gaps = tf_graphs.differences(flat, infer(flat, shapes=given), tf_graphs.static_shapes(graph))
    assert contradictions == []
    assert gaps == []


@pytest.mark.tf
def test_every_op_gives_the_inferred_shape_when_it_runs(tmp_path: Path) -> None:
    import tensorflow as tf

    graph = op_zoo.build(1)
    flat = _flat(graph, tmp_path)
    shapes = infer(flat)
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(graph, name="")
        wanted = {
            f"{name}:{port}": shapes.shape(node, port)
            for node, name in enumerate(flat.graph.names)
            for port, tensor in enumerate(imported.get_operation_by_name(name).outputs)
            if tensor.dtype not in (tf.resource, tf.variant) and not tensor.dtype._is_ref_dtype
        }
        # TensorFlow's graph optimizer rewrites nodes in place, after which some of their outputs can not be fetched.
        options = tf.compat.v1.ConfigProto()
        options.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.compat.v1.Session(config=options) as session:
            session.run([op for op in imported.get_operations() if op.type in ("Assign", "AssignVariableOp")])
            found = session.run(dict(zip(wanted, wanted, strict=True)), op_zoo.feeds(1))
    wrong = [
        f"{name}: inferred {shape}, is {np.shape(found[name])}"
        for name, shape in wanted.items()
        if shape is not None
        and (
            len(shape) != np.ndim(found[name])
            or any(a is not None and a != b for a, b in zip(shape, np.shape(found[name]), strict=True))
        )
    ]
    assert wrong == []
