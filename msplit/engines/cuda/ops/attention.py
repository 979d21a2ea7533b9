"""Attention: products of queries and keys, their softmax, and the product of that with values."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ir.tf32 import ROUNDED, ROUNDS, for_products
from msplit.engines.cuda.kernels import attention as kernels
from msplit.engines.cuda.kernels.attention import TILES
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.ops.axes import own_attribute

ATTENTION = "_Attention"

EQUATION = "equation"
"""Attribute: as for Einsum, axes of queries, keys, values and result: ``ABqd,ABkd,ABkv->AqBv``."""

KERNEL = "_kernel"
"""Attribute: what runs it, one of `kernels.attention.TILES` or of the library's kernels (`SDPBackend`); absent, the library chooses."""

_CHOOSING = threading.Lock()
"""The library has one choice of kernels for the whole process."""


@lowering(ATTENTION, own=True)
def attention(node: Node, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention as one kernel, as `passes.attention` finds it.

    `bias` is laid as scores are: axes that are in capitals in the equation, in the order of the alphabet, then those of queries and of
    keys; each of size one where it is the same for all. Where there is one query, it has no axis anywhere.
    """
    operands, _, result = str(own_attribute(node, EQUATION)).partition("->")
    terms = operands.split(",")
    size = {
        letter: length
        for term, tensor in zip(terms, (query, key, value), strict=True)
        for letter, length in zip(term, tensor.shape, strict=True)
    }
    if "q" not in result:  # one query
        size["q"] = 1
        bias = None if bias is None else bias.unsqueeze(-2)
    batch = "".join(sorted(letter for letter in result if letter.isupper()))
    query, key, value = (
        _by_head(_ordered(tensor, term, batch + wanted, size), [size[letter] for letter in batch])
        for tensor, term, wanted in zip((query, key, value), terms, ("qd", "kd", "kv"), strict=True)
    )
    mask = None if bias is None else _by_head(bias, [size[letter] for letter in batch])
    made = _attend(node, query, key, value, mask)
    order = batch + "qv" if "q" in result else batch + "v"
    made = made.reshape([size[letter] for letter in order])
    return made.permute([order.index(letter) for letter in result])


def _attend(node: Node, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    scale, causal, kernel = float(node.get("scale", 1.0)), bool(node.get("causal")), node.get(KERNEL)
    if kernel in TILES and can_launch(query.device):
        tf32, rounded, rounds = torch.backends.cuda.matmul.allow_tf32, bool(node.get(ROUNDED)), bool(node.get(ROUNDS))
        return kernels.attention(
            query,
            key,
            value,
            mask,
            TILES[kernel],
            scale=scale,
            causal=causal,
            tf32=tf32,
            rounded=rounded,
            rounds=rounds,
        )
    with _one_kernel(None if kernel in TILES else kernel):
        return for_products(node, scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale))


def _ordered(tensor: Tensor, term: str, order: str, size: Mapping[str, int]) -> Tensor:
    """A tensor with its axes in some order, repeated along those that it has not. The last lies in one piece, as all kernels want it."""
    laid = tensor.permute([term.index(letter) for letter in order if letter in term])
    for place, letter in enumerate(order):
        if letter not in term:
            laid = laid.unsqueeze(place)
    laid = laid.expand([size[letter] for letter in order])
    return laid if laid.stride(-1) == 1 else laid.contiguous()


def _by_head(tensor: Tensor, batch: Sequence[int]) -> Tensor:
    """A tensor with two axes in front of the last two, which is what kernels take: the last of some batch axes, and all others as one.

    An axis of a mask may be of size one instead, and stays so where all that become one are.
    """
    rank = len(batch)
    if rank < 2:
        return tensor.reshape(*tensor.shape[:rank], *([1] * (2 - rank)), *tensor.shape[rank:])
    front = tensor.shape[: rank - 1]
    if tuple(front) != tuple(batch[:-1]) and max(front) > 1:
        tensor = tensor.expand(*batch[:-1], *tensor.shape[rank - 1 :])
    return tensor.reshape(-1, *tensor.shape[rank - 1 :])


@contextlib.contextmanager
def _one_kernel(name: str | None) -> Iterator[None]:
    """Has the library run this kernel, or say that it can not."""
    if name is None:
        yield
        return
    with _CHOOSING, sdpa_kernel(getattr(SDPBackend, name)):
        yield
