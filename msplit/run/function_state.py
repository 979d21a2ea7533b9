"""The variables of a function that trains. Their values are in one place at a time: on an engine, or in TensorFlow's variables."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msplit import escape
from msplit.engines.base import BESIDE_VARIABLES, Executable
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.errors import EngineError
from msplit.formats.model import Model
from msplit.run.function_export import ExportedFunction
from msplit.run.runner import Runner

SMALL = 4
"""The most values of a variable that is looked at before each step: learning rates, counters, seeds, what a metric sums up."""


@dataclass(frozen=True, eq=False)
class Trained:
    """What trains variables, for one set of shapes.

    Attributes:
        engine: What runs, which has values of its own for them.
        variables: TensorFlow's variables by the engine's names.
        changed: Names of those that a step changes.
    """

    engine: Executable
    variables: Mapping[str, Any]
    changed: frozenset[str]


def trained_by(runner: Runner, exported: ExportedFunction, model: Model) -> Trained:
    """What a runner makes of variables.

    Raises:
        EngineError: It does not tell what it makes of them.
    """
    engine = runner.executable
    if not engine.keeps_state:
        raise EngineError(f"{runner.label} runs a function that changes variables, and keeps none")
    variables = exported.by_node(model, [name for name in engine.save_state() if name not in BESIDE_VARIABLES])
    names = {id(variable): name for name, variable in variables.items()}
    missing = [escape.line(str(one.name)) for one in exported.changed if id(one) not in names]
    if missing:
        raise EngineError(f"{runner.label} keeps no {missing[0]}, which the function changes")
    return Trained(engine, variables, frozenset(names[id(variable)] for variable in exported.changed))


@dataclass(eq=False)
class Whereabouts:
    """Where the values are.

    Attributes:
        at: What trained last and has them; None: TensorFlow's variables do.
        taken: What TensorFlow's variables had when they were taken to the engine, by its names: tensors that share their memory, and
            where that is. As long as somebody has it, TensorFlow leaves it alone, and what is assigned lies elsewhere: that is how it is
            noticed, even if it is the same value again, as of a metric that is reset.
        small: Handles and types of the small ones.
    """

    at: Trained | None = None
    taken: dict[str, tuple[Any, int | None]] = field(default_factory=dict)
    small: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


def take(where: Whereabouts, trained: Trained) -> None:
    """Has the values where the next step is to run.

    They come from TensorFlow's variables, unless the last step ran there: then only those of small variables that were assigned since.
    """
    if where.at is not trained:
        give_back(where)
        where.small = {name: (one.handle, one.dtype) for name, one in trained.variables.items() if _is_small(one)}
        _take(where, trained, trained.variables)
        where.at = trained
        return
    read = tensorflow().raw_ops.ReadVariableOp
    now = {name: read(resource=handle, dtype=dtype) for name, (handle, dtype) in where.small.items()}
    assigned = [name for name, value in now.items() if _address(value) != where.taken[name][1]]
    if assigned:
        _take(where, trained, assigned)


def _take(where: Whereabouts, trained: Trained, names: Iterable[str]) -> None:
    values = {name: np.asarray(trained.variables[name].value()) for name in names}
    trained.engine.load_state(values)
    for name, value in values.items():
        variable = trained.variables[name]
        if name in where.small:
            variable.assign(value.copy())  # TensorFlow keeps tensors of numbers: two assignments of 0.0 may share one
        now = variable.value()
        where.taken[name] = now, _address(now)


def give_back(where: Whereabouts) -> None:
    """Gives TensorFlow's variables the values that steps made. A small one that was assigned since keeps what it was given."""
    trained, taken = where.at, where.taken
    if trained is None:
        return
    values = trained.engine.save_state()
    lost = []
    for name in sorted(trained.changed):
        variable = trained.variables[name]
        if _address(variable.value()) != taken[name][1]:
            if name in where.small:
                continue
            lost.append(str(variable.name))
        variable.assign(np.array(values[name]))  # TensorFlow may go on using the memory of what it is given
    where.at, where.taken = None, {}
    if lost:
        said = ", ".join(map(escape.line, lost[:3])) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        warnings.warn(
            f"{said}: what was assigned since the last sync is lost, steps went on without it; before assigning to a variable of more than "
            f"{SMALL} values, call sync()",
            RuntimeWarning,
            stacklevel=4,
        )


def _is_small(variable: Any) -> bool:
    return bool(variable.shape.num_elements() <= SMALL)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _address(tensor: Any) -> int | None:
    """Where a tensor of numbers lies, on whatever device. What DLPack hands on begins with the address."""
    dtype = tensor.dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool):
        return None
    capsule = tensor.__dlpack__()
    return ctypes.c_void_p.from_address(_pointer(capsule, b"dltensor")).value
