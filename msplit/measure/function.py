"""A function of TensorFlow's that runs on streams: what it is called with goes through `prepare`, once for each set of shapes."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from weakref import WeakSet

import numpy as np

from msplit import escape
from msplit.decide.model import load
from msplit.decide.shown import Facts, Shown
from msplit.engines.base import is_array, is_tensor, type_name
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.errors import MsplitError
from msplit.measure.execution import prepare
from msplit.measure.request import BenchRequest
from msplit.measure.runner import Runner
from msplit.measure.tensors import as_array, is_tensorflow, lies_on, made_like

STREAMS = 8
"""The largest number where nobody says one."""

MOST = 8
"""Sets of shapes that are kept ready. The one that was not called for longest goes first."""

Key = tuple[Any, ...]


def compile(
    function: Callable[..., Any],
    request: BenchRequest | None = None,
    *,
    streams: int | Literal["auto"] = "auto",
    fallback: Literal["tensorflow"] | None = None,
    most: int = MOST,
    improve: bool = False,
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
        request: As for `prepare`. Batch and shapes are those of the arguments.
        streams: The largest number of streams. ``auto``: that of the request, or eight without one; the simulator takes fewer where more
            gain nothing.
        fallback: ``tensorflow``: the original function answers while another shape is being prepared, in a thread of its own, and for good
            where it can not be, of which a warning is given. None: a call waits, and raises what is in the way.
        most: Sets of shapes to keep ready, each with weights and memory of its own.
        improve: As for `prepare`: shapes that are new are ready soon, and what was prepared in full takes over later.

    Raises:
        MsplitError: It is nothing that can be called.
    """
    found = _callable(function)
    if most < 1:
        raise MsplitError("at least one set of shapes must be kept", fix="give most=1 or more")
    if streams != "auto":
        request = replace(request or BenchRequest(), streams=(streams,))
    request = request or BenchRequest(streams=(STREAMS,))
    return CompiledFunction(found, replace(request, batch=None, shapes={}), fallback, most, improve=improve)


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
class _Rung:
    """The function for one set of shapes.

    Attributes:
        structure: The result's, with the names of its outputs, and None where it has None.
        folder: What the host part runs.
    """

    runner: Runner
    structure: Any
    folder: tempfile.TemporaryDirectory[str]

    def close(self) -> None:
        self.runner.close()
        self.folder.cleanup()


