"""Random numbers, inputs, tensor lists and tensor arrays, and what handles refer to."""

from __future__ import annotations

from collections.abc import Sequence

from msplit.opset.traits import ops_with
from msplit.shapes.registry import Handle, Node, Outputs, Shape, handle_function, merge, shape_from, shape_function


@shape_function("Multinomial", "StatelessMultinomial")
def multinomial(node: Node) -> Outputs:
    """Samples per row."""
    shape = node.shape(0)
    return ((shape[0] if shape else None, node.scalar(1)),)


@shape_function("RandomGamma", "RandomPoisson", "RandomPoissonV2")
def random_gamma(node: Node) -> Outputs:
    """A sample of the given shape for each parameter."""
    lead = node.sizes(0)
    return (None if lead is None else lead + node.ranked(1),)


@shape_function("IteratorGetNext", "IteratorGetNextSync", "QueueDequeueV2", "QueueDequeueManyV2")
def next_element(node: Node) -> Outputs:
    """The shapes in the attributes."""
    return tuple(node.attr("output_shapes") or ()) or (None,) * node.outputs


# Tensor lists (TensorFlow 2's loops) and tensor arrays (TensorFlow 1's).


def _given(node: Node, index: int) -> Shape:
    """Shape of an element given as a value: -1 alone means that even the rank is unknown."""
    value = node.value(index)
    return None if value is None or value.ndim == 0 else shape_from(node.ints(index))


@shape_function("TensorListGetItem", "TensorListPopBack")
def list_item(node: Node) -> Outputs:
    """One element, and before it the shorter list where the element is taken away."""
    if node.op == "TensorListPopBack":
        return ((), merge(node.element(), _given(node, 1)))
    return (merge(node.element(), _given(node, 2)),)


@shape_function("TensorListStack")
def list_stack(node: Node) -> Outputs:
    """All elements, stacked."""
    element, count = merge(node.element(), _given(node, 1)), int(node.attr("num_elements", -1))
    return (None if element is None else (count if count >= 0 else node.length(), *element),)


@shape_function("TensorListGather", "TensorArrayGatherV3")
def gather_elements(node: Node) -> Outputs:
    """Some elements, stacked."""
    if node.op == "TensorListGather":
        element = merge(node.element(), _given(node, 2))
    else:
        element = merge(node.attr("element_shape"), node.element())
    return (None if element is None else node.ranked(1) + element,)


@shape_function("TensorListConcat", "TensorListConcatV2", "TensorArrayConcatV3")
def concat_elements(node: Node) -> Outputs:
    """All elements along their first axis, and their lengths."""
    element = node.element()
    lengths = None if node.op == "TensorArrayConcatV3" else node.length()
    return ((None, *element[1:]) if element else None, (lengths,))


handle_function(*ops_with("forwards"))(lambda node: (node.handle(),))
handle_function("IdentityN", "XlaOptimizationBarrier")(lambda node: node.handles)
handle_function("Switch", "RefSwitch")(lambda node: (node.handle(),) * 2)
handle_function("VarHandleOp")(lambda node: (Handle(node.attr("shape")),))


@handle_function("Merge", "RefMerge")
def passed_first(node: Node) -> Sequence[Handle | None]:
    """What the first input that refers to something refers to."""
    return (next((handle for handle in node.handles if handle is not None), None),)


@handle_function("KvVarHandleOp")
def growing_table_handle(node: Node) -> Sequence[Handle | None]:
    """DeepRec's growing table: the attribute is the shape of one row."""
    row = node.attr("shape")
    return (Handle(None if row is None else (None, *row)),)


@handle_function("TensorListReserve", "EmptyTensorList")
def new_list(node: Node) -> Sequence[Handle | None]:
    """A list of elements of a shape that is a value."""
    return (Handle(_given(node, 0), node.scalar(1) if node.op == "TensorListReserve" else None),)


@handle_function("TensorListFromTensor")
def unstacked_list(node: Node) -> Sequence[Handle | None]:
    """A list of the rows of a tensor."""
    shape = node.shape(0)
    return (Handle(None if shape is None else shape[1:], shape[0] if shape else None),)


@handle_function("TensorListSetItem", "TensorListPushBack", "TensorListResize", "TensorListPopBack")
def changed_list(node: Node) -> Sequence[Handle | None]:
    """The same list with one element more, less or other."""
    if node.op == "TensorListSetItem":
        return (Handle(merge(node.element(), node.shape(2)), node.length()),)
    if node.op == "TensorListPushBack":
        return (Handle(merge(node.element(), node.shape(1))),)
    return (Handle(node.element(), node.scalar(1) if node.op == "TensorListResize" else None), None)


@handle_function("TensorListScatter", "TensorListScatterV2", "TensorListScatterIntoExistingList")
def scattered_list(node: Node) -> Sequence[Handle | None]:
    """A list of the rows of a tensor, at given places."""
    rows = node.shape(1 if node.op.endswith("List") else 0)
    return (Handle(None if rows is None else rows[1:]),)


@handle_function("TensorArrayV3")
def new_array(node: Node) -> Sequence[Handle | None]:
    """An array; later writes tell the shape of its elements."""
    return (Handle(node.attr("element_shape"), node.scalar(0)), None)


@handle_function("TensorArrayWriteV3", "TensorArrayScatterV3")
def write_array(node: Node) -> Sequence[Handle | None]:
    """The array that is written learns the shape of its elements."""
    handle, item = node.handle(), node.shape(2)
    if handle is not None and item is not None:
        handle.shape = merge(handle.shape, item if node.op == "TensorArrayWriteV3" else item[1:])
    return (None,)
