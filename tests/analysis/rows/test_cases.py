"""Each family of ops: what is said to be independent is so in TensorFlow, and what mixes rows is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from msplit.analysis.rows.walk import Rows, independent_rows
from tests.analysis.rows import cases
from tests.analysis.rows.cases import flat_of
from tests.shapes import op_zoo

pytestmark = pytest.mark.tf

BEFORE, ROWS, BEHIND = 2, 3, 4
"""Rows of other requests before and behind those that are compared."""


@pytest.fixture(scope="module")
def model() -> tuple[Any, dict[str, int | str], Rows]:
    """The graph of all cases, what is expected, and what is found."""
    import tensorflow as tf

    graph_def, expected = cases.build(tf)
    return graph_def, expected, independent_rows(flat_of(graph_def, outputs=list(expected)))


def test_every_case_is_decided_as_expected(model):
    _, expected, rows = model
    found = {name: rows.outputs[name] if name in rows.outputs else str(rows.refusals[name]) for name in expected}
    wrong = {
        name: (verdict, found[name])
        for name, verdict in expected.items()
        if (verdict != found[name] if isinstance(verdict, int) else verdict not in str(found[name]))
    }
    assert wrong == {}


def test_what_is_independent_gives_the_same_rows_among_others(model):
    """Run alone, and between rows of other requests."""
    import tensorflow as tf

    graph_def, _, rows = model
    alone = cases.feeds(ROWS, 0)
    first, last = cases.feeds(BEFORE, 1), cases.feeds(BEHIND, 2)
    among = {name: np.concatenate([first[name], value, last[name]]) for name, value in alone.items()}
    names = list(rows.outputs)
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
    with tf.compat.v1.Session(graph=graph) as session:
        small, large = (session.run([f"{name}:0" for name in names], {**fed, "keep:0": 0.7}) for fed in (alone, among))
    for name, one, other in zip(names, small, large, strict=True):
        count = rows.outputs[name]
        if count:
            assert len(one) == count * ROWS, name
            other = other[count * BEFORE : count * (BEFORE + ROWS)]
        assert_same(one, other, name)


def test_what_is_independent_in_a_zoo_of_ops_gives_the_same_rows_among_others():
    """Most ops, each with attributes that change its shape."""
    import tensorflow as tf

    graph_def = op_zoo.build(None)
    rows = independent_rows(flat_of(graph_def))
    among = op_zoo.feeds(BEFORE + ROWS)
    alone = {name: value[BEFORE:] for name, value in among.items()}
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
    names = [name for name, count in rows.outputs.items() if count]
    with tf.compat.v1.Session(graph=graph) as session:
        small, large = (session.run([_tensor(name) for name in names], fed) for fed in (alone, among))
    assert len(names) > 150
    for name, one, other in zip(names, small, large, strict=True):
        assert len(one) == rows.outputs[name] * ROWS, name
        assert_same(one, other[rows.outputs[name] * BEFORE :], name)


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def assert_same(one: np.ndarray, other: np.ndarray, name: str) -> None:
    """The same values, up to rounding in another order."""
    assert one.shape == other.shape, name
    if one.dtype.kind == "f":
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)
    else:
        np.testing.assert_array_equal(one, other, err_msg=name)
