"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.autotune import batched_matmul
from msplit.engines.cuda.ir.dtypes import SIGNED, torch_dtype, wider_type
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.tf32 import for_products

_HALF = (torch.float16, torch.bfloat16)


@lowering("MatMul")
def matmul(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, each transposed first where the node says so."""
    a = a.t() if node.get("transpose_a") else a
    b = b.t() if node.get("transpose_b") else b
    if batched_matmul.TILE in node.attrs:
        return product_in_tiles(node, a, b, (), ())
    return for_products(node, product(a, b, wider_type(node, a)[1]))


def product_in_tiles(node: Node, a: Tensor, b: Tensor, steps: tuple[str, ...], rest: tuple[Tensor, ...]) -> Tensor:
    """A product and what follows it in our own kernel, which an engine chose for this node (`batched_matmul.TILE`)."""
    work = batched_matmul.dense(a, b, steps, rest)
    assert work is not None, "internal error: a kernel was chosen that can not do this"
    work = batched_matmul.with_rounding(work, node.attrs)
    return batched_matmul.by_kernel(work, node.attrs[batched_matmul.TILE], wider_type(node, a)[1])[0]


@lowering("BatchMatMul", "BatchMatMulV2")
def batch_matmul(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """The product of the last two axes, over batch axes that broadcast; an operand may be adjoint."""
    x = x.mH if node.get("adj_x") else x
    y = y.mH if node.get("adj_y") else y
    _, result = wider_type(node, x)
    work = batched_matmul.members(x, y) if batched_matmul.TILE in node.attrs else None
    if work is None:
        return for_products(node, product(x, y, result))
    work = batched_matmul.with_rounding(work, node.attrs)
    return batched_matmul.by_kernel(work, node.attrs[batched_matmul.TILE], result).view(*x.shape[:-1], y.shape[-1])


@lowering("BatchMatMulV3")
def batch_matmul_to(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """The product as BatchMatMulV2 has it, with operands of narrower types than the result's `Tout`."""
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
    # cuBLAS has no integer products, and PyTorch's sums of integers are int64.
    total = torch.einsum if dtype.is_floating_point or dtype.is_complex else _integer_einsum
    signed = SIGNED.get(dtype)
    if signed is not None:
        inputs = tuple(operand.view(signed) for operand in inputs)
    labels = output.replace("...", "")
    single = "".join(dict.fromkeys(labels))
    if single == labels:
        result = total(f"{operands}->{output}", *inputs)
    else:
        front = "..." if "..." in output else ""
        result = _spread(total(f"{operands}->{front}{single}", *inputs), single, output)
    return result if signed is None else result.view(dtype)


def _integer_einsum(equation: str, *inputs: Tensor) -> Tensor:
    """Einstein summation in the inputs' own integers, which wrap around: products of whole tensors, then one sum."""
    left, _, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    ranks = [tensor.dim() - len(term.replace("...", "")) for term, tensor in zip(terms, inputs, strict=True)]
    rank = max((ranks[slot] for slot, term in enumerate(terms) if "..." in term), default=0)
    # Axes of an ellipsis as labels of their own, counted from the last: they broadcast.
    hidden = [f"...{place}" for place in range(rank, 0, -1)]
    wanted = _labels(output, hidden if "..." in output else [])
    # Axes of the product of all operands: those of the result first, then those that are summed over.
    axes = list(dict.fromkeys([*wanted, *(label for term in terms for label in _labels(term, hidden))]))
    result: Tensor | None = None
    for term, tensor, own in zip(terms, inputs, ranks, strict=True):
        names = _labels(term, hidden[rank - own :] if "..." in term else [])
        # A label that an operand has twice stands for the diagonal of both axes, which comes last.
        for label in dict.fromkeys(names):
            while names.count(label) > 1:
                first, second = [place for place, name in enumerate(names) if name == label][:2]
                tensor = tensor.diagonal(dim1=first, dim2=second)
                del names[second], names[first]
                names.append(label)
        # Laid in the common order, with axes of size one for labels that it lacks, operands broadcast.
        order = [names.index(label) for label in axes if label in names]
        laid = tensor.permute(order)
        for place, label in enumerate(axes):
            if label not in names:
                laid = laid.unsqueeze(place)
        result = laid if result is None else result * laid
    assert result is not None
    summed = tuple(range(len(wanted), len(axes)))
    return result.sum(summed, dtype=result.dtype) if summed else result


def _labels(term: str, hidden: list[str]) -> list[str]:
    """The axes of a term by name, those of its ellipsis included."""
    before, dots, after = term.partition("...")
    return [*before, *(hidden if dots else []), *after]


def product(a: Tensor, b: Tensor, result: torch.dtype | None = None) -> Tensor:
    """The matrix product of the last two axes, with broadcasting, for every dtype and device, in another type if one is asked for."""
    if result is not None and result != a.dtype:
        by_cublas = a.device.type == "cuda" and torch.version.hip is None
        if by_cublas and result == torch.float32 and a.dtype in _HALF and min(a.dim(), b.dim()) > 1:
            return _product_in_float32(a, b)
        return product(a, b).to(result)
    signed = SIGNED.get(a.dtype)
    if signed is not None:
        return product(a.view(signed), b.view(signed)).view(a.dtype)
    if a.device.type == "cuda" and not (a.is_floating_point() or a.is_complex()):
        # cuBLAS has no integer products; these are small in practice (indices, counts).
        return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2, dtype=a.dtype)
    return torch.matmul(a, b)


def _product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """A product of matrices in half precision, on a GPU: cuBLAS sums in float32, and need not round what it gives."""
    if a.dim() == b.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (one.expand(*batch, *one.shape[-2:]) for one in (a, b))
    found = torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), out_dtype=torch.float32)
    return found.view(*batch, *found.shape[-2:])


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
