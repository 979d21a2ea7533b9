"""Identities, control flow of single nodes, and calls' arguments. Functional control flow is in `functional.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from msplit.opset.traits import ops_with
from msplit.shapes.registry import Handle, Node, Outputs, handle_function, join, merge, shape_function


@shape_function("EnsureShape")
def ensure_shape(node: Node) -> Outputs:
    """What the input and the attribute say together."""
    return (merge(node.shape(0), node.attr("shape")),)


@shape_function("IdentityN", "XlaOptimizationBarrier")
def identities(node: Node) -> Outputs:
    """Every input."""
    return tuple(node.inputs)


@shape_function("Switch", "RefSwitch")
def switch(node: Node) -> Outputs:
    """The same tensor on either output."""
    return (node.shape(0),) * 2


@shape_function("_SwitchN")
def switch_n(node: Node) -> Outputs:
    """The same tensor on every output."""
    return (node.shape(0),) * node.count("num_outs", node.outputs)


@shape_function("Merge", "RefMerge")
def merge_branches(node: Node) -> Outputs:
    """What all inputs have in common, and which one came."""
    return (reduce(join, node.inputs), ())


@shape_function("RefSelect")
def ref_select(node: Node) -> Outputs:
    """What all candidates have in common."""
    return (reduce(join, node.inputs[1:]),)


@shape_function(
    "NoOp", "Assert", "ControlTrigger", "Abort", "PrintV2", "SaveV2", "Save", "MergeV2Checkpoints", "InitializeTable",
    "InitializeTableV2", "InitializeTableFromTextFile", "InitializeTableFromTextFileV2", "LookupTableImport", "LookupTableImportV2",
    "LookupTableInsert", "LookupTableInsertV2", "MakeIterator", "WriteScalarSummary", "WriteSummary", "CreateSummaryFileWriter",
    "FlushSummaryWriter", "CloseSummaryWriter", "QueueEnqueueV2", "QueueEnqueueManyV2", "QueueCloseV2", "AssignVariableOp",
    "AssignAddVariableOp", "AssignSubVariableOp", "DestroyResourceOp", "_Send", "TensorArrayCloseV3",
    "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterMul", "ResourceScatterDiv", "ResourceScatterMin",
    "ResourceScatterMax", "ResourceScatterUpdate", "ResourceScatterNdUpdate", "ResourceScatterNdAdd", "ResourceScatterNdSub",
    "ResourceStridedSliceAssign", "BoostedTreesCreateEnsemble",
)  # fmt: skip
def nothing(node: Node) -> Outputs:
    """No output."""
    return ()


@handle_function(*ops_with("forwards"))
def passed(node: Node) -> Sequence[Handle | None]:
    """What the first input refers to."""
    return (node.handle(0),)


@handle_function("IdentityN", "XlaOptimizationBarrier")
def passed_each(node: Node) -> Sequence[Handle | None]:
    """What each input refers to."""
    return node.handles


@handle_function("Switch", "RefSwitch")
def passed_twice(node: Node) -> Sequence[Handle | None]:
    """What the data input refers to."""
    return (node.handle(0),) * 2


@handle_function("Merge", "RefMerge")
def passed_first(node: Node) -> Sequence[Handle | None]:
    """What the first input that refers to something refers to."""
    return (next((handle for handle in node.handles if handle is not None), None),)
