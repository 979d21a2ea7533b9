"""Puts stream ids on nodes while TensorFlow builds a graph.

    with msplit.stream(1):
        y = tf.matmul(x, w)         # _stream_id = 1, and so have the ops of its gradient

The attribute is the one of DeepRec and of NVIDIA's Multi-Stream TensorFlow, and so are the rules: the innermost scope wins; an op
that is colocated with another one (`tf.compat.v1.colocate_with`) takes the stream of that one if it has one, and where there are
several the outermost decides; gradients follow the ops of a scope unless it says `include_grad=False`. Stock TensorFlow ignores
the attribute.

TensorFlow offers no hook for "an op was made" or "this is the gradient of that op". The first scope therefore wraps seven
of its functions, for the rest of the process. The wrappers do nothing for ops that no scope is about.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cache, wraps
from types import TracebackType
from typing import Any, SupportsIndex

from msplit.errors import EngineError, MsplitError

STREAM_ATTR = "_stream_id"
INCLUDE_GRAD_ATTR = "_stream_assign_include_grad"


@dataclass(frozen=True)
class _Wish:
    """The stream that new ops of a graph go to.

    Attributes:
        stream: Its id.
        include_grad: Whether gradients of these ops follow them.
        graph: The graph; functions that are traced meanwhile are graphs of their own.
    """

    stream: int
    include_grad: bool
    graph: Any


_wishes: ContextVar[tuple[_Wish, ...]] = ContextVar("msplit_streams", default=())
_gradient_of: ContextVar[Any] = ContextVar("msplit_gradient_of", default=None)
"""The op that new ops are colocated with only because they are its gradient."""


# A class and not a generator: AutoGraph rewrites the functions that a traced function calls, but leaves constructors alone.
class stream:
    """Scope whose new ops go to a stream.

    Works in TensorFlow 1 graphs and inside `tf.function`. Scopes may be nested; the innermost one wins. What functions called inside
    the scope do is not part of it: their call is.

    Args:
        stream_id: The stream, 0 or more. 0 is the default stream, and written as well.
        include_grad: Whether gradients of the scope's ops, made by `tf.gradients` or `tf.GradientTape`, go to the same stream.

    Raises:
        MsplitError: The id is no integer or negative.
        EngineError: Entered in eager code, where there is no graph to annotate.
    """

    def __init__(self, stream_id: SupportsIndex, include_grad: bool = True) -> None:
        if isinstance(stream_id, bool) or not hasattr(stream_id, "__index__"):
            raise MsplitError(
                f"a stream id is an integer, not {stream_id!r}", where="msplit.stream", fix="pass 0, 1, 2, …"
            )
        self.stream_id = operator.index(stream_id)
        if self.stream_id < 0:
            raise MsplitError(
                f"a stream id is 0 or more, not {self.stream_id}", where="msplit.stream", fix="pass 0, 1, 2, …"
            )
        self.include_grad = include_grad
        self._tokens: list[Token[tuple[_Wish, ...]]] = []

    def __enter__(self) -> stream:
        import tensorflow as tf

        if tf.executing_eagerly():
            raise EngineError(
                "there is no graph to annotate: this code runs eagerly",
                where="msplit.stream",
                fix="use it inside a tf.function, or inside a tf.Graph().as_default()",
            )
        _wrap_tensorflow()
        wish = _Wish(self.stream_id, self.include_grad, tf.compat.v1.get_default_graph())
        self._tokens.append(_wishes.set((*_wishes.get(), wish)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _wishes.reset(self._tokens.pop())


def _attr(op: Any, name: str) -> Any:
    """An attribute of an op; None where it has none or is no op of a graph."""
    try:
        return op.get_attr(name)
    except (ValueError, AttributeError):
        return None


def _wish_of(op: Any) -> tuple[int, bool] | None:
    """Stream of an op and whether its gradient follows it."""
    stream_id = _attr(op, STREAM_ATTR)
    return None if stream_id is None else (int(stream_id), bool(_attr(op, INCLUDE_GRAD_ATTR)))


def _annotate(graph: Any, op: Any) -> None:
    """Gives a new op its stream: that of what it is colocated with, else of the innermost scope of its graph."""
    from tensorflow.core.framework import attr_value_pb2

    wanted = next(((wish.stream, wish.include_grad) for wish in reversed(_wishes.get()) if wish.graph is graph), None)
    if wanted is None and graph._default_original_op is not None:
        # What joins and orders the gradients of an op is made outside of its gradient function.
        original = _wish_of(graph._default_original_op)
        wanted = original if original is not None and original[1] else None
    # The newest colocation comes first, so that the outermost one is what stays.
    for colocated in graph._colocation_stack.peek_objs() if graph._colocation_stack else ():
        other = _wish_of(colocated)
        if other is not None and (other[1] or colocated is not _gradient_of.get()):
            wanted = other
    if wanted is None:
        return
    stream_id, include_grad = wanted
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
    token = _wishes.set((*_wishes.get(), _Wish(*wanted, ops.get_default_graph())))
    try:
        yield
    finally:
        _wishes.reset(token)


def _wish_of_tensors(tensors: Any) -> tuple[int, bool] | None:
    """The wish of the op that made some tensors."""
    for tensor in tensors if isinstance(tensors, Sequence) else (tensors,):
        try:
            return _wish_of(tensor.op)
        except AttributeError:  # an eager tensor, or none
            continue
    return None


@cache
def _wrap_tensorflow() -> None:
    """Wraps what makes ops and what makes gradients. Once per process."""
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import backprop, execute, record
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import gradients_util

    try:
        create = ops.Graph._create_op_helper
        compile_gradient = gradients_util._MaybeCompile
        aggregate = gradients_util._AggregatedGrads
        colocate = ops.Graph._colocate_with_for_gradient
        record_gradient = execute.record_gradient
        record_operation = record.record_operation
        gradient = backprop._gradient_function
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
        token = _gradient_of.set(op)
        try:
            with colocate(graph, op, *args, **kwargs):
                yield
        finally:
            _gradient_of.reset(token)

    # tf.gradients, and the gradients of tf.functions: both know the op.
    def of_op(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(first: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            with _following(_wish_of(op)):
                return function(first, op, *args, **kwargs)

        return wrapped

    # tf.GradientTape: what it records of an op is its attributes, so the wish travels among these.
    @wraps(record_gradient)
    def record_with_wish(name: str, inputs: Any, attrs: Any, results: Any, *args: Any) -> Any:
        wanted = _wish_of_tensors(results)
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
        wanted = _wish_of_tensors(outputs)

        def backward(*args: Any, **kwargs: Any) -> Any:
            with _following(wanted):
                return backward_function(*args, **kwargs)

        follow = backward if wanted is not None and wanted[1] else backward_function
        return record_operation(op_type, outputs, inputs, follow, forward_function)

    ops.Graph._create_op_helper = create_and_annotate
    ops.Graph._colocate_with_for_gradient = colocate_gradient
    gradients_util._MaybeCompile = of_op(compile_gradient)
    gradients_util._AggregatedGrads = of_op(aggregate)
    execute.record_gradient = record_with_wish
    record.record_operation = record_on_stream
    pywrap_tfe.TFE_Py_RegisterGradientFunction(gradient_on_stream)
