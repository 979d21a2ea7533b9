"""Rows that Keras divides by rows of a dense tensor: as in TensorFlow, zeros and NaN in the divisor included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.tensorflow.engine import REFERENCE as TENSORFLOW
from msplit.errors import EngineError
from tests.campaign import examples
from tests.engines.cuda.cases import options_of, scattered
from tests.row_division import COUNT, FILE, ROWS, WIDTH, expected, feeds_of, flat_of, state_of

DATA = FILE.read_bytes()
PLACES = st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, WIDTH - 1)), max_size=4)


def job_of(data: bytes = DATA, streams: int = 3, **options: Any) -> Job:
    flat = flat_of(data)
    ids = scattered(flat, streams) if streams > 1 else np.zeros(len(flat), np.int32)
    feeds, state = feeds_of(range(COUNT)), state_of()
    return Job(flat, ids, streams, feeds, precision=Precision.IEEE, options=options_of(**options), state=state)


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    executable = ENGINE.build(job_of())
    yield executable
    executable.close()


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    executable = TENSORFLOW.build(job_of(streams=1))
    yield executable
    executable.close()


def after(executable: Any, state: Any, feeds: Any) -> Any:
    executable.load_state(state)
    executable.step(feeds)
    return executable.save_state()


def alike(found: Any, wanted: Any) -> None:
    """NaN and infinities where they are to be, and all else within rounding."""
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def broken(zeros: Any, nans: Any) -> Any:
    """Variables with an accumulator in which these places are zero, and those no number."""
    state = state_of()
    for places, value in ((zeros, 0.0), (nans, np.nan)):
        for place in places:
            state["accumulator"][place] = value
    return state


@pytest.mark.tf
@settings(max_examples=examples(25, 500))
@given(st.lists(st.integers(0, ROWS - 1), min_size=COUNT, max_size=COUNT), st.integers(0, 9))
def test_rows_of_any_ids_are_divided_as_in_tensorflow(ours: Any, theirs: Any, ids: Any, seed: int) -> None:
    state, feeds = state_of(seed), feeds_of(ids, seed)
    wanted = after(theirs, state, feeds)
    alike(after(ours, state, feeds), wanted)
    alike(expected(state, feeds), wanted)


@pytest.mark.tf
@settings(max_examples=examples(25, 500))
@given(st.sets(st.integers(0, ROWS - 1), min_size=COUNT, max_size=COUNT), PLACES, PLACES)
def test_zeros_and_nan_in_the_divisor_arrive_where_tensorflow_has_them(
    ours: Any, theirs: Any, ids: Any, zeros: Any, nans: Any
) -> None:
    """Keras puts rows at the right places only where their ids rise."""
    state, feeds = broken(zeros, nans), feeds_of(sorted(ids), epsilon=0.0)
    wanted = after(theirs, state, feeds)
    alike(after(ours, state, feeds), wanted)
    alike(expected(state, feeds), wanted)


@settings(max_examples=examples(25, 500))
@given(st.lists(st.integers(0, ROWS - 1), min_size=COUNT, max_size=COUNT), PLACES, PLACES)
def test_each_row_stays_that_of_its_id(ours: Any, ids: Any, zeros: Any, nans: Any) -> None:
    """Where Keras mixes them up: ids in any order, and twice, beside rows that are divided by zero."""
    state, feeds = broken(zeros, nans), feeds_of(ids, epsilon=0.0)
    alike(after(ours, state, feeds), expected(state, feeds))


@pytest.mark.parametrize("options", [{}, {"fuse": True, "group": True}], ids=["plain", "fused and grouped"])
def test_what_is_as_large_as_the_table_is_added_as_a_whole(options: Any) -> None:
    job = job_of(**options)
    program = CudaEngine().compile(job).program
    assert not program.dynamic
    assert "ConcatV2" not in {step.op.op for step in program.steps}, "no rows of the table behind those of the ids"
    executable = ENGINE.build(job)
    state, feeds = broken([(3, 1)], [(9, 0)]), feeds_of([7, 3, 3, 0, 1], epsilon=0.0)
    alike(after(executable, state, feeds), expected(state, feeds))
    executable.close()


ELSE, THEN, SPREAD = "cond_false_38", "cond_true_37", "cond_false_84"
"""The branches of the division, and that of what puts zeros between rows."""


def changed(function: str, op: str, change: Any) -> bytes:
    """The step with one node of a branch changed."""
    from tensorflow.core.framework.graph_pb2 import GraphDef

    graph = GraphDef.FromString(DATA)
    nodes = [
        node
        for one in graph.library.function
        if one.signature.name == function
        for node in one.node_def
        if node.op == op
    ]
    change(nodes[0])
    data: bytes = graph.SerializeToString()
    return data


def op_is(name: str) -> Any:
    return lambda node: setattr(node, "op", name)


def batched(node: Any) -> None:
    node.attr["batch_dims"].i = 1


def other_input(slot: int, other: int) -> Any:
    return lambda node: node.input.__setitem__(slot, node.input[other])


@pytest.mark.parametrize(
    ("branch", "op", "change"),
    [
        (THEN, "LogicalOr", op_is("LogicalAnd")),
        (THEN, "RealDiv", op_is("Mul")),
        (ELSE, "RealDiv", op_is("Sub")),
        (THEN, "GatherV2", batched),
        (THEN, "GatherV2", other_input(0, 1)),
        (THEN, "StatelessIf", other_input(1, 2)),
        (THEN, "Equal", op_is("NotEqual")),
        (SPREAD, "ScatterNd", other_input(1, 0)),
        (SPREAD, "ConcatV2", other_input(1, 0)),
    ],
    ids=["both", "product", "difference", "batched", "table", "rows", "unequal", "numbers", "zeros"],
)
def test_what_looks_like_it_is_refused_as_before(branch: str, op: str, change: Any) -> None:
    with pytest.raises(EngineError, match=r"StatelessIf|batch_dims"):
        CudaEngine().compile(job_of(changed(branch, op, change)))
