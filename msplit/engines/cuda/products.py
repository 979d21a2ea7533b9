"""Memory layout of the constant operand of a matrix product, chosen by measurement.

TensorFlow keeps weights as (inputs, outputs). cuBLAS has other kernels for the transposed layout, up to a third faster or slower
depending on the sizes (on an H200: 16×256×1024 in 3.4 instead of 5.1 µs; 1×512×256 in 3.1 instead of 2.5), with no rule that a page
could hold. So each shape is timed both ways once per process, alone and eight side by side: what is faster alone often fills more of
the GPU, and then streams gain nothing (the products of an LSTM take 4.3 µs or, transposed, 2.8; on ten streams the whole takes 2.9 ms
or 4.0). Only what is faster both ways is transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from msplit.engines.cuda import contest

_transposed: dict[tuple[Any, ...], bool] = {}


def lay_out(call: Callable[..., Any], arguments: list[torch.Tensor], what: tuple[Any, ...]) -> torch.Tensor:
    """The weights, the same values and logical shape, laid out as the product runs faster.

    Args:
        call: The product; takes `arguments`.
        arguments: Its inputs, on a CUDA device; the weights are the second.
        what: What beside shapes and types tells one kind of product from another.
    """
    data, weights = arguments[0], arguments[1]
    tf32 = torch.backends.cuda.matmul.allow_tf32
    key = (*what, tuple(data.shape), data.stride(), tuple(weights.shape), weights.dtype, tf32)
    turned = weights.t().contiguous().t()
    if key not in _transposed:
        others = [data, turned, *arguments[2:]]
        _transposed[key] = contest.beats(lambda: call(*others), lambda: call(*arguments))
    return turned if _transposed[key] else weights
