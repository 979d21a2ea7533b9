"""Which axes and constants patterns take."""

import numpy as np
import pytest

from msplit.engines.cuda.passes.pattern import per_channel, trailing


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((2, 3, 4), 4, (4,)),
        ((2, 3, 4), 12, (3, 4)),
        ((2, 3, 4), 24, (2, 3, 4)),
        ((2, 3, 4), 6, None),
        ((2, 4, 1), 4, (4, 1)),
        ((), 1, None),
        ((0, 3), 3, (3,)),
    ],
)
def test_trailing_axes(shape, size, expected):
    assert trailing(shape, size) == expected


def test_per_channel_takes_what_is_the_same_everywhere_else():
    shape, last = (2, 5, 3), (2,)
    assert per_channel(np.float32(2), shape, last).tolist() == [2, 2, 2]
    assert per_channel(np.arange(3.0), shape, last).tolist() == [0, 1, 2]
    assert per_channel(np.arange(3.0).reshape(1, 1, 3), shape, last).tolist() == [0, 1, 2]
    assert per_channel(np.arange(5.0).reshape(5, 1), shape, last) is None
    assert per_channel(np.ones((1, 1, 1, 3)), shape, last) is None
    assert per_channel(np.arange(5.0).reshape(5, 1), shape, (1,)).tolist() == [0, 1, 2, 3, 4]
    assert per_channel(np.arange(15.0).reshape(5, 3), shape, (1, 2)).tolist() == list(range(15))
    assert per_channel(np.ones(3), (2, 1), (1,)) is None
