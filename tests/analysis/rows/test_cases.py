"""Each family of ops: what is said to be independent is so in TensorFlow, and what mixes rows is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from msplit.analysis.rows.walk import Rows, independent_rows
from msplit.engines.tensorflow.runtime import session_config
from msplit.opset import schema
from tests.analysis.rows import cases
from tests.analysis.rows.cases import flat_of
from tests.campaign import CAMPAIGN
from tests.shapes import op_zoo

pytestmark = pytest.mark.tf

AS_IT_IS = partial(session_config, 1, cpu_only=True, optimized=False)
"""Options of a session that rewrites nothing, which takes longer than all else."""

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


@pytest.fixture(scope="module")
def run(model) -> Iterator[Callable[[Mapping[str, Any]], list[Any]]]:
    """TensorFlow's answers for all that is found to be independent or without rows, each op as the graph has it."""
    import tensorflow as tf

    graph_def, _, rows = model
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
    with tf.compat.v1.Session(graph=graph, config=AS_IT_IS()) as session:
        yield lambda fed: session.run([f"{name}:0" for name in rows.outputs], {**fed, "keep:0": 0.7})


@pytest.mark.parametrize("chosen", [None, (0, 0, 0), (0, 4, 0)], ids=["any", "all-empty", "one-short-row"])
def test_what_is_independent_gives_the_same_rows_among_others(model, run, chosen):
    """Run alone, and between rows of other requests, of which the longest may be one."""
    _, _, rows = model
    alone = cases.feeds(ROWS, 0)
    if chosen is not None:
        alone["id:0"][:] = chosen
    first, last = cases.feeds(BEFORE, 1), cases.feeds(BEHIND, 2)
    among = {name: np.concatenate([first[name], value, last[name]]) for name, value in alone.items()}
    for name, one, other in zip(rows.outputs, run(alone), run(among), strict=True):
        count = rows.outputs[name]
        if count:
            assert len(one) == count * ROWS, name
            other = other[count * BEFORE : count * (BEFORE + ROWS)]
        assert_same(one, other, name)


def test_a_changed_way_to_the_rows_of_entries_is_refused_or_right():
    """The sum of parts of ragged rows, with another constant or another edge on the way from where rows begin to their numbers."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        number = tf.compat.v1.placeholder(tf.int32, (None,), name="id")
        text = tf.gather(tf.constant(["1 2 3 4", "", "4", " ", "5 6 7"]), number)
        rows = tf.strings.split(text)[:, 1:3]
        tf.identity(tf.reduce_sum(rows.with_values(tf.strings.to_number(rows.values)), axis=1), name="out")
    whole = graph.as_graph_def()
    assert independent_rows(flat_of(whole, outputs=["out"])).independent
    made = [node for node in graph.get_operations() if node.name.startswith(("RaggedGetItem", "RaggedReduceSum"))]
    place = {node.name: index for index, node in enumerate(whole.node)}
    changes: list[tuple[int, int, str | int]] = []
    for node in made:
        if node.type == "Const":
            changes += [(place[node.name], 0, shift) for shift in (-1, 1)]
        others = [other.outputs[0] for other in made[: made.index(node)]]
        for slot, tensor in enumerate(node.inputs):
            fits = [other for other in others if other.dtype == tensor.dtype and other is not tensor]
            changes += [(place[node.name], slot, other.op.name) for other in fits]
    among, parts, proved = np.array([0, 3, 4, 1, 2, 0, 2], np.int32), [(2, 5), (0, 1), (1, 2), (3, 5)], 0
    for index, slot, change in changes if CAMPAIGN else random.Random(1).sample(changes, 100):
        graph_def = schema.graph_pb2.GraphDef.FromString(whole.SerializeToString())
        if isinstance(change, str):
            graph_def.node[index].input[slot] = change
        else:
            value = graph_def.node[index].attr["value"].tensor
            value.CopyFrom(tf.make_tensor_proto(tf.make_ndarray(value) + change))
        if not independent_rows(flat_of(graph_def, outputs=["out"])).independent:
            continue
        with (
            tf.Graph().as_default() as changed,
            tf.compat.v1.Session(graph=changed, config=AS_IT_IS()) as session,
        ):
            try:
                tf.graph_util.import_graph_def(graph_def, name="")
                answers = [session.run("out:0", {"id:0": among[first:end]}) for first, end in ((0, None), *parts)]
            except (ValueError, tf.errors.InvalidArgumentError, tf.errors.InternalError):
                continue  # no graph of TensorFlow's, or one that does not run
        proved += 1
        for answer, (first, end) in zip(answers[1:], parts, strict=True):
            assert_same(answer, answers[0][first:end], f"{graph_def.node[index].name} {slot} {change}")
    assert proved


def test_lengths_that_may_be_fed_are_not_those_of_the_rows():
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        text = tf.compat.v1.placeholder(tf.string, (None,))
        rows = tf.strings.split(text)
        for name, lengths in (("own", rows.row_lengths()), ("fed", None)):
            if lengths is None:
                lengths = tf.compat.v1.placeholder_with_default(rows.row_lengths(), (None,), "lengths")
            numbers, size = tf.repeat(tf.range(tf.shape(text)[0]), lengths), tf.shape(text)[0]
            tf.math.unsorted_segment_sum(tf.strings.to_number(rows.values), numbers, size, name=name)
    found = independent_rows(flat_of(graph.as_graph_def(), outputs=["own", "fed"]))
    assert (found.outputs, [*found.refusals]) == ({"own": 1}, ["fed"])


def test_what_is_known_of_one_branch_is_not_taken_for_the_other():
    """One branch counts the words of each row; the other takes numbers of the user at the same place of its body."""
    import tensorflow as tf

    raw = tf.raw_ops

    def branch(counted: bool) -> Any:
        split = raw.StringSplitV2(input=text, sep=" ", maxsplit=-1)
        of_words = {"input": split.indices[:, 0], "size": split.shape[0], "weights": tf.constant([], tf.int64)}
        given = tf.identity(lengths)
        count = raw.DenseBincount(**of_words) if counted else raw.Abs(x=given)
        splits = tf.concat([np.zeros(1, np.int64), tf.cumsum(count)], 0)
        return tf.RaggedTensor.from_row_splits(split.values, splits, validate=False).to_tensor("-", shape=[None, 2])

    with tf.Graph().as_default() as graph:
        text, lengths = (tf.compat.v1.placeholder(dtype, (None,)) for dtype in (tf.string, tf.int64))
        tf.identity(tf.cond(tf.compat.v1.placeholder(tf.bool, ()), lambda: branch(True), lambda: branch(False)), "out")
    assert independent_rows(flat_of(graph.as_graph_def(), outputs=["out"])).refusals["out"].op == "Cumsum"


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