class CompiledFunction(Shown):
    """What `compile` gives. Threads may call it. Closing it, or leaving its ``with`` block, gives streams and memory back."""

    def __init__(
        self,
        function: Callable[..., Any],
        request: BenchRequest,
        fallback: str | None,
        most: int = MOST,
        *,
        improve: bool = False,
    ) -> None:
        self._function, self._request, self._most, self._improve = function, request, most, improve
        self._beside = None if fallback is None else ThreadPoolExecutor(1, "msplit-function")
        self._made: dict[Key, Future[_Rung]] = {}  # what was called last is at the end
        self._told: WeakSet[Future[_Rung]] = WeakSet()  # of which a warning was given
        self._lock = threading.Lock()

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
        made = self._rung(key, (arguments, named), values)
        if self._beside is not None and (not made.done() or made.exception() is not None):
            if made.done() and made not in self._told:
                self._told.add(made)
                said = escape.line(str(made.exception()))
                warnings.warn(f"TensorFlow goes on running it: {said}", RuntimeWarning, stacklevel=2)
            return self._original(leaves, (arguments, named))
        rung = made.result()
        feeds = {f"input_{number}": value for number, value in enumerate(values) if value is not None}
        there = [value for value in values if value is not None and not is_array(value)]
        stays = bool(there) and rung.runner.engine == CUDA.name
        outputs = rung.runner.step({name: feeds[name] for name in rung.runner.inputs}, on_device=stays)
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        if stays:
            like = made_like((tensors or there)[0])
            outputs = {name: value if is_array(value) else like(value) for name, value in outputs.items()}
        if tensors:
            outputs = {name: tf.convert_to_tensor(value) for name, value in outputs.items()}
        return tf.nest.map_structure(lambda name: None if name is None else outputs[name], rung.structure)

    def _original(self, leaves: Sequence[Any], call: Any) -> Any:
        """What the function itself gives. TensorFlow takes no tensors of others that are on a GPU."""
        own = [
            as_array("of the call", leaf) if is_tensor(leaf) and not is_tensorflow(leaf) else leaf for leaf in leaves
        ]
        arguments, named = tensorflow().nest.pack_sequence_as(call, own)
        return self._function(*arguments, **named)

    def _rung(self, key: Key, call: Any, values: Sequence[Any]) -> Future[_Rung]:
        """What runs these shapes, or will."""
        with self._lock:
            made = self._made.pop(key, None)
            new = made is None
            if made is None:
                made = _running() if self._beside is None else self._beside.submit(self._make, call, values)
            self._made[key] = made
            old = [self._made.pop(one) for one in list(self._made)[: -self._most]]
        _close(old)
        if new and self._beside is None:
            try:
                made.set_result(self._make(call, values))
            except BaseException as problem:
                with self._lock:
                    self._made.pop(key, None)  # a later call may try again
                made.set_exception(problem)  # for threads that wait for it
                raise
        return made

    def _make(self, call: Any, values: Sequence[Any]) -> _Rung:
        folder = tempfile.TemporaryDirectory(prefix="msplit-function-")
        path = Path(folder.name) / "model"
        structure = _export(self._function, call, values, path)
        return _Rung(prepare(load(path), self._request, improve=self._improve), structure, folder)

    def refresh(self) -> None:
        """Takes over weights that were assigned since: what is called next is exported and prepared anew."""
        with self._lock:
            made, self._made = list(self._made.values()), {}
        _close(made)

    def close(self) -> None:
        """Gives streams and memory back. A later call prepares anew."""
        self.refresh()

    def __enter__(self) -> CompiledFunction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _running() -> Future[_Rung]:
    """For the thread that asks to fill in. Nobody can cancel it."""
    made: Future[_Rung] = Future()
    made.set_running_or_notify_cancel()
    return made


def _close(made: Sequence[Future[_Rung]]) -> None:
    """Closes what is ready, and what is not yet once it is."""

    def close(one: Future[_Rung]) -> None:
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


def _export(function: Callable[..., Any], call: Any, values: Sequence[Any], folder: Path) -> Any:
    """Writes the function for arguments of these shapes as a SavedModel; the structure of its result, as `_Rung` has it.

    Inputs are called ``input_N`` by their place among all leaves of the arguments, outputs ``output_N``.
    """
    tf = tensorflow()
    leaves = tf.nest.flatten(call)
    structure: list[Any] = []
    others: list[str] = []

    def by_name(**tensors: Any) -> dict[str, Any]:
        given = [tensors.get(f"input_{number}", leaf) for number, leaf in enumerate(leaves)]
        arguments, named = tf.nest.pack_sequence_as(call, given)
        result = function(*arguments, **named)
        found = {f"output_{number}": one for number, one in enumerate(tf.nest.flatten(result))}
        names = [None if one is None else name for name, one in found.items()]
        structure[:] = [tf.nest.pack_sequence_as(result, names)]
        others[:] = [type(one).__name__ for one in found.values() if not isinstance(one, tf.Tensor | None)]
        return {name: tf.identity(one) for name, one in found.items() if isinstance(one, tf.Tensor)}

    specs = {
        name: tf.TensorSpec(value.shape, tf.as_dtype(value.dtype if is_array(value) else type_name(value)), name=name)
        for name, value in ((f"input_{number}", value) for number, value in enumerate(values))
        if value is not None
    }
    traced = tf.function(by_name).get_concrete_function(**specs)
    if others:
        raise MsplitError(
            f"the function gives a {others[0]}, which is no tensor of numbers or words",
            fix="let it give tensors, or lists, tuples and dicts of them: of a ragged one its values and row_splits",
        )
    holder = tf.Module()
    holder.owned = [function] if isinstance(function, tf.Module) or hasattr(function, "_trackable_children") else []
    holder.weights = list(traced.variables)
    tf.saved_model.save(holder, str(folder), signatures=traced)
    return structure[0]
