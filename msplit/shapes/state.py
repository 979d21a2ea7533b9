"""Variables, random numbers, inputs, tensor lists and tensor arrays."""

from __future__ import annotations

from collections.abc import Sequence

from msplit.shapes.array import sized
from msplit.shapes.registry import Handle, Node, Outputs, Shape, handle_function, merge, shape_from, shape_function


@shape_function(
    "VarHandleOp", "KvVarHandleOp", "HashTable", "HashTableV2", "MutableHashTable", "MutableHashTableV2", "MutableDenseHashTableV2",
    "AnonymousHashTable", "Iterator", "IteratorV2", "OneShotIterator", "TensorDataset", "FIFOQueueV2", "StatelessRandomGetAlg",
    "VarIsInitializedOp", "TensorListReserve", "EmptyTensorList", "TensorListFromTensor", "TensorListSetItem",
    "TensorListPushBack", "TensorListResize", "TensorListLength", "TensorListScatter", "TensorListScatterV2",
    "TensorListScatterIntoExistingList", "TensorListSplit", "TensorArraySizeV3", "TensorArrayWriteV3", "TensorArrayScatterV3",
    "TensorArraySplitV3", "ReadFile", "ShardedFilename", "Timestamp", "GlobalIterId", "AnonymousIteratorV3", "StackV2",
)  # fmt: skip
def scalar(node: Node) -> Outputs:
    """A scalar: a handle, a list as a variant, a flow, or a plain number."""
    return ((),)


@shape_function("Variable", "VariableV2", "TemporaryVariable")
def ref_variable(node: Node) -> Outputs:
    """The shape attribute."""
    return (node.attr("shape"),)


@shape_function("ReadVariableOp", "_ReadVariablesOp")
def read_variable(node: Node) -> Outputs:
    """The shape of the variable."""
    return tuple(None if handle is None else handle.shape for handle in node.handles) or (None,)


@shape_function("VariableShape")
def variable_shape(node: Node) -> Outputs:
    """A vector as long as the variable's rank."""
    handle = node.handle(0)
    return ((None if handle is None or handle.shape is None else len(handle.shape),),)


@shape_function("Assign", "AssignAdd", "AssignSub", "DestroyTemporaryVariable")
def assign(node: Node) -> Outputs:
    """The variable, with the value's shape."""
    return (merge(node.shape(0), node.shape(1)) if len(node.inputs) > 1 else node.shape(0),)


@shape_function(
    "ScatterAdd", "ScatterSub", "ScatterMul", "ScatterDiv", "ScatterMin", "ScatterMax", "ScatterUpdate", "ScatterNdUpdate",
    "ScatterNdAdd", "ScatterNdSub", "ApplyGradientDescent", "ApplyMomentum", "ApplyAdam", "ApplyAdagrad", "ApplyAdagradV2",
    "ApplyAdadelta", "ApplyRMSProp", "ApplyFtrl", "ApplyFtrlV2", "ApplyProximalAdagrad", "ApplyProximalGradientDescent",
    "ApplyAdaMax", "ApplyCenteredRMSProp", "SparseApplyAdagrad", "SparseApplyAdagradV2", "SparseApplyMomentum",
    "SparseApplyFtrl", "SparseApplyFtrlV2", "SparseApplyRMSProp", "SparseApplyAdadelta", "CountUpTo", "StridedSliceAssign",
)  # fmt: skip
def update(node: Node) -> Outputs:
    """The variable that is updated."""
    return (node.shape(0),)


@shape_function(
    "ResourceApplyGradientDescent", "ResourceApplyMomentum", "ResourceApplyKerasMomentum", "ResourceApplyAdam", "ResourceApplyAdagrad",
    "ResourceApplyAdagradV2", "ResourceApplyAdadelta", "ResourceApplyRMSProp", "ResourceApplyFtrl", "ResourceApplyFtrlV2",
    "ResourceApplyAdamWithAmsgrad", "ResourceApplyAdaMax", "ResourceApplyCenteredRMSProp", "ResourceSparseApplyAdagrad",
    "ResourceSparseApplyAdagradV2", "ResourceSparseApplyMomentum", "ResourceSparseApplyKerasMomentum", "ResourceSparseApplyFtrl",
    "ResourceSparseApplyFtrlV2", "ResourceSparseApplyRMSProp", "ResourceSparseApplyAdadelta",
)  # fmt: skip
def resource_update(node: Node) -> Outputs:
    """No output."""
    return ()


@shape_function(
    "RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt", "ParameterizedTruncatedNormal",
    "StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal", "StatelessRandomUniformInt",
    "StatelessRandomUniformFullInt", "StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2",
    "StatelessRandomUniformIntV2", "StatelessRandomUniformFullIntV2", "StatelessParameterizedTruncatedNormal",
)  # fmt: skip
def random(node: Node) -> Outputs:
    """The shape is the first input."""
    return (sized(node, 0),)


@shape_function(
    "StatefulUniform",
    "StatefulStandardNormalV2",
    "StatefulUniformInt",
    "StatefulUniformFullInt",
    "StatefulTruncatedNormal",
)
def generator(node: Node) -> Outputs:
    """The shape is the third input, after the generator and its algorithm."""
    return (sized(node, 2),)


@shape_function("StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg")
def random_key(node: Node) -> Outputs:
    """A key, a counter and an algorithm."""
    return ((1,), (2,), ()) if node.op.endswith("Alg") else ((1,), (2,))


@shape_function("Multinomial", "StatelessMultinomial")
def multinomial(node: Node) -> Outputs:
    """Samples per row."""
    shape = node.shape(0)
    return ((shape[0] if shape else None, node.scalar(1)),)


