"""How a Keras model's `fit` trains by its compiled `train_step`."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from msplit.engines.tensorflow.runtime import tensorflow
from msplit.errors import MsplitError


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
