"""Training by Keras' `fit`, and the place where its variables' values are.

How a Keras model's `fit` trains by its compiled `train_step`.

The variables of a function that trains. Their values are in one place at a time: on an engine, or in TensorFlow's variables.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msplit import escape
from msplit.engines.base import BESIDE_VARIABLES, Executable
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.errors import EngineError, MsplitError
from msplit.formats.model import Model
from msplit.run.function_export import ExportedFunction
from msplit.run.runner import Runner


def fit_callback(function: Any, step: Callable[[Any], Any], sync: Callable[[], None], every: int | None) -> Any:
    """A Keras callback by which `fit` trains with a compiled step. Its `let_go` gives the model back as it was.

    `fit` calls the model's `train_function` for each batch, and `get_metrics_result` at the end of an epoch before all else that reads
    variables: validation, and what callbacks do then. Both are put in place of the model's own while it trains.

    Args:
        function: The `train_step` of the model.
        step: The same, compiled.
        sync: Brings variables back to the model.
        every: Do so after so many batches, too.

    Raises:
        MsplitError: It is no `train_step`, the model trains on several devices, or `every` is no number of batches.
    """
    import keras

    model: Any = getattr(function, "__self__", None)
    if not isinstance(model, keras.Model) or function.__name__ != "train_step":
        raise MsplitError(
            "fit trains by the train_step of a Keras model, and something else was compiled",
            fix="compile model.train_step",
        )
    if every is not None and every < 1:
        raise MsplitError("variables can be brought back after one batch at least", fix="give every=1 or more")
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise MsplitError(
            "the model trains on several devices, and a compiled step runs on one", fix="build it without a strategy"
        )

    class Fit(keras.callbacks.Callback):  # type: ignore[misc]
        """What `fit` is given."""

        own: Any = None
        fits = False
        batches = 0

        def on_train_begin(self, logs: Any = None) -> None:
            if self.model is not model:
                raise MsplitError(
                    "this is the callback of another model", fix="give fit that of the model's own train_step"
                )
            self.let_go()
            self.own, self.fits, self.batches = model.train_function, True, 0
            model.train_function, model.get_metrics_result = self.train, self.metrics

        def on_train_end(self, logs: Any = None) -> None:
            sync()
            self.let_go()

        def let_go(self) -> None:
            if self.fits:
                self.fits, model.train_function = False, self.own
                del model.get_metrics_result

        def train(self, iterator: Any) -> Any:
            found = None
            for data in _batches(iter(iterator), model.steps_per_execution):
                found = step(data)
                self.batches += 1
                if every is not None and self.batches % every == 0:
                    sync()
            if found is None:
                raise StopIteration
            return found

        def metrics(self) -> Any:
            if tensorflow().executing_eagerly():  # the step itself asks for them, too, when it is exported
                sync()
            return type(model).get_metrics_result(model)

    return Fit()


def watch_fit(function: Any) -> Callable[[], None]:
    """Has `fit` of the Keras model whose `train_step` was compiled warn where it is not given what trains by that; undone by what is
    returned. Nothing happens for another function."""
    model = getattr(function, "__self__", None)
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(model, keras.Model) or getattr(function, "__name__", "") != "train_step":
        return lambda: None
    if "fit" in vars(model):
        return lambda: None
    own = model.fit

    @functools.wraps(own)
    def fit(*arguments: Any, **named: Any) -> Any:
        given = inspect.signature(own).bind(*arguments, **named).arguments.get("callbacks") or ()
        listed = given if isinstance(given, list | tuple) else getattr(given, "callbacks", [given])
        if not any(hasattr(one, "let_go") for one in listed):
            said = "fit trains in TensorFlow, and not by the compiled train_step: give it callbacks=[step.callback()]"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return own(*arguments, **named)

    def undo() -> None:
        if vars(model).get("fit") is fit:
            del model.fit

    model.fit = fit
    return undo


def _batches(iterator: Iterator[Any], most: int) -> Iterator[Any]:
    """The next batches. Where Keras has no values, such as weights that only some batches of a generator have, there is None."""
    tf = tensorflow()

    def value(part: Any) -> Any:
        return None if isinstance(part, tf.experimental.Optional) else part

    for _ in range(most):
        try:
            data = next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return
        yield tf.nest.map_structure(value, data)


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
