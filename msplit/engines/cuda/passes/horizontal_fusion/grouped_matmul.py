"""Steps that merged products take along: the sum of two of them, and the memory layout that their readers want."""

from __future__ import annotations

from dataclasses import dataclass

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.pattern import Readers


@dataclass(frozen=True)
class _Term:
    """One side of a sum: a merged product of the members from `first` on, and what the members before have in its place."""

    product: Op
    first: int = 0
    before: Key | None = None
    copy: Op | None = None


def add_products(graph: OpGraph) -> None:
    """Makes one op of the sum of two merged products: what a recurrent cell computes of its input and of its state, for all layers at once.

    A layer whose input is known beforehand (the first one's: the whole sequence) has been multiplied before; then the sum reads a copy of
    that product beside those of the others. The op adds it where it lies, and the copy goes.
    """
    readers = Readers(graph)
    for op in list(graph.ops.values()):
        shape = graph.shapes.get(op.out)
        alike = shape is not None and all(graph.shapes.get(key) == shape for key in op.inputs)
        if op.op != "AddV2" or not alike or len(set(op.inputs)) != 2:
            continue
        terms = [term for key in op.inputs if (term := _term(graph, readers, key)) is not None]
        whole = [term for term in terms if not term.first]
        if len(terms) == 2 and whole:
            one = whole[0]
            _add(graph, op, one.product, terms[1] if terms[0] is one else terms[0])


def _term(graph: OpGraph, readers: Readers, key: Key) -> _Term | None:
    op = readers.maker(key)
    if op is None or _is_product(op):
        return None if op is None else _Term(op)
    if op.op != "ConcatV2" or len(op.inputs) != 3 or int(graph.constants[op.inputs[2]]) != 0:
        return None
    product = readers.maker(op.inputs[1])
    if product is None or not _is_product(product):
        return None
    return _Term(product, graph.shapes[op.inputs[0]][0], op.inputs[0], op)


def _is_product(op: Op) -> bool:
    if op.op != "_GroupedMatMul" or op.attrs.get("single"):
        return False
    return not op.attrs["activation"] and len(op.attrs["layers"]) == 1


def _add(graph: OpGraph, op: Op, one: Op, other: _Term) -> None:
    op.inputs = [*one.inputs, *other.product.inputs, *([] if other.before is None else [other.before])]
    layers = (*one.attrs["layers"], *other.product.attrs["layers"])
    op.attrs = {**one.attrs, "layers": layers, "first": other.first}
    op.op = "_GroupedMatMul"
    op.source_nodes = [*one.source_nodes, *other.product.source_nodes, *op.source_nodes]
    graph.drop(gone for gone in (one, other.product, other.copy) if gone is not None)


def put_rows_first(graph: OpGraph) -> None:
    """Lets products whose members are laid side by side next write each row of all members together: turning them then takes no copy."""
    readers = Readers(graph)
    for op in graph.ops.values():
        key = (op.node, 0)
        if op.op != "_GroupedMatMul" or op.attrs.get("single") or len(op.attrs["layers"]) > 1 or key in readers.fetched:
            continue
        found = [graph.ops[number] for number in readers.of.get(key, ())]
        if found and all(_swaps_first_axes(graph, reader) for reader in found):
            op.attrs["rows_first"] = True


def _swaps_first_axes(graph: OpGraph, op: Op) -> bool:
    order = graph.constants.get(op.inputs[1]) if op.op == "Transpose" else None
    return order is not None and order.tolist() == [1, 0, 2]
