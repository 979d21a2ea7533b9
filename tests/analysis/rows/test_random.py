"""Random graphs against TensorFlow: what is said to be independent is, and what is made to depend on other rows is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from msplit.analysis.rows import walk
from msplit.analysis.rows.node import PerRow
from msplit.analysis.rows.walk import independent_rows
from tests.analysis.rows import random_rows
from tests.analysis.rows.cases import flat_of
from tests.campaign import examples

pytestmark = pytest.mark.tf

BEFORE, ROWS, BEHIND = 1, 3, 2
"""Rows of other requests before and behind those that are compared."""


@settings(max_examples=examples(40, 5_000))
@given(st.data())
def test_what_is_independent_gives_the_same_rows_among_others(data):
    import tensorflow as tf

    alone, first, last = (random_rows.feeds(n, seed) for seed, n in enumerate((ROWS, BEFORE, BEHIND)))
    among = {name: np.concatenate([first[name], value, last[name]]) for name, value in alone.items()}
    with tf.Graph().as_default() as graph:
        builder = random_rows.Builder(tf, lambda options: data.draw(st.sampled_from(list(options))))
        for _ in range(data.draw(st.integers(1, 14))):
            made = builder.step(random_rows.STEPS, builder.other())
            builder.values += [] if made is None else [made]
        names = [tensor.op.name for tensor in builder.values[len(random_rows.INPUTS) :]]
        assume(names)
        rows = independent_rows(flat_of(graph.as_graph_def(), outputs=names))
        with tf.compat.v1.Session(graph=graph) as session:
            runs = list(rows.outputs)
            try:
                session.run([f"{name}:0" for name in runs], alone)
            except (tf.errors.InvalidArgumentError, tf.errors.InternalError):
                runs = [name for name in runs if _runs(tf, session, name, alone)]
            # All at once: TensorFlow prepares each set of outputs by itself.
            answers = [session.run([f"{name}:0" for name in runs], fed) for fed in (alone, among)]
            for name, one, other in zip(runs, *answers, strict=True):
                count = rows.outputs[name]
                if count:
                    assert len(one) == count * ROWS
                    other = other[count * BEFORE : count * (BEFORE + ROWS)]
                np.testing.assert_array_equal(one, other, err_msg=name)


def _runs(tf: Any, session: Any, name: str, fed: Any) -> bool:
    try:
        session.run(f"{name}:0", fed)
    except (tf.errors.InvalidArgumentError, tf.errors.InternalError):
        return False
    return True


def _chain(tf: Any, choose: Callable[[Sequence[Any]], Any], length: int, mixed: tuple[int, int, int] | None) -> Any:
    """Steps of which each goes on from the last, and the names of what is there before each and in the end.

    Before step `mixed[0]` mixer `mixed[1]` works along axis `mixed[2]`.
    """
    with tf.Graph().as_default() as graph:
        builder = random_rows.Builder(tf, choose)
        last, names = builder.other(), []
        for step in range(length):
            if mixed and step == mixed[0]:
                last = random_rows.MIXERS[mixed[1]](tf, last, mixed[2])
            names.append(last.op.name)
            made = builder.step(random_rows.STEPS, last)
            last = last if made is None else made
            builder.values += [] if made is None else [made]
        names.append(last.op.name)
        return flat_of(graph.as_graph_def(), outputs=[last.op.name]), names


@settings(max_examples=examples(25, 5_000))
@given(st.data(), st.integers(1, 6), st.integers(0, len(random_rows.MIXERS) - 1))
def test_what_mixes_rows_is_found_wherever_it_is(data, length, mixer):
    import tensorflow as tf

    drawn: list[int] = []

    def choose(options: Sequence[Any]) -> Any:
        drawn.append(data.draw(st.integers(0, len(options) - 1)))
        return options[drawn[-1]]

    flat, names = _chain(tf, choose, length, None)
    walked, _ = walk.walked(flat, None, {})
    index = flat.graph.index
    states = [walked.state(index[name], 0) if name in index else None for name in names]
    assume(isinstance(states[-1], PerRow) and names[-1] not in random_rows.INPUTS)
    # Not behind a shape: what has that alone of rows does not depend on them.
    steps = [step for step, state in enumerate(states[:-1]) if isinstance(state, PerRow)]
    assume(steps)
    step = data.draw(st.sampled_from(steps))
    again = iter(drawn)
    mixed, names = _chain(tf, lambda options: options[next(again)], length, (step, mixer, states[step].axis))
    assert names[-1] in independent_rows(mixed).refusals
