"""Puts one op in the place of an attention."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_uppercase

import numpy as np

from msplit.engines.cuda.ir.dtypes import numpy_dtype
from msplit.engines.cuda.ir.gpus import gpus_of
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ops.attention import ATTENTION, EQUATION, KERNEL
from msplit.engines.cuda.passes.attention.masks import Maker, Mask, mask_of
from msplit.engines.cuda.passes.attention.match import Match, Operand, find
from msplit.engines.cuda.passes.pattern import become_reshape
from msplit.opset.traits import RESHAPES

Decide = Callable[[OpGraph, Match, Op], "str | None"]
"""Told a match and the op that would do it: the kernel, "" for the library's own choice, or None to leave the match as it is."""


def fuse_attention(graph: OpGraph, decide: Decide) -> bool:
    """Turns every attention into one op where that is decided."""
    maker = Maker(graph, gpus=gpus_of(graph))
    replaced: dict[Key, Key] = {}
    for match in find(graph):
        first, kernel, found = graph.numbers, None, _attention(graph, maker, match)
        if found is not None:
            kernel = decide(graph, match, found[0])
        if found is None or kernel is None:
            maker.forget(first)
            continue
        op, result = found
        if kernel:
            op.attrs[KERNEL] = kernel
        made, become = _replace(graph, match, result)
        replaced[made] = become
    _read(graph, replaced)
    return bool(replaced)


def _attention(graph: OpGraph, maker: Maker, match: Match) -> tuple[Op, Key] | None:
    """The op that does a match, and the result, of one axis per atom; None where no kernel can do the same."""
    mask = mask_of(maker, match)
    if mask is None or len(match.batch) > len(ascii_uppercase):
        return None
    letters = dict(zip(match.batch, ascii_uppercase, strict=False))
    letters |= {match.column: "k", match.inner: "d", match.depth: "v"} | dict.fromkeys(match.row, "q")
    sizes = match.atoms.sizes
    operands = (match.query, match.key, match.value)
    inputs = [_by_atom(graph, match, operand) for operand in operands]
    terms = ["".join(letters[atom] for axis in operand.axes for atom in axis) for operand in operands]
    result = [atom for axis in match.result for atom in axis]
    attrs = {
        "T": match.dtype,
        EQUATION: ",".join(terms) + "->" + "".join(letters[atom] for atom in result),
        "scale": match.scale,
        "causal": mask.causal,
    }
    if mask.bias is not None:
        inputs.append(mask.bias)
    first, *between, last = match.ops
    op = graph.add(ATTENTION, first, attrs, inputs, tuple(sizes[atom] for atom in result))
    # The products first: they decide on the stream, and on most of the costs.
    op.source_nodes = list(dict.fromkeys(node for one in (first, last, *between) for node in one.source_nodes))
    op.batch = first.batch
    graph.dtypes[op.node, 0] = match.dtype
    return op, _with_lost(maker, match, mask, op, result)


def _by_atom(graph: OpGraph, match: Match, operand: Operand) -> Key:
    """An operand with one axis per atom. Reshapes in front of it are left out: they may have to copy, to join what is cut again here."""
    key = operand.key
    while (op := graph.ops.get(key[0])) is not None and op.op in RESHAPES and op.inputs[0] in graph.shapes:
        key = op.inputs[0]
    wanted = tuple(match.atoms.sizes[atom] for axis in operand.axes for atom in axis)
    if graph.shapes[key] == wanted:
        return key
    made = graph.add("Reshape", match.ops[0], {"T": match.dtype}, [key, graph.sizes(wanted)], wanted)
    graph.dtypes[made.node, 0] = match.dtype
    return made.node, 0


def _with_lost(maker: Maker, match: Match, mask: Mask, op: Op, result: list[int]) -> Key:
    """The result, with what rows become in which nothing counts."""
    key: Key = (op.node, 0)
    if mask.kept is None:
        return key
    graph, sizes = maker.graph, match.atoms.sizes
    shape = (*(graph.shape(mask.kept) or ())[:-1], 1)
    some = maker.op(op, "Any", {"keep_dims": True}, [mask.kept, np.asarray([-1], np.int32)], shape, "bool")
    axes = tuple((atom,) if size > 1 else () for atom, size in zip(match.order, shape, strict=True))
    kept = maker.laid(op, some, axes, tuple(result), sizes, "bool")
    lost = np.full((1,) * len(result), mask.lost, numpy_dtype(match.dtype))
    return maker.op(op, "SelectV2", {"T": match.dtype}, [kept, key, lost], graph.shapes[key], match.dtype)


def _replace(graph: OpGraph, match: Match, result: Key) -> tuple[Key, Key]:
    """Lets the ops of a match go, but for a reshape of the result where it needs one. What was read, and what is to be read."""
    last = match.ops[-1]
    for op in match.ops[:-1]:
        del graph.ops[op.node]
    made = (last.node, 0)
    if graph.shapes[made] == graph.shapes[result]:
        del graph.ops[last.node]
    else:
        become_reshape(graph, last, result)
    return made, result


def _read(graph: OpGraph, made: dict[Key, Key]) -> None:
    """Lets what read the results of matches read those of the ops in their place; a reshape of a reshape reads what that does."""
    for op in graph.ops.values():
        if op.op in RESHAPES and op.inputs[0] in made:
            op.inputs[0] = made[op.inputs[0]]
    graph.rename({key: result for key, result in made.items() if key[0] not in graph.ops})
