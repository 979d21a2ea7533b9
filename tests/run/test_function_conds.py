"""Conds that assign, and calls that XLA compiles, are straight lines afterwards that leave the same in every variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import msplit
from msplit.errors import EngineError
from msplit.run.function_export import export
from tests.campaign import examples

pytestmark = pytest.mark.tf

SIMULATED = {"engine": "cuda", "device": "cpu", "fuse": False, "group": False}
SIGNS = np.array([[1, 1, 1], [-1, 1, 1], [1, -1, -1], [-1, -1, 1]], np.float32)


@pytest.fixture(scope="module")
def tf() -> Any:
    from msplit.engines.tensorflow.runtime import tensorflow

    return tensorflow()


VARIABLES = st.integers(0, 2)
WRITES = st.tuples(
    st.sampled_from(["assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub"]),
    VARIABLES,
    VARIABLES,
    VARIABLES,
)
STATEMENTS = st.recursive(
    st.lists(WRITES, min_size=1, max_size=3),
    lambda inner: st.lists(
        WRITES | st.tuples(st.just("if"), VARIABLES, inner, inner) | st.tuples(st.just("call"), inner),
        min_size=1,
        max_size=3,
    ),
    max_leaves=6,
)


class Program:
    """Writes of three variables, in order, some only where an input has a sign, or in a function of their own. Gives what it read."""

    def __init__(self, tf: Any, statements: Any) -> None:
        self.tf, self.statements = tf, statements
        self.variables = [tf.Variable(np.array([number + 1, -2], np.float32)) for number in range(3)]

    def __call__(self, signs: Any) -> Any:
        return self._run(self.statements, signs)

    def _run(self, statements: Any, signs: Any) -> Any:
        tf, seen = self.tf, self.variables[0] * 1.0
        for what, *rest in statements:
            if what == "if":
                place, yes, no = rest
                seen += tf.cond(
                    signs[place] > 0, lambda yes=yes: self._run(yes, signs), lambda no=no: self._run(no, signs)
                )
            elif what == "call":
                seen += tf.function(self._run, jit_compile=True, autograph=False)(rest[0], signs)
            else:
                target, source, factor = rest
                value = 0.5 * self.variables[source] + signs[factor]
                if what.startswith("scatter"):
                    value = tf.IndexedSlices(value, tf.constant([1, 1]))
                getattr(self.variables[target], what)(value)
                seen += self.variables[target]
        return seen


@settings(max_examples=examples(3, 100))
@given(STATEMENTS)
def test_variables_are_left_as_by_the_conds(tf: Any, tmp_path_factory: Any, statements: Any) -> None:
    ours, theirs = Program(tf, statements), Program(tf, statements)
    folder: Path = tmp_path_factory.mktemp("program") / "model"
    exported = export(tf.function(ours, autograph=False), ((SIGNS[0],), {}), [SIGNS[0]], folder, straight=True)
    loaded = tf.saved_model.load(str(folder))
    step, stock = loaded.signatures["serving_default"], tf.function(theirs, autograph=False)
    numbers = [next(n for n, mine in enumerate(ours.variables) if mine is one) for one in exported.variables]
    for signs in SIGNS:
        np.testing.assert_allclose(step(input_0=tf.constant(signs))["output_0"], stock(signs), rtol=1e-5)
        for found, number in zip(loaded.weights, numbers, strict=True):
            np.testing.assert_allclose(found, theirs.variables[number], rtol=1e-5)


STATEMENT = (
    "if",
    0,
    [("assign", 0, 1, 2), ("scatter_add", 2, 0, 1), ("if", 1, [("assign_add", 1, 0, 0)], [("assign", 0, 2, 1)])],
    [("assign_sub", 0, 0, 2), ("scatter_sub", 1, 2, 0)],
)


def test_conds_that_assign_run_on_the_engine(tf: Any) -> None:
    ours, theirs = (Program(tf, [("call", [STATEMENT]), STATEMENT]) for _ in range(2))
    with msplit.compile(ours, **SIMULATED, streams=1) as fast:
        for signs in SIGNS:
            np.testing.assert_allclose(fast(signs), theirs(signs), rtol=1e-5)
    for one, other in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("where", ["loop", "scatter in a cond"])
def test_other_writes_in_conds_and_loops_are_refused_by_name(tf: Any, where: str) -> None:
    table = tf.Variable(np.zeros((4, 2), np.float32))

    @tf.function
    def step(x: Any) -> Any:
        if where == "loop":
            for _ in tf.range(3):
                table.assign_add(tf.ones_like(table))
        elif tf.reduce_sum(x) > 0:
            table.scatter_nd_add([[1]], [[1.0, 1.0]])
        return x + table[0]

    with (
        msplit.compile(step, **SIMULATED, streams=1) as fast,
        pytest.raises(EngineError, match="while" if where == "loop" else "cond"),
    ):
        fast(np.ones(2, np.float32))
