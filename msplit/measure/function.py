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
from numpy.typing import NDArray

from msplit import escape
from msplit.decide.model import load
from msplit.decide.shown import Facts, Shown
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.errors import MsplitError
from msplit.measure.execution import Runner, prepare
from msplit.measure.request import BenchRequest

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
) -> CompiledFunction:
    """A model or function that gives what the original gives, by `prepare`.

    Example::

        fast = msplit.compile(model, streams=8)
        scores = fast({"user": users, "item": items})       # arrays in, the same structure back

    The first call with arrays of new shapes or types exports the function for them and prepares it, which takes seconds; later ones run
    at once. Results are NumPy arrays, or tensors of TensorFlow where one of the arguments is. Arguments that are no arrays (flags, None,
    strings) are part of the function, as they are for `tf.function`.

    Args:
        function: A Keras model, a `tf.function`, a concrete function, a plain function of tensors, or what `tf.saved_model.load` gives, of
            which it takes ``serving_default`` where it can not be called itself.
        request: As for `prepare`. Batch and shapes are those of the arguments.
        streams: The largest number of streams. ``auto``: that of the request, or eight without one; the simulator takes fewer where more
            gain nothing.
        fallback: ``tensorflow``: the original function answers while another shape is being prepared, in a thread of its own, and for good
            where it can not be, of which a warning is given. None: a call waits, and raises what is in the way.
        most: Sets of shapes to keep ready, each with weights and memory of its own.

    Raises:
        MsplitError: It is nothing that can be called.
    """
    found = _callable(function)
    if most < 1:
        raise MsplitError("at least one set of shapes must be kept", fix="give most=1 or more")
    if streams != "auto":
        request = replace(request or BenchRequest(), streams=(streams,))
    request = request or BenchRequest(streams=(STREAMS,))
    return CompiledFunction(found, replace(request, batch=None, shapes={}), fallback, most)


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
class _Ready:
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
        self, function: Callable[..., Any], request: BenchRequest, fallback: str | None, most: int = MOST
    ) -> None:
        self._function, self._request, self._most = function, request, most
        self._beside = None if fallback is None else ThreadPoolExecutor(1, "msplit-function")
        self._made: dict[Key, Future[_Ready]] = {}  # what was called last is at the end
        self._told: WeakSet[Future[_Ready]] = WeakSet()  # of which a warning was given
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
        arrays = [_array(leaf, tf) for leaf in leaves]
        kinds = tuple(
            repr(leaf) if array is None else (array.shape, array.dtype.str)
            for leaf, array in zip(leaves, arrays, strict=True)
        )
        key = (repr(tf.nest.map_structure(lambda leaf: 0, (arguments, named))), kinds)
        made = self._rung(key, (arguments, named), arrays)
        if self._beside is not None and (not made.done() or made.exception() is not None):
            if made.done() and made not in self._told:
                self._told.add(made)
                said = escape.line(str(made.exception()))
                warnings.warn(f"TensorFlow goes on running it: {said}", RuntimeWarning, stacklevel=2)
            return self._function(*arguments, **named)
        ready = made.result()
        feeds = {f"input_{number}": array for number, array in enumerate(arrays) if array is not None}
        outputs = ready.runner.step({name: feeds[name] for name in ready.runner.inputs})
        if any(tf.is_tensor(leaf) for leaf in leaves):
            outputs = {name: tf.convert_to_tensor(value) for name, value in outputs.items()}
        return tf.nest.map_structure(lambda name: None if name is None else outputs[name], ready.structure)

    def _rung(self, key: Key, call: Any, arrays: Sequence[NDArray[Any] | None]) -> Future[_Ready]:
        """What runs these shapes, or will."""
        with self._lock:
            made = self._made.pop(key, None)
            new = made is None
            if made is None:
                made = _running() if self._beside is None else self._beside.submit(self._make, call, arrays)
            self._made[key] = made
            old = [self._made.pop(one) for one in list(self._made)[: -self._most]]
        _close(old)
        if new and self._beside is None:
            try:
                made.set_result(self._make(call, arrays))
            except BaseException as problem:
                with self._lock:
                    self._made.pop(key, None)  # a later call may try again
                made.set_exception(problem)  # for threads that wait for it
                raise
        return made

    def _make(self, call: Any, arrays: Sequence[NDArray[Any] | None]) -> _Ready:
        folder = tempfile.TemporaryDirectory(prefix="msplit-function-")
        structure = _export(self._function, call, arrays, Path(folder.name) / "model")
        return _Ready(prepare(load(Path(folder.name) / "model"), self._request), structure, folder)

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


def _running() -> Future[_Ready]:
    """For the thread that asks to fill in. Nobody can cancel it."""
    made: Future[_Ready] = Future()
    made.set_running_or_notify_cancel()
    return made


def _close(made: Sequence[Future[_Ready]]) -> None:
    """Closes what is ready, and what is not yet once it is."""

    def close(one: Future[_Ready]) -> None:
        if not one.cancelled() and one.exception() is None:
            one.result().close()

    for one in made:
        if not one.cancel():
            one.add_done_callback(close)


def _array(leaf: Any, tf: Any) -> NDArray[Any] | None:
    """An argument as an array; None for what is part of the function."""
    if isinstance(leaf, np.ndarray | np.generic):
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
        return np.asarray(leaf.numpy())
    if hasattr(leaf, "cpu"):  # PyTorch's, on a GPU perhaps
        leaf = leaf.detach().cpu()
    if hasattr(leaf, "__dlpack__"):
        return np.from_dlpack(leaf)
    if hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    return None


def _export(function: Callable[..., Any], call: Any, arrays: Sequence[NDArray[Any] | None], folder: Path) -> Any:
    """Writes the function for arguments of these shapes as a SavedModel; the structure of its result, as `_Ready` has it.

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
        f"input_{number}": tf.TensorSpec(array.shape, tf.as_dtype(array.dtype), name=f"input_{number}")
        for number, array in enumerate(arrays)
        if array is not None
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
