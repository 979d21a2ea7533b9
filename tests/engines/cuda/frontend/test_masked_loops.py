"""Loops whose number of turns depends on values, unrolled up to a bound, against TensorFlow."""

import numpy as np
import pytest

from msplit.engines.base import MASKED_LOOPS
from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.frontend import unroll
from msplit.errors import EngineError
from tests.engines.cuda.cases import assert_equals_tensorflow, job, outputs_of_tensorflow, run, saved_keras
from tests.engines.cuda.control_flow import Lstm, frames_of, graph_of_function, spec

pytestmark = pytest.mark.tf

T, UNITS, VOCABULARY = 5, 4, 7


def hold(flat, fed, most, **options):
    """Holds a graph against TensorFlow on several inputs, and its bounds against those that are expected."""
    covered = cover(flat)
    assert not covered.reasons
    for feeds in fed:
        assert_equals_tensorflow(flat, feeds, streams=(1, 3), **options)
    facts = CudaEngine().compile(job(flat, fed[0])).facts
    assert [turns for turns, _ in facts[MASKED_LOOPS].values()] == most
    return covered


def sequences():
    """Lengths that end a loop at once, early and never."""
    rng = np.random.default_rng(0)
    for lengths in ([0, 0, 0], [1, 0, 2], [2, 3, 1], [T, 1, 0], [T, T, T]):
        yield {
            "rows": rng.standard_normal((3, T, UNITS)).astype(np.float32),
            "lengths": np.asarray(lengths, np.int32),
        }


@pytest.mark.parametrize("v2", [False, True])
def test_dynamic_rnn_with_lengths(v2):
    import tensorflow as tf

    v1 = tf.compat.v1
    gates = np.random.default_rng(1).standard_normal((2 * UNITS, 4 * UNITS)).astype(np.float32)

    def function(x, lengths):
        outputs, (c, h) = v1.nn.dynamic_rnn(Lstm(tf.constant(gates)), x, sequence_length=lengths, dtype=tf.float32)
        return outputs, c, h

    if v2:
        flat = graph_of_function(function, spec([None, T, UNITS], name="rows"), spec([None], "int32", "lengths"))
    else:
        flat = frames_of(lambda tf, *_: function(*placeholders()))
    hold(flat, list(sequences()), [T])


def placeholders():
    import tensorflow as tf

    v1 = tf.compat.v1
    return v1.placeholder(tf.float32, [None, T, UNITS], "rows"), v1.placeholder(tf.int32, [None], "lengths")
