"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda import batched
from msplit.engines.cuda.registry import Node, Unsupported, lowering
from msplit.engines.cuda.tensors import torch_dtype

# PyTorch has no products of these; the signed type of the same width gives the same bits, since both wrap around.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@lowering("MatMul")
def matmul(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, each transposed first where the node says so."""
    a = a.t() if node.get("transpose_a") else a
    b = b.t() if node.get("transpose_b") else b
    return product_in_tiles(node, a, b, (), ()) if batched.TILE in node.attrs else product(a, b)


def product_in_tiles(node: Node, a: Tensor, b: Tensor, steps: tuple[str, ...], rest: tuple[Tensor, ...]) -> Tensor:
    """A product and what follows it in our own kernel, which an engine chose for this node (`batched.TILE`)."""
    work = batched.dense(a, b, steps, rest)
    assert work is not None, "internal error: a kernel was chosen that can not do this"
    return batched.by_kernel(work, node.attrs[batched.TILE])[0]


@lowering("BatchMatMul", "BatchMatMulV2")
def batch_matmul(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """The product of the last two axes, over batch axes that broadcast; an operand may be adjoint."""
    x = x.mH if node.get("adj_x") else x
    y = y.mH if node.get("adj_y") else y
    work = batched.members(x, y) if batched.TILE in node.attrs else None
    if work is None:
        return product(x, y)
    return batched.by_kernel(work, node.attrs[batched.TILE]).view(*x.shape[:-1], y.shape[-1])


@lowering("BatchMatMulV3")
def batch_matmul_to(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """As BatchMatMulV2, with operands of narrower types than the result's `Tout`."""
    name = node.get("Tout")
    dtype = torch_dtype(name) if name is not None else x.dtype
    return batch_matmul(node, x.to(dtype), y.to(dtype))


@lowering("Einsum", "XlaEinsum")
def einsum(node: Node, *inputs: Tensor) -> Tensor:
    """Einstein summation, with ellipses and with labels repeated in an input or in the output."""
    operands, arrow, output = str(node.get("equation")).partition("->")
    if not arrow:
        raise Unsupported(f"Einsum {node.name}: equation {node.get('equation')!r} has no '->'")
    dtype = inputs[0].dtype
    if inputs[0].device.type == "cuda" and not (dtype.is_floating_point or dtype.is_complex):
        raise Unsupported(f"Einsum {node.name}: there is no GPU kernel for {str(dtype).removeprefix('torch.')}")
    signed = _SIGNED.get(dtype)
    if signed is not None:
        inputs = tuple(operand.view(signed) for operand in inputs)
    labels = output.replace("...", "")
    single = "".join(dict.fromkeys(labels))
    if single == labels:
        result = torch.einsum(f"{operands}->{output}", *inputs)
    else:
        front = "..." if "..." in output else ""
        result = _spread(torch.einsum(f"{operands}->{front}{single}", *inputs), single, output)
    return result if signed is None else result.view(dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of the last two axes, with broadcasting, for every dtype and device."""
    signed = _SIGNED.get(a.dtype)
    if signed is not None:
        return product(a.view(signed), b.view(signed)).view(a.dtype)
    if a.device.type == "cuda" and not (a.is_floating_point() or a.is_complex()):
        # cuBLAS has no integer products; these are small in practice (indices, counts).
        return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2, dtype=a.dtype)
    return torch.matmul(a, b)


def _spread(result: Tensor, labels: str, output: str) -> Tensor:
    """Puts a result with axes ``...labels`` in the order of the output, repeated labels on a diagonal (`i->ii`)."""
    front = result.dim() - len(labels)
    before, _, after = output.partition("...") if "..." in output else ("", "", output)
    # Names of the axes that exist: a label with how often it came before.
    axes = [(label, 0) for label in labels]
    wanted: list[tuple[str, int]] = []
    for label in before + after:
        count = sum(name == label for name, _ in wanted)
        wanted.append((label, count))
        if count:
            source = front + axes.index((label, count - 1))
            result = torch.diag_embed(result.movedim(source, -1))
            axes.append(axes.pop(source - front))
            axes.append((label, count))
    order = [front + axes.index(name) for name in wanted]
    return result.permute(*order[: len(before)], *range(front), *order[len(before) :])
