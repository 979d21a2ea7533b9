"""A function of TensorFlow's that runs on streams: what it is called with goes through `prepare`, once for each set of shapes.

One that writes variables, as a train step does, shares them with TensorFlow: see `function_state`."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Unpack
from weakref import WeakSet

import numpy as np

from msplit import escape
from msplit.assignment.model import DisplayMixin, Facts, load
from msplit.engines.base import Feeds, is_array, is_tensor, type_name
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.engines.tensors import as_array, is_tensorflow, lies_on, made_like
from msplit.errors import MsplitError
from msplit.run.function_export import export, write_inputs
from msplit.run.keras_fit import Trained, Whereabouts, fit_callback, give_back, take, trained_by, watch_fit
from msplit.run.prepare import prepare_for
from msplit.run.request import RunRequest, StepOptions, request_of
from msplit.run.runner import Runner
from msplit.run.variants import choose_engine

STREAMS = 8
"""The largest number where nobody says one."""

MOST = 8
"""Sets of shapes that are kept ready. The one that was not called for longest goes first."""

Key = tuple[Any, ...]

_TRAIN = "step = msplit.compile(model.train_step), then model.fit(…, callbacks=[step.callback()])"

_INSTEAD = {
    **dict.fromkeys(("predict", "predict_on_batch", "predict_step", "call"), "call it with a batch, as in fast(x)"),
    **dict.fromkeys(("evaluate", "test_step", "test_on_batch"), "call it with a batch, or evaluate the model itself"),
    **dict.fromkeys(("fit", "train_step", "train_on_batch"), f"to train on streams, {_TRAIN}"),
}
"""What to do in place of what a Keras model has, by its name."""


def compile(
    function: Callable[..., Any],
    *,
    fallback: Literal["tensorflow"] | None = None,
    most: int = MOST,
    improve: bool = False,
    **options: Unpack[StepOptions],
) -> CompiledFunction:
    """A model or function that gives what the original gives, by `prepare`.

    Example::

        fast = msplit.compile(model, streams=8)
        scores = fast({"user": users, "item": items})       # arrays in, the same structure back

    The first call with arrays of new shapes or types exports the function for them and prepares it, which takes seconds; later ones run
    at once. Results are NumPy arrays, or tensors of TensorFlow where one of the arguments is. A tensor that is on the GPU (TensorFlow's,
    PyTorch's, CuPy's, JAX's: whatever speaks DLPack) is taken from there, and results are then tensors of its library on the GPU. Arguments
    that are no arrays (flags, None, strings) are part of the function, as they are for `tf.function`.

    Args:
        function: A Keras model, a `tf.function`, a concrete function, a plain function of tensors, or what `tf.saved_model.load` gives, of
            which it takes ``serving_default`` where it can not be called itself.
        fallback: ``tensorflow``: the original function answers while another shape is being prepared, in a thread of its own, and for good
            where it can not be, of which a warning is given. None: a call waits, and raises what is in the way.
        most: Sets of shapes to keep ready, each with weights and memory of its own.
        improve: As for `prepare`: shapes that are new are ready soon, and what was prepared in full takes over later.
        options: As for `prepare`, but for batch and shapes, which are those of the arguments: see `StepOptions`. `streams` are eight where
            nothing is said; the simulator takes fewer where more gain nothing. Several `devices` share the rows of what is as long as the
            first argument; the function is traced with that length left open.

    Raises:
        MsplitError: It is nothing that can be called.

    A function that changes variables, such as the `train_step` of a Keras model, trains: its variables are on the engine's device while it
    does, for all sets of shapes together, and `CompiledFunction.sync` brings them back, as leaving the ``with`` block does.
    """
    found = _callable(function)
    if most < 1:
        raise MsplitError("at least one set of shapes must be kept", fix="give most=1 or more")
    request = request_of(compile, StepOptions, options, streams=STREAMS)
    return CompiledFunction(found, request, fallback, most, improve=improve)


def _callable(function: Any) -> Callable[..., Any]:
    if callable(function):
        found: Callable[..., Any] = function
        return found
    signatures = getattr(function, "signatures", None)
    if isinstance(signatures, Mapping) and signatures:
        name = "serving_default" if "serving_default" in signatures else next(iter(signatures))
        return _named(signatures[name])
    raise MsplitError(
        f"a {type(function).__name__} can not be called",
        fix="give a Keras model, a tf.function or what tf.saved_model.load gives; a path is for `msplit.prepare`",
    )


def _named(signature: Any) -> Callable[..., Any]:
    """A signature takes its tensors by name: one of them alone may come without."""
    names = list(signature.structured_input_signature[1])

    def call(*arguments: Any, **named: Any) -> Any:
        if len(arguments) == 1 and len(names) == 1 and not named:
            return signature(**{names[0]: arguments[0]})
        if arguments:
            raise MsplitError(f"a signature takes its inputs by name: {', '.join(names)}")
        return signature(**named)

    return call


@dataclass(frozen=True, eq=False)
class _Concrete:
    """The function compiled for one set of shapes, as TensorFlow's concrete functions are.

    Attributes:
        structure: The result's, with the names of its outputs, and None where it has None.
        trained: What it makes of variables; None where it only reads them, which makes them constants.
        folder: What the host part runs.
    """

    runner: Runner
    structure: Any
    trained: Trained | None
    folder: tempfile.TemporaryDirectory[str]

    def close(self) -> None:
        self.runner.close()
        self.folder.cleanup()


class CompiledFunction(DisplayMixin):
    """What `compile` gives. Threads may call it. Closing it, or leaving its ``with`` block, gives streams and memory back."""

    def __init__(
        self,
        function: Callable[..., Any],
        request: RunRequest,
        fallback: str | None,
        most: int = MOST,
        *,
        improve: bool = False,
    ) -> None:
        self._function, self._request, self._most, self._improve = function, request, most, improve
        self._beside = None if fallback is None else ThreadPoolExecutor(1, "msplit-function")
        self._made: dict[Key, Future[_Concrete]] = {}  # what was called last is at the end
        self._told: WeakSet[Future[_Concrete]] = WeakSet()  # of which a warning was given
        self._lock = threading.Lock()
        self._where, self._fits = Whereabouts(), list[Any]()
        self._turn = threading.Lock()  # of who trains, and of who moves what was trained
        self._unwatch = watch_fit(function)

    def __getattr__(self, name: str) -> NoReturn:
        """Says what to do in place of a method or an attribute that a Keras model has.

        Raises:
            AttributeError: In any case.
        """
        way = _INSTEAD.get(name, f"ask the original for its {name}")
        raise AttributeError(f"what msplit.compile gives is a function and has no {name}: {way}", name=name, obj=self)

    def _facts(self) -> Facts:
        name = getattr(self._function, "name", None) or getattr(
            self._function, "__name__", type(self._function).__name__
        )
        return [("function", str(name)), ("sets of shapes that are ready", str(len(self.runners)))]

    @property
    def runners(self) -> tuple[Runner, ...]:
        """What runs, a runner for each set of shapes that is ready, the one that was called last at the end."""
        with self._lock:
            made = list(self._made.values())
        return tuple(one.result().runner for one in made if one.done() and one.exception() is None)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The function's result, in its structure.

        Raises:
            EngineError: The function can not run on the engine; the message names what (without a fallback).
            MsplitError: An argument is no array of numbers or strings, or a result no tensor.
        """
        tf = tensorflow()
        leaves = tf.nest.flatten((arguments, named))
        values = [_value(leaf, tf, self._request.device) for leaf in leaves]
        kinds = tuple(
            repr(leaf) if value is None else (tuple(value.shape), type_name(value))
            for leaf, value in zip(leaves, values, strict=True)
        )
        key = (repr(tf.nest.map_structure(lambda leaf: 0, (arguments, named))), kinds)
        made = self._concrete(key, (arguments, named), values)
        if self._beside is not None and (not made.done() or made.exception() is not None):
            if made.done() and made not in self._told:
                self._told.add(made)
                said = escape.line(str(made.exception()))
                warnings.warn(f"TensorFlow goes on running it: {said}", RuntimeWarning, stacklevel=2)
            return self._original(leaves, (arguments, named))
        concrete = made.result()
        feeds = {f"input_{number}": value for number, value in enumerate(values) if value is not None}
        there = [value for value in values if value is not None and not is_array(value)]
        stays = bool(there) and concrete.runner.engine == CUDA.name
        outputs = self._step(concrete, {name: feeds[name] for name in concrete.runner.inputs}, stays)
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        if stays:
            like = made_like((tensors or there)[0])
            outputs = {name: value if is_array(value) else like(value) for name, value in outputs.items()}
        if tensors:
            outputs = {name: tf.convert_to_tensor(value) for name, value in outputs.items()}
        return tf.nest.map_structure(lambda name: None if name is None else outputs[name], concrete.structure)

    def _step(self, concrete: _Concrete, feeds: Feeds, stays: bool) -> dict[str, Any]:
        if concrete.trained is None:
            return concrete.runner.step(feeds, on_device=stays)
        with self._turn:
            take(self._where, concrete.trained)
            return concrete.runner.step(feeds, on_device=stays)

    def _original(self, leaves: Sequence[Any], call: Any) -> Any:
        """What the function itself gives. TensorFlow takes no tensors of others that are on a GPU."""
        own = [
            as_array("of the call", leaf) if is_tensor(leaf) and not is_tensorflow(leaf) else leaf for leaf in leaves
        ]
        arguments, named = tensorflow().nest.pack_sequence_as(call, own)
        with self._turn:
            give_back(self._where)
        return self._function(*arguments, **named)

    def _concrete(self, key: Key, call: Any, values: Sequence[Any]) -> Future[_Concrete]:
        """What runs these shapes, or will."""
        with self._lock:
            made = self._made.pop(key, None)
            new = made is None
            if made is None:
                made = _running() if self._beside is None else self._beside.submit(self._make, call, values)
            self._made[key] = made
            old = [self._made.pop(one) for one in list(self._made)[: -self._most]]
        self._close(old)
        if new and self._beside is None:
            try:
                made.set_result(self._make(call, values))
            except BaseException as problem:
                with self._lock:
                    self._made.pop(key, None)  # a later call may try again
                made.set_exception(problem)  # for threads that wait for it
                raise
        return made

    def _make(self, call: Any, values: Sequence[Any]) -> _Concrete:
        folder = tempfile.TemporaryDirectory(prefix="msplit-function-")
        path = Path(folder.name) / "model"
        straight = choose_engine(self._request)[0] is CUDA
        request = self._request
        arrays = {f"input_{number}": value for number, value in enumerate(values) if value is not None}
        rows = None
        if request.sharing:  # whose rows GPUs share must leave open how many there are
            rows = next((int(value.shape[0]) for value in arrays.values() if len(value.shape)), None)
        exported = export(self._function, call, values, path, straight=straight, rows=rows)
        flat = load(path)
        if rows is not None:
            shapes = {one.name: tuple(arrays[one.name].shape) for one in flat.inputs if one.name in arrays}
            request = request.sized(shapes=shapes)
        if not exported.changed:
            return _Concrete(prepare_for(flat, request, improve=self._improve), exported.structure, None, folder)
        if self._improve:
            raise MsplitError(
                "improve=True is for functions that change no variables",
                fix='leave it out; with effort="fast" new shapes are ready soon',
            )
        # A step is verified on data that can be trained on, and not on labels that were made up.
        if not request.workload.inputs:
            request = request.sized(inputs=write_inputs(values, [one.name for one in flat.inputs], path.parent))
        runner = prepare_for(flat, request)
        return _Concrete(runner, exported.structure, trained_by(runner, exported, flat.model), folder)

    def sync(self) -> None:
        """Gives TensorFlow's variables the values that training made of them. From then until the next step these are what counts: the
        step takes over whatever was assigned to them, as the first one does.

        Between other steps only variables of at most `SMALL` values are looked at, such as a learning rate, and what is
        assigned to larger ones is lost, of which the next `sync` warns. To be called before weights or metrics are read or assigned.
        Nothing happens where nothing was trained since.
        """
        with self._turn:
            give_back(self._where)

    def callback(self, *, every: int | None = None) -> Any:
        """A callback for the `fit` of a Keras model whose `train_step` this is: `fit` then trains by it.

        The model has what was trained at the end of each epoch, when `fit` reads metrics and validates, and at the end. What callbacks
        assign then is taken over, and so is a learning rate at any time.

        Args:
            every: Bring variables back after so many batches, too, for callbacks that read them in between.

        Raises:
            MsplitError: This is no `train_step` of a Keras model, or of one that trains on several devices.
        """
        made = fit_callback(self._function, self, self.sync, every)
        self._fits.append(made)
        return made

    def refresh(self) -> None:
        """Takes over weights that were assigned since: what is called next is exported and prepared anew. What trains needs no more than
        `sync`, which this does, too."""
        with self._lock:
            made, self._made = list(self._made.values()), {}
        self._close(made)

    def close(self) -> None:
        """Gives streams and memory back, after a `sync`. A later call prepares anew."""
        for fit in self._fits:
            fit.let_go()
        self._fits.clear()
        self._unwatch()
        self.refresh()

    def _close(self, made: Sequence[Future[_Concrete]]) -> None:
        """Closes what is no longer wanted. What it trained goes back to TensorFlow."""
        with self._turn:
            at = self._where.at
            if at is not None and any(
                one.done() and not one.exception() and one.result().trained is at for one in made
            ):
                give_back(self._where)
        _close(made)

    def __enter__(self) -> CompiledFunction:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _running() -> Future[_Concrete]:
    """For the thread that asks to fill in. Nobody can cancel it."""
    made: Future[_Concrete] = Future()
    made.set_running_or_notify_cancel()
    return made


def _close(made: Sequence[Future[_Concrete]]) -> None:
    """Closes what is ready, and what is not yet once it is."""

    def close(one: Future[_Concrete]) -> None:
        if not one.cancelled() and one.exception() is None:
            one.result().close()

    for one in made:
        if not one.cancel():
            one.add_done_callback(close)


def _value(leaf: Any, tf: Any, device: str) -> Any:
    """An argument as an array, or as the tensor that it is where it lies on the device; None for what is part of the function."""
    if is_array(leaf):
        return np.asarray(leaf, leaf.dtype.newbyteorder("="))
    if tf.is_tensor(leaf):
        if not isinstance(leaf, tf.Tensor | tf.Variable):
            raise MsplitError(
                f"an argument is a {type(leaf).__name__}, of which there is no array",
                fix="give the tensors that it is made of, such as values and row_splits, or indices, and put it together inside",
            )
        if not hasattr(leaf, "numpy"):
            raise MsplitError(
                "a tensor has no value yet", fix="call it with values, outside of a tf.function: it is one itself"
            )
        leaf = tf.convert_to_tensor(leaf)  # a variable has a value
    if lies_on(leaf, device):
        return leaf
    if is_tensor(leaf):
        return as_array("of the call", leaf)
    if hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    return None
