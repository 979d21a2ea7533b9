"""The sum of two merged products is one op: what a recurrent cell computes of its input and of its state, for all layers at once.

A layer whose input is known beforehand (the first one's: the whole sequence) has been multiplied before; then the sum reads a copy of that
product beside those of the others. The op adds it where it lies, and the copy goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph


@dataclass(frozen=True)
class _Term:
    """One side of a sum: a merged product of the members from `first` on, and what the members before have in its place."""

    product: Op
    first: int = 0
    before: Key | None = None
    copy: Op | None = None


def add_products(graph: OpGraph) -> None:
    """Puts every such sum into one op."""
    readers = graph.consumers()
    fetched = set(graph.fetches.values())

    def alone(key: Key) -> Op | None:
        """The op that makes a value, if one op reads it, and once."""
        return graph.ops.get(key[0]) if len(readers.get(key, ())) == 1 and key not in fetched else None

    for op in list(graph.ops.values()):
        shape = graph.shapes.get((op.node, 0))
        if op.op != "AddV2" or shape is None or len(set(op.inputs)) != 2:
            continue
        if any(graph.shapes.get(key) != shape for key in op.inputs):
            continue
        terms = []
        for key in op.inputs:
            made = alone(key)
            found = _term(graph, made, alone) if made is not None else None
            if found is not None:
                terms.append(found)
        whole = [term for term in terms if not term.first]
        if len(terms) == 2 and whole:
            one = whole[0]
            _add(graph, op, one.product, terms[1] if terms[0] is one else terms[0])


def _term(graph: OpGraph, op: Op, alone: object) -> _Term | None:
    if _is_product(op):
        return _Term(op)
    if op.op != "ConcatV2" or len(op.inputs) != 3 or int(graph.constants[op.inputs[2]]) != 0:
        return None
    product = alone(op.inputs[1])  # type: ignore[operator]
    if product is None or not _is_product(product):
        return None
    return _Term(product, graph.shapes[op.inputs[0]][0], op.inputs[0], op)


def _is_product(op: Op) -> bool:
    return (
        op.op == "_GroupedMatMul"
        and not op.attrs.get("single")
        and not op.attrs["activation"]
        and len(op.attrs["layers"]) == 1
    )


def _add(graph: OpGraph, op: Op, one: Op, other: _Term) -> None:
    gone = [one, other.product, *([other.copy] if other.copy is not None else [])]
    op.inputs = [*one.inputs, *other.product.inputs, *([other.before] if other.before is not None else [])]
    layers = (*one.attrs["layers"], *other.product.attrs["layers"])
    op.attrs = {**one.attrs, "layers": layers, "first": other.first}
    op.op = "_GroupedMatMul"
    op.source_nodes = [node for product in (one, other.product) for node in product.source_nodes] + op.source_nodes
    for product in gone:
        del graph.ops[product.node]
