"""Puts stream ids on nodes while TensorFlow builds a graph.

    with msplit.stream(1):
        y = tf.matmul(x, w)         # _stream_id = 1, and so have the ops of its gradient

The attribute is the one of DeepRec and of NVIDIA's Multi-Stream TensorFlow, and so are the rules: the innermost scope wins; an op
that is colocated with another one (`tf.compat.v1.colocate_with`) takes the stream of that one if it has one, and where there are
several the outermost decides; gradients follow the ops of a scope unless it says `include_grad=False`. Stock TensorFlow ignores
the attribute.

    @msplit.stream(1)            # what a function makes
    def tower(x): ...

    z = msplit.stream(2)(tf.matmul)(x, v)      # one call

    with msplit.stream_group(2, size=3):       # streams 6, 7 and 8: a layer has a group, its ops have streams of it
        with msplit.stream(1):                 # stream 7
            ...

A variable is put where it is used: the handle of one that is made outside of the graph, as Keras layers do, takes the stream of the
scope in which it was read last when the model is exported.

TensorFlow offers no hook for "an op was made" or "this is the gradient of that op". The first scope therefore wraps eight
of its functions, for the rest of the process. The wrappers do nothing for ops that no scope is about.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import WRAPPER_UPDATES, cache, wraps
from typing import Any, Self, SupportsIndex, TypeVar

from msplit.core.arguments import whole
from msplit.errors import EngineError, MsplitError
from msplit.progress import during

STREAM_ATTR = "_stream_id"
Call = TypeVar("Call", bound=Callable[..., Any])
INCLUDE_GRAD_ATTR = "_stream_assign_include_grad"


@dataclass(frozen=True)
class _Annotation:
    """The stream that new ops of a graph go to.

    Attributes:
        include_grad: Whether gradients of these ops follow them.
        graph: The graph; functions that are traced meanwhile are graphs of their own.
        scope: What made it, None for a gradient.
        size: Streams of the group that begins with `stream`; None where it is no group.
    """

    stream: int
    include_grad: bool
    graph: Any
    scope: Any = None
    size: int | None = None


_annotations: ContextVar[tuple[_Annotation, ...]] = ContextVar("msplit_streams", default=())
_gradient_of: ContextVar[Any] = ContextVar("msplit_gradient_of", default=None)
"""The op that new ops are colocated with only because they are its gradient."""


# Classes and not generators: AutoGraph rewrites the functions that a traced function calls, but leaves constructors alone.
class _Scope:
    """A scope that places new ops, used by `with`, as a decorator, or by a call: the base of streams and of groups of streams."""

    include_grad: bool

    def _place(self, graph: Any) -> tuple[int, int | None]:
        """Stream of the ops of a graph, and how many streams follow it in a group."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        import tensorflow as tf

        if tf.executing_eagerly():
            raise EngineError(
                "there is no graph to annotate: this code runs eagerly",
                where=f"msplit.{type(self).__name__}",
                fix="use it inside a tf.function, or inside a tf.Graph().as_default()",
            )
        _wrap_tensorflow()
        graph = tf.compat.v1.get_default_graph()
        stream_id, size = self._place(graph)
        _annotations.set((*_annotations.get(), _Annotation(stream_id, self.include_grad, graph, self, size)))
        return self

    def __exit__(self, *_: object) -> None:
        annotations = _annotations.get()
        last = max(place for place, one in enumerate(annotations) if one.scope is self)
        _annotations.set(annotations[:last] + annotations[last + 1 :])

    def __call__(self, function: Call) -> Call:
        """The function with this scope around each of its calls.

        Args:
            function: A function, a method, a layer, or anything else that is called.

        Raises:
            MsplitError: It can not be called, is a class, or what a call of it does is not over when it returns: a generator or a
                coroutine.
        """
        if isinstance(function, staticmethod | classmethod):
            return type(function)(self(function.__func__))
        what = _refused(function)
        if what:
            raise MsplitError(
                f"{what} can not be put on a stream as a whole",
                where=f"msplit.{type(self).__name__}",
                fix="write `with` around the part of it that makes ops, or decorate a function that is called",
            )
        taken = WRAPPER_UPDATES if inspect.isroutine(function) else ()

        @wraps(function, updated=taken)
        def on_stream(*args: Any, **kwargs: Any) -> Any:
            with copy(self):  # its own for each call, so that threads do not share one
                return function(*args, **kwargs)

        return on_stream  # type: ignore[return-value]