@shape_function("RandomGamma", "RandomPoisson", "RandomPoissonV2")
def random_gamma(node: Node) -> Outputs:
    """A sample of the given shape for each parameter."""
    lead, parameters = sized(node, 0), node.shape(1)
    return (None if lead is None or parameters is None else lead + parameters,)


@shape_function("Placeholder", "PlaceholderV2", "_Arg")
def placeholder(node: Node) -> Outputs:
    """The shape attribute."""
    return (node.attr("shape"),)


@shape_function("PlaceholderWithDefault")
def placeholder_with_default(node: Node) -> Outputs:
    """The shape attribute: what is fed need not have the default's shape."""
    return (node.attr("shape"),)


@shape_function("IteratorGetNext", "IteratorGetNextSync", "QueueDequeueV2", "QueueDequeueManyV2")
def next_element(node: Node) -> Outputs:
    """The shapes in the attributes."""
    shapes = node.attr("output_shapes") or ()
    return tuple(shapes) if shapes else (None,) * node.outputs


# Tensor lists (TensorFlow 2's loops) and tensor arrays (TensorFlow 1's).


def _element(node: Node, index: int) -> Shape:
    """Shape of an element given as a value: -1 alone means that even the rank is unknown."""
    value = node.value(index)
    if value is None or value.ndim == 0:
        return None
    return shape_from(node.ints(index))


def _list_element(node: Node, index: int) -> Shape:
    handle = node.handle(0)
    return merge(handle.shape if handle is not None else None, _element(node, index))


@shape_function("TensorListStack")
def list_stack(node: Node) -> Outputs:
    """All elements, stacked."""
    element, handle = _list_element(node, 1), node.handle(0)
    count = int(node.attr("num_elements", -1))
    length = count if count >= 0 else handle.length if handle is not None else None
    return (None if element is None else (length, *element),)


@shape_function("TensorListGetItem")
def list_item(node: Node) -> Outputs:
    """One element."""
    return (_list_element(node, 2),)


@shape_function("TensorListPopBack")
def list_pop(node: Node) -> Outputs:
    """The shorter list and one element."""
    return ((), _list_element(node, 1))


@shape_function("TensorListGather")
def list_gather(node: Node) -> Outputs:
    """Some elements, stacked."""
    element, indices = _list_element(node, 2), node.shape(1)
    return (None if element is None or indices is None else indices + element,)


@shape_function("TensorListElementShape")
def list_element_shape(node: Node) -> Outputs:
    """A vector as long as the rank of an element."""
    handle = node.handle(0)
    return ((None if handle is None or handle.shape is None else len(handle.shape),),)


@shape_function("TensorListConcat", "TensorListConcatV2")
def list_concat(node: Node) -> Outputs:
    """All elements along their first axis, and their lengths."""
    handle = node.handle(0)
    element = handle.shape if handle is not None else None
    return (None if not element else (None, *element[1:]), (handle.length if handle is not None else None,))


@shape_function("TensorArrayV3")
def array_new(node: Node) -> Outputs:
    """A handle and a flow."""
    return ((2,), ())


@shape_function("TensorArrayGradV3")
def array_gradient(node: Node) -> Outputs:
    """A handle and a flow."""
    return ((2,), ())


@shape_function("TensorArrayReadV3")
def array_read(node: Node) -> Outputs:
    """One element."""
    handle = node.handle(0)
    return (None if handle is None else handle.shape,)


@shape_function("TensorArrayGatherV3")
def array_gather(node: Node) -> Outputs:
    """Some elements, stacked."""
    handle, indices = node.handle(0), node.shape(1)
    element = merge(node.attr("element_shape"), handle.shape if handle is not None else None)
    return (None if element is None or indices is None else indices + element,)


@shape_function("TensorArrayConcatV3")
def array_concat(node: Node) -> Outputs:
    """All elements along their first axis, and their lengths."""
    handle = node.handle(0)
    element = handle.shape if handle is not None else None
    return (None if not element else (None, *element[1:]), (None,))


@handle_function("VarHandleOp")
def variable_handle(node: Node) -> Sequence[Handle | None]:
    """A variable of the shape in the attribute."""
    return (Handle(node.attr("shape")),)


@handle_function("KvVarHandleOp")
def growing_table_handle(node: Node) -> Sequence[Handle | None]:
    """DeepRec's growing table: the attribute is the shape of one row."""
    row = node.attr("shape")
    return (Handle(None if row is None else (None, *row)),)


@handle_function("TensorListReserve", "EmptyTensorList")
def new_list(node: Node) -> Sequence[Handle | None]:
    """A list of elements of a shape that is a value."""
    return (Handle(_element(node, 0), node.scalar(1) if node.op == "TensorListReserve" else None),)


@handle_function("TensorListFromTensor")
def unstacked_list(node: Node) -> Sequence[Handle | None]:
    """A list of the rows of a tensor."""
    shape = node.shape(0)
    return (Handle(None if shape is None else shape[1:], shape[0] if shape else None),)


@handle_function("TensorListSetItem", "TensorListPushBack", "TensorListResize", "TensorListPopBack")
def changed_list(node: Node) -> Sequence[Handle | None]:
    """The same list with one element more, less or other."""
    old = node.handle(0)
    shape = old.shape if old is not None else None
    if node.op == "TensorListSetItem":
        return (Handle(merge(shape, node.shape(2)), old.length if old is not None else None),)
    if node.op == "TensorListPushBack":
        return (Handle(merge(shape, node.shape(1))),)
    return (Handle(shape, node.scalar(1) if node.op == "TensorListResize" else None), None)


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
    handle, item = node.handle(0), node.shape(2)
    if handle is not None and item is not None:
        handle.shape = merge(handle.shape, item if node.op == "TensorArrayWriteV3" else item[1:])
    return (None,)
