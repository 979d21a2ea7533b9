import numpy as np
import pytest

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.node import Unsupported

from .harness import check, run_lowering, values

pytestmark = pytest.mark.tf


def inputs(times, classes, labels, lengths, dtype="float32"):
    indices = [(row, place) for row, every in enumerate(labels) for place in range(len(every))]
    flat = [label for every in labels for label in every]
    x = values((times, len(labels), classes), dtype, seed=times)
    return [x, np.array(indices, np.int64).reshape(-1, 2), np.array(flat, np.int32), np.array(lengths, np.int32)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("times", "classes", "labels", "lengths"),
    [
        (6, 5, [[0, 1], [2, 2, 3]], [6, 6]),
        (6, 5, [[0, 1], [2]], [6, 3]),
        (5, 4, [[0], [1, 1], [2, 0, 1]], [5, 4, 5]),
        (8, 3, [[0, 0, 1, 1]], [8]),
        (1, 4, [[0], [2]], [1, 1]),
        (40, 30, [[*range(9)], [3] * 7], [40, 33]),
    ],
)
def test_loss_and_gradient(times, classes, labels, lengths, dtype):
    check("CTCLoss", inputs(times, classes, labels, lengths, dtype), rtol=1e-4 if dtype == "float32" else 1e-7)


def test_rows_without_a_path():
    """Three alike labels need five turns; four labels are more than three turns."""
    given = inputs(3, 4, [[0, 0, 0], [2], [1, 0, 1, 0]], [3, 3, 3])
    check("CTCLoss", given, {"ignore_longer_outputs_than_inputs": True}, rtol=1e-4)
    loss, gradient = map(to_numpy, run_lowering("CTCLoss", given))  # TensorFlow ends the step
    assert np.isinf(loss).tolist() == [True, False, True]
    assert not gradient[:, 2].any()


@pytest.mark.parametrize("factor", [50, 2000])
def test_large_logits(factor):
    """Of the larger ones most probabilities are zero, so that no path is left."""
    given = inputs(6, 5, [[0, 1], [2, 2, 3]], [6, 6])
    given[0] *= factor
    check("CTCLoss", given, rtol=1e-4)


def test_other_ways_to_merge_are_refused_by_name():
    for attr, value in (("preprocess_collapse_repeated", True), ("ctc_merge_repeated", False)):
        with pytest.raises(Unsupported, match="merged in the paths only"):
            run_lowering("CTCLoss", inputs(6, 5, [[0, 1]], [6]), {attr: value})