class stream(_Scope):
    """Scope whose new ops go to a stream. Also a decorator: ``@msplit.stream(1)``, ``msplit.stream(1)(tf.matmul)(a, b)``.

    Works in TensorFlow 1 graphs and inside `tf.function`. Scopes may be nested; the innermost one wins. What functions called inside
    the scope do is not part of it: their call is. In a `stream_group` the id counts from the group's first stream.

    Args:
        stream_id: The stream, 0 or more. 0 is the default stream, and written as well.
        include_grad: Whether gradients of the scope's ops, made by `tf.gradients` or `tf.GradientTape`, go to the same stream.

    Raises:
        MsplitError: The id is no integer or negative; on entry, it is not in the group around it.
        EngineError: Entered in eager code, where there is no graph to annotate.
    """

    def __init__(self, stream_id: SupportsIndex, include_grad: bool = True) -> None:
        self.stream_id = whole("a stream id", stream_id, 0)
        self.include_grad = include_grad

    def _place(self, graph: Any) -> tuple[int, int | None]:
        group = next((one for one in reversed(_annotations.get()) if one.graph is graph and one.size is not None), None)
        if group is None or group.size is None:
            return self.stream_id, None
        if self.stream_id >= group.size:
            raise MsplitError(
                f"stream {self.stream_id} is not in a group of {group.size} streams",
                where="msplit.stream",
                fix=f"use 0 to {group.size - 1} there, or a larger group: msplit.stream_group(…, size={self.stream_id + 1})",
            )
        return group.stream + self.stream_id, None


class stream_group(_Scope):
    """Scope with streams of its own: inside, ``stream(i)`` is stream ``group * size + i``.

    So code that is written for streams 0, 1, … can stand in several places, such as a layer in each tower: layers take groups, their
    ops take streams of their group. Ops in no `stream` inside go to the group's first one. Of nested groups the innermost counts.

    Args:
        group: Number of the group, 0 or more.
        size: Streams of every group, 1 or more.
        include_grad: Whether gradients of ops in no `stream` inside follow them.

    Raises:
        MsplitError: A number is no integer or too small.
        EngineError: Entered in eager code, where there is no graph to annotate.
    """

    def __init__(self, group: SupportsIndex, *, size: SupportsIndex, include_grad: bool = True) -> None:
        self.group = whole("the number of a group of streams", group, 0)
        self.size = whole("the size of a group of streams", size, 1)
        self.include_grad = include_grad

    def _place(self, graph: Any) -> tuple[int, int | None]:
        return self.group * self.size, self.size


def _refused(function: Any) -> str:
    """Name for a message of something that can not be wrapped: not callable, a class, a generator or a coroutine; "" if it can be."""
    if not callable(function):
        return f"{function!r}"
    if inspect.isclass(function):
        return f"the class {function.__name__}"
    plain = inspect.unwrap(function)
    for one in (plain, type(plain).__call__):
        if inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            return "a generator"
        if inspect.iscoroutinefunction(one):
            return "a coroutine"
    return ""


def _attr(op: Any, name: str) -> Any:
    """An attribute of an op; None where it has none or is no op of a graph."""
    try:
        return op.get_attr(name)
    except (ValueError, AttributeError):
        return None


def _annotation_of(op: Any) -> tuple[int, bool] | None:
    """Stream of an op and whether its gradient follows it."""
    stream_id = _attr(op, STREAM_ATTR)
    return None if stream_id is None else (int(stream_id), bool(_attr(op, INCLUDE_GRAD_ATTR)))


def _annotate(graph: Any, op: Any) -> None:
    """Gives a new op its stream: that of what it is colocated with, else of the innermost scope of its graph."""
    wanted = next(((one.stream, one.include_grad) for one in reversed(_annotations.get()) if one.graph is graph), None)
    if wanted is None and graph._default_original_op is not None:
        # What joins and orders the gradients of an op is made outside of its gradient function.
        original = _annotation_of(graph._default_original_op)
        wanted = original if original is not None and original[1] else None
    # The newest colocation comes first, so that the outermost one is what stays.
    for colocated in graph._colocation_stack.peek_objs() if graph._colocation_stack else ():
        other = _annotation_of(colocated)
        if other is not None and (other[1] or colocated is not _gradient_of.get()):
            wanted = other
    if wanted is None:
        return
    stream_id, include_grad = wanted
    for tensor in op.inputs:
        if tensor.dtype == "resource":
            _place_variable(graph, tensor, stream_id)
    _set(op, stream_id, include_grad)


_STREAM_OF_HANDLE = "_msplit_stream"
"""On the handle of a variable that was made outside of graphs: the stream that it was used on last."""


def _place_variable(graph: Any, handle: Any, stream_id: int) -> None:
    """Remembers where a variable is used. One that was made in the graph, outside of all scopes, goes there at once."""
    while hasattr(handle, "op"):
        if handle.op.type == "VarHandleOp":
            if _attr(handle.op, STREAM_ATTR) is None:
                _set(handle.op, stream_id, include_grad=False)
            return
        outside = next((outer for outer, inner in getattr(handle.graph, "captures", ()) if inner is handle), None)
        if outside is None:
            return
        handle = outside
    setattr(handle, _STREAM_OF_HANDLE, stream_id)


