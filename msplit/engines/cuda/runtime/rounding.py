"""Computes the effect of TF32 on a model exactly: only what products and convolutions read is rounded to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msplit.engines.cuda.ir.tf32 import to_tf32

_OPERANDS: Mapping[str, Sequence[int]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "_addmm_activation": (1, 2),
    "convolution": (0, 1),
    "cudnn_convolution_relu": (0, 1),
    "cudnn_convolution_add_relu": (0, 1),
    "convolution_backward": (0, 1, 2),
    "_scaled_dot_product_efficient_attention": (0, 1, 2),
    "_scaled_dot_product_flash_attention": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "_scaled_dot_product_cudnn_attention": (0, 1, 2),
}
"""PyTorch's ops that multiply on tensor cores, and which of their arguments these get."""


class RoundedProducts(TorchDispatchMode):  # type: ignore[misc]
    """A block in which the libraries' products of float32 read it rounded. Of a depthwise convolution, which has no tensor cores, too: that
    is little beside the others."""

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Rounds the operands of products, and calls the op."""
        places = _OPERANDS.get(func.overloadpacket.__name__, ())
        given = [
            to_tf32(one) if place in places and one.dtype == torch.float32 else one for place, one in enumerate(args)
        ]
        return func(*given, **(kwargs or {}))
