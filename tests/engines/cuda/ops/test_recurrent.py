import numpy as np
import pytest

from .harness import check, values

pytestmark = pytest.mark.tf

WHOLE = [5, 3, 0]
"""How many of five turns there are."""


def cell(inputs, cells):
    """State, weights, peepholes and bias."""
    state = [values((2, cells)), values((2, cells), seed=1)]
    weights = [values((inputs + cells, 4 * cells), seed=2), *(values((cells,), seed=seed) for seed in (3, 4, 5))]
    return [*state, *weights, values((4 * cells,), seed=6)]


@pytest.mark.parametrize("op", ["BlockLSTM", "BlockLSTMV2"])
@pytest.mark.parametrize("turns", WHOLE)
@pytest.mark.parametrize("clip", [None, 0.0, 0.1, -1.0])
def test_an_lstm_over_a_sequence(op, turns, clip):
    for peephole in (False, True):
        attrs = {"use_peephole": peephole} if clip is None else {"use_peephole": peephole, "cell_clip": clip}
        # What TensorFlow's kernel leaves in the other outputs behind the last turn is what was in that memory.
        check(op, [np.int64(turns), values((5, 2, 3)), *cell(3, 4)], attrs, outputs=None if turns == 5 else (1, 6))


def test_a_bias_of_the_forget_gate():
    check("BlockLSTM", [np.int64(2), values((2, 2, 3)), *cell(3, 4)], {"forget_bias": -0.5})
    check("LSTMBlockCell", [values((2, 3)), *cell(3, 4)], {"forget_bias": -0.5})


@pytest.mark.parametrize("peephole", [False, True])
def test_one_turn(peephole):
    x = values((2, 3))
    x[0] = [np.inf, -np.inf, np.nan]
    check("LSTMBlockCell", [x, *cell(3, 4)], {"use_peephole": peephole})
