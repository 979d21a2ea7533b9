"""Runs what changes variables several times, through TensorFlow's kernels on resources and through lowerings in place, and compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.opset.traits import on_values, own_outputs, written

from .harness import DEVICE, compare


def run_in_place(
    op: str, variables: Sequence[np.ndarray], inputs: Sequence[Any], attrs: Mapping[str, Any] | None = None
) -> list[np.ndarray]:
    """The variables after one run of the op on values that takes them first, and behind them its own outputs."""
    state = [to_torch(variable.copy(), DEVICE) for variable in variables]
    own = _step(op, state, inputs, attrs or {})
    return [*map(to_numpy, state), *map(to_numpy, own)]


def _step(
    op: str, state: list[Any], inputs: Sequence[Any], attrs: Mapping[str, Any], device: str = DEVICE
) -> list[Any]:
    lowering = table()[op]
    assert lowering.mutates == tuple(range(len(state))), f"{op} is to change its first {len(state)} inputs"
    values = [np.asarray(value) for value in inputs]
    slots = range(len(state), len(state) + len(values))
    arguments = [
        value if slot in lowering.static else to_torch(value.copy(), device)
        for slot, value in zip(slots, values, strict=True)
    ]
    result = lowering.function(Node("node", op, attrs), *state, *arguments)
    results = list(result) if isinstance(result, tuple | list) else [result]
    for before, after in zip(state, results, strict=False):
        assert after is before, f"{op} is to return the variables that it changed"
    for value, argument in zip(values, arguments, strict=True):
        if device != "meta" and argument is not value:
            assert value.tobytes() == to_numpy(argument).tobytes(), f"{op} wrote to an input that is no variable"
    return results[len(state) :]


def check_steps(
    op: str,
    variables: Sequence[np.ndarray],
    steps: Sequence[Sequence[Any]],
    attrs: Mapping[str, Any] | None = None,
    *,
    rtol: float | None = None,
) -> None:
    """Compares variables, and what the op gives, after each step.

    Args:
        op: On resources, as TensorFlow names it; variables are its first inputs.
        variables: Their values in the beginning.
        steps: The other inputs, for each step.
        attrs: Attributes that do not follow from the inputs.
        rtol: Relative tolerance of floats; by dtype when None.
    """
    import tensorflow as tf

    name, attrs = on_values(op), attrs or {}
    assert written(op) == tuple(range(len(variables)))
    raw = getattr(tf.raw_ops, op)
    arguments = [arg.name for arg in _definition(op).input_arg]
    theirs = [tf.Variable(variable) for variable in variables]
    ours = [to_torch(variable.copy(), DEVICE) for variable in variables]
    shapes = [to_torch(variable, "meta") for variable in variables]
    for number, step in enumerate(steps):
        given = [variable.handle for variable in theirs] + [tf.constant(value) for value in step]
        result = raw(**dict(zip(arguments, given, strict=True)), **attrs)
        expected = [] if result is None or own_outputs(op) == 0 else [result]
        found = _step(name, ours, step, attrs)
        _step(name, shapes, step, attrs, "meta")
        for slot, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            compare(to_numpy(our), their.numpy(), rtol, label=f"{op}, step {number}, variable {slot}")
        for our, their in zip(found, expected, strict=True):
            compare(to_numpy(our), their.numpy(), rtol, label=f"{op}, step {number}, its output")


def _definition(op: str) -> Any:
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(op)