def _set(op: Any, stream_id: int, include_grad: bool) -> None:
    from tensorflow.core.framework import attr_value_pb2

    op._set_attr(STREAM_ATTR, attr_value_pb2.AttrValue(i=stream_id))
    if include_grad:
        op._set_attr(INCLUDE_GRAD_ATTR, attr_value_pb2.AttrValue(b=True))


@contextmanager
def _following(wanted: tuple[int, bool] | None) -> Iterator[None]:
    """Sends new ops of the current graph to the stream of the op whose gradient they are, if they are to follow it."""
    from tensorflow.python.framework import ops

    if wanted is None or not wanted[1]:
        yield
        return
    with during(_annotations, (*_annotations.get(), _Annotation(*wanted, ops.get_default_graph()))):
        yield


def _annotation_of_tensors(tensors: Any) -> tuple[int, bool] | None:
    """The annotation of the op that made some tensors."""
    for tensor in tensors if isinstance(tensors, Sequence) else (tensors,):
        try:
            return _annotation_of(tensor.op)
        except AttributeError:  # an eager tensor, or none
            continue
    return None


@cache
def _wrap_tensorflow() -> None:
    """Wraps what makes ops and what makes gradients. Once per process."""
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import backprop, execute, record
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import gradients_util, resource_variable_ops

    try:
        create = ops.Graph._create_op_helper
        compile_gradient = gradients_util._MaybeCompile
        aggregate = gradients_util._AggregatedGrads
        colocate = ops.Graph._colocate_with_for_gradient
        record_gradient = execute.record_gradient
        record_operation = record.record_operation
        gradient = backprop._gradient_function
        copy_variable = resource_variable_ops.copy_to_graph_uninitialized
    except AttributeError as error:
        import tensorflow as tf

        raise EngineError(
            f"msplit.stream does not know how TensorFlow {tf.__version__} makes graphs ({error})",
            fix="use rules on the exported graph instead, or another version of TensorFlow",
        ) from error

    @wraps(create)
    def create_and_annotate(graph: Any, op: Any, compute_device: bool = True) -> None:
        create(graph, op, compute_device=compute_device)
        # Nodes of an imported graph come without devices, and keep the ids that they have.
        if compute_device:
            _annotate(graph, op)

    @contextmanager
    def colocate_gradient(graph: Any, op: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with during(_gradient_of, op), colocate(graph, op, *args, **kwargs):
            yield

    # tf.gradients, and the gradients of tf.functions: both know the op.
    def of_op(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(first: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            with _following(_annotation_of(op)):
                return function(first, op, *args, **kwargs)

        return wrapped

    # tf.GradientTape: what it records of an op is its attributes, so the annotation travels among these.
    @wraps(record_gradient)
    def record_annotated(name: str, inputs: Any, attrs: Any, results: Any, *args: Any) -> Any:
        wanted = _annotation_of_tensors(results)
        if wanted is not None and wanted[1]:
            attrs = (*(attrs or ()), STREAM_ATTR, wanted[0])
        return record_gradient(name, inputs, attrs, results, *args)

    @wraps(gradient)
    def gradient_on_stream(name: str, attrs: Any, *args: Any) -> Any:
        wanted = None
        if attrs and len(attrs) > 1 and attrs[-2] == STREAM_ATTR:
            wanted = attrs[-1], True
            attrs = attrs[:-2]
        with _following(wanted):
            return gradient(name, attrs, *args)

    # tf.custom_gradient and calls of functions: what is recorded is the function that makes the gradient.
    @wraps(record_operation)
    def record_on_stream(
        op_type: str, outputs: Any, inputs: Any, backward_function: Any, forward_function: Any = None
    ) -> Any:
        wanted = _annotation_of_tensors(outputs)

        def backward(*args: Any, **kwargs: Any) -> Any:
            with _following(wanted):
                return backward_function(*args, **kwargs)

        follow = backward if wanted is not None and wanted[1] else backward_function
        return record_operation(op_type, outputs, inputs, follow, forward_function)

    # Export: variables are made anew in the graph that is written.
    @wraps(copy_variable)
    def copy_on_stream(variable: Any) -> Any:
        stream_id = getattr(variable.handle, _STREAM_OF_HANDLE, None)
        with _following(None if stream_id is None else (stream_id, True)):
            return copy_variable(variable)

    ops.Graph._create_op_helper = create_and_annotate
    resource_variable_ops.copy_to_graph_uninitialized = copy_on_stream
    ops.Graph._colocate_with_for_gradient = colocate_gradient
    gradients_util._MaybeCompile = of_op(compile_gradient)
    gradients_util._AggregatedGrads = of_op(aggregate)
    execute.record_gradient = record_annotated
    record.record_operation = record_on_stream
    pywrap_tfe.TFE_Py_RegisterGradientFunction(gradient_on_stream)
