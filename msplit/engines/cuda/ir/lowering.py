"""The table of lowerings: TensorFlow op -> a function on PyTorch tensors.

A lowering is one small function in one file of `ops/`. It takes the node and its data inputs, in the order of the node's
inputs, and returns its output, or a tuple of outputs for an op that has several:

    @lowering("MatMul")
    def matmul(node: Node, a: Tensor, b: Tensor) -> Tensor:
        ...

Inputs that decide shapes (the `shape` of Reshape, the `axis` of Concat) are *static*: they must be known before anything
runs, and come as NumPy arrays instead of tensors. Name their positions (negative ones count from the end):

    @lowering("Reshape", static=(1,))
    def reshape(node: Node, tensor: Tensor, shape: np.ndarray) -> Tensor:
        return tensor.reshape(tuple(int(size) for size in shape))

Rules that every lowering keeps:

* The same result as TensorFlow's kernel for the same inputs and attributes, for every attribute that changes its meaning.
* It runs on any device of its inputs, the CPU and the `meta` device (shapes without data) included. It makes new tensors on the
  device of its inputs, never synchronizes with the device and never reads a tensor's values, so that it can be captured.
  An op whose output shape depends on values is marked `dynamic=True`: it runs eagerly only. Where an attribute pads
  the output to a fixed shape, `unless` names it.
* It never writes to an input. It may return a view of one. Only what changes a variable writes: it *mutates* inputs in place, and
  returns them as its first outputs, in their order. It is registered under the name of TensorFlow's op on references
  (`AssignAdd` for `AssignAddVariableOp`, see `opset.traits`), and takes a variable's value in place of its handle.
* It is pure: no global state, no random numbers but those that its inputs determine.
* What it can not do raises `Unsupported` with the reason, in words that a user understands.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from msplit.engines.cuda.ir.node import Node, Unsupported

LoweringFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Facts about an op's lowering that are known without PyTorch.

    Attributes:
        dynamic: The output's shape depends on values: eager only, never captured.
        unless: Attribute that, where it is true, makes the shape of a dynamic op independent of values.
    """

    dynamic: bool = False
    unless: str = ""

    def dynamic_with(self, attrs: Mapping[str, Any]) -> bool:
        """Returns whether it is dynamic for a node with these attributes."""
        return self.dynamic and not (self.unless and attrs.get(self.unless, False))


@dataclass(frozen=True)
class Lowering(Listed):
    """The function that runs an op, and what has to be known to call it.

    Attributes:
        function: Takes the node and its data inputs.
        static: Positions of the inputs that come as NumPy arrays, known before the run.
        mutates: Positions of the inputs that it changes in place: output 0 is the first of them, afterwards, and so on.
        shape_only: The result depends only on its input's shape and dtype, so that it is known before the run (Shape, Size, Rank).
        own: The engine makes this op of several nodes: no file has it.
        file: Module that defines it, for the documentation.
    """

    op: str
    function: LoweringFunction
    static: tuple[int, ...] = ()
    shape_only: bool = False
    own: bool = False
    file: str = ""
    mutates: tuple[int, ...] = ()

    @property
    def summary(self) -> str:
        """First line of the function's docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


_TABLE: dict[str, Lowering] = {}


def lowering(
    *ops: str,
    static: tuple[int, ...] = (),
    dynamic: bool = False,
    unless: str = "",
    shape_only: bool = False,
    own: bool = False,
    mutates: tuple[int, ...] = (),
) -> Callable[[LoweringFunction], LoweringFunction]:
    """Registers the function as the lowering of the named ops. Registering an op twice is an error."""

    def register(function: LoweringFunction) -> LoweringFunction:
        @functools.wraps(function)
        def lowered(node: Node, *inputs: Any) -> Any:
            try:
                return function(node, *inputs)
            except NotImplementedError as problem:
                if mutates:  # what is done on wider copies changes no variable
                    raise Unsupported(
                        f"there is no kernel for these types: {str(problem).partition(chr(10))[0]}"
                    ) from problem
                from msplit.engines.cuda.ir.dtypes import run_in_signed

                return run_in_signed(function, node, inputs)

        for op in ops:
            if op in _TABLE:
                raise ValueError(f"{op} has a lowering already, in {_TABLE[op].file}")
            known = (shape_only, own, function.__module__, mutates)
            _TABLE[op] = Lowering(op, lowered, static, *known, dynamic=dynamic, unless=unless)
        return lowered

    return register


@functools.cache
def table() -> Mapping[str, Lowering]:
    """Every lowering by op name. Imports PyTorch."""
    import_module("msplit.engines.cuda.ops").load()  # they register themselves here; by name, since they stand above
    return _TABLE


@functools.cache
def listed() -> Mapping[str, Listed]:
    """Every op of TensorFlow's that has a lowering, as `scripts/make_ops_doc.py` has written them down. Needs no PyTorch."""
    found = json.loads((Path(__file__).parents[3] / "opset" / "data" / "lowered.json").read_bytes())
    return {op: Listed(dynamic=op in found["dynamic"], unless=found["dynamic"].get(op, "")) for op in found["ops"]}
