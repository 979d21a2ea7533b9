"""`Classify`, `Regress` and `MultiInference` of TensorFlow Serving: requests of `tf.Example`s, for signatures whose one input takes them.

As its server does unless it is told to, signatures are judged by their inputs and outputs, not by the name of a method in the model: what
TensorFlow 2 exports has always that of `Predict`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays
from msplit.formats import wire
from msplit.inputs import files
from msplit.inputs.files import EXAMPLES
from msplit.serving.server import decode, json_body, messages, tensors
from msplit.serving.server.models import Signature, Version, known_as
from msplit.serving.server.service import InferenceRequest, RequestContext, Service, say_spec, version_of
from msplit.serving.server.tensors import Refusal, StatusCode, invalid

CLASSIFY, REGRESS = "tensorflow/serving/classify", "tensorflow/serving/regress"
"""TensorFlow's names of the methods."""
_INPUT, _CLASSES, _SCORES, _OUTPUT = "inputs", "classes", "scores", "outputs"
"""Keys that signatures of these methods have."""
_KINDS = {CLASSIFY: ("classification", (_CLASSES, _SCORES)), REGRESS: ("regression", (_OUTPUT,))}

_LISTED, _WITH_CONTEXT = 1, 2
"""Fields of an Input: examples, and examples with features that all of them have."""
_EXAMPLE, _CONTEXT = 1, 2
"""Fields of either."""
_MOST_REPEATED = 1 << 26
"""Bytes that a context may take, which is repeated for each example."""

_LONGEST_FEATURE = 1 << 23
"""Bytes of the text of a feature: its values become Python's, all at once."""

Examples = Callable[[int], tuple[bytes, Sequence[bytes]]]
"""Reads the examples of a request, which are refused if they are more than so many: what stands before each of them, and they."""


def request_for(
    context: RequestContext, version: Version, signature: Signature, method: str, read: Examples
) -> InferenceRequest:
    """Request for the outputs of a method, in which examples are fed.

    Raises:
        Refusal: The signature is none of the method's, or the model takes no such examples.
    """
    (kind, keys), pool = _KINDS[method], signature.pool
    name = known_as(_INPUT, pool.inputs)
    found = tuple(key for key in keys if known_as(key, pool.outputs) is not None)
    if name is None or len(pool.inputs) != 1 or not found or len(pool.outputs) > len(keys):
        ends = f"{', '.join(pool.inputs)} -> {', '.join(pool.outputs)}"
        wanted = f"Expected one input Tensor {_INPUT!r}, and no outputs but {' and '.join(map(repr, keys))}"
        raise invalid(f"{wanted}: signature {signature.name} is none for {kind}; it has {ends}")
    port = pool.inputs[name]
    if port.dtype != "object" or len(port.shape) != 1:
        raise invalid(f"input {name} of signature {signature.name} takes {port.said}, not serialized examples")
    head, rows = read(port.most)
    if not rows or len(rows) > port.most:
        raise invalid(f"more than {port.most:,} examples came, the most that are taken" if rows else "Input is empty.")
    if len(head) * len(rows) > _MOST_REPEATED:
        said = f"the context takes {len(head):,} bytes for each of {len(rows):,} examples, more than {_MOST_REPEATED:,}"
        raise Refusal(StatusCode.RESOURCE_EXHAUSTED, said)
    # A message behind another one is both of them, merged: features of an example go before those of the context.
    values = np.fromiter((head + row for row in rows), object, len(rows))
    return InferenceRequest(None, version, signature, {name: values}, found, context.timeout)


# --- gRPC


def _examples(data: bytes, inputs: Sequence[decode.Span], most: int) -> tuple[bytes, Sequence[bytes]]:
    """Reads the examples of an Input, which stay as they came."""
    kind, heads, found, most = 0, list[bytes](), list[bytes](), max(most, decode.MOST_FIELDS)
    for one in inputs:
        for span in decode.apart(data, one, (_LISTED, _WITH_CONTEXT), "Input")[1]:
            if span[0] != kind:  # of a choice, protobuf takes the last one
                kind, heads, found = span[0], [], []
            values = (_EXAMPLE,) if kind == _LISTED else (_EXAMPLE, _CONTEXT)
            for number, kept_as, start, end in decode.apart(data, span, values, "list of examples", most)[1]:
                if kept_as != wire.LENGTH:
                    raise invalid("what came is no list of examples")
                (found if number == _EXAMPLE else heads).append(data[start:end])
    return b"".join(heads), found


def read_json(data: bytes | bytearray) -> tuple[str, Callable[[int], tuple[bytes, list[bytes]]]]:
    """A request for classes or regressions.

    Returns:
        Name of the signature, "" for the default; and what reads its `tf.Example`s, not many more than so many: serialized, the features
        that all of them have, and those of each.

    Raises:
        Refusal: It is none.
    """
    signature, found = json_body.signed(data)
    examples = found.get(EXAMPLES)
    if not (isinstance(examples, json_body.Long) or (isinstance(examples, list) and examples)):
        raise invalid(f"{EXAMPLES!r} must be a list of at least one")

    def made(most: int) -> tuple[bytes, list[bytes]]:
        read = list[bytes]()
        for piece in examples.pieces() if isinstance(examples, json_body.Long) else [examples]:
            read += [_example(features, f"example {number}") for number, features in enumerate(piece, len(read))]
            if len(read) > most:  # which is refused
                break
        return _example(found["context"], "context") if "context" in found else b"", read

    return signature, made


def _example(features: Any, name: str) -> bytes:
    if not isinstance(features, dict):
        raise invalid(f"{name} must be an object of features")
    long = {key: one for key, one in features.items() if isinstance(one, json_body.Long)}
    if any(one.end - one.start > _LONGEST_FEATURE for one in long.values()):
        raise Refusal(StatusCode.RESOURCE_EXHAUSTED, f"{name} has a feature of more than {_LONGEST_FEATURE:,} bytes")
    try:  # one behind the other, Examples are merged
        found = [files.json_example({key: one for key, one in features.items() if key not in long})]
        return b"".join(
            found + [files.json_example({key: [*chain.from_iterable(one.pieces())]}) for key, one in long.items()]
        )
    except (OverflowError, TypeError, ValueError) as problem:
        raise invalid(f"{name}: {problem}") from None


def read(method: str, kind: str, context: RequestContext, data: bytes) -> InferenceRequest:
    """Reads a request of one method.

    Raises:
        Refusal: It is none, or there is no such model, or the model takes no such examples.
    """
    rest, inputs = decode.apart(data, None, (2,), kind)
    spec = tensors.parsed(getattr(messages, kind), rest).model_spec
    version = version_of(context, spec)
    examples = partial(_examples, data, inputs)
    return request_for(context, version, version.signature(spec.signature_name), method, examples)


read_classify = partial(read, CLASSIFY, "ClassificationRequest")
read_regress = partial(read, REGRESS, "RegressionRequest")


def read_multi_inference(context: RequestContext, data: bytes) -> InferenceRequest:
    """Reads a MultiInferenceRequest: the request for its first task, which leads to that for the next one.

    Raises:
        Refusal: It is none, or there is no such model, or the model takes no such examples.
    """
    rest, inputs = decode.apart(data, None, (2,), "MultiInferenceRequest")
    tasks = tensors.parsed(messages.MultiInferenceRequest, rest).tasks
    if not tasks or not all(task.model_spec.name for task in tasks):
        raise invalid("Found ModelSpec with an empty model name." if tasks else "there are no tasks")
    if len({task.model_spec.name for task in tasks}) > 1:
        raise invalid("ModelSpecs in a MultiInferenceRequest must access the same model name.")
    version = version_of(context, tasks[0].model_spec)
    requests: dict[str, InferenceRequest] = {}
    for task in tasks:
        signature = version.signature(task.model_spec.signature_name)
        if signature.name in requests:
            raise invalid(f"Duplicate evaluation of signature: {signature.name}")
        if task.method_name not in _KINDS:
            raise Refusal(StatusCode.UNIMPLEMENTED, f"Unsupported signature method_name: {task.method_name}")
        examples = partial(_examples, data, inputs)
        requests[signature.name] = request_for(context, version, signature, task.method_name, examples)
    return _in_turn([*requests.values()], ())


Answered = tuple[InferenceRequest, Arrays]


def _in_turn(requests: Sequence[InferenceRequest], done: tuple[Answered, ...]) -> InferenceRequest:
    """The first of several requests, each of which leads to the next one; `said` is what was answered before."""
    first, *others = requests
    then = (lambda outputs: _in_turn(others, (*done, (first, outputs)))) if others else None
    return first._replace(said=done, then=then)


def write(service: Service, request: InferenceRequest, outputs: Arrays) -> bytes:
    """Writes a ClassificationResponse or a RegressionResponse."""
    response = messages.RegressionResponse() if _OUTPUT in outputs else messages.ClassificationResponse()
    _fill(response.model_spec, response.result, request, outputs)
    return bytes(response.SerializeToString())


def write_multi_inference(service: Service, request: InferenceRequest, outputs: Arrays) -> bytes:
    """Writes a MultiInferenceResponse."""
    response = messages.MultiInferenceResponse()
    for one, found in (*request.said, (request, outputs)):
        result = response.results.add()
        filled = result.regression_result if _OUTPUT in found else result.classification_result
        _fill(result.model_spec, filled, one, found)
    return bytes(response.SerializeToString())


def _fill(spec: Any, result: Any, request: InferenceRequest, outputs: Arrays) -> None:
    """Fills a ModelSpec, and a RegressionResult or a ClassificationResult."""
    say_spec(spec, request.version, request.signature.name)
    first, *scores = results_of(request, outputs)
    if not scores:
        for value in first.tolist():
            result.regressions.add(value=value)
        return
    try:
        for names, numbers in zip(first.tolist(), scores[0].tolist(), strict=True):
            classes = result.classifications.add().classes
            for label, score in zip(names, numbers, strict=True):
                classes.add(label=label, score=score)
    except UnicodeDecodeError:
        raise invalid("output classes has a label that is no UTF-8, as protobuf's strings are") from None


def results_of(request: InferenceRequest, outputs: Arrays) -> tuple[NDArray[Any], ...]:
    """Values of a regression, or labels and scores of the classes of each example: empty labels or zeros where the model gives none.

    Raises:
        Refusal: Values are not float32 [examples] or [examples, 1], or the others not strings or float32 [examples, classes].
    """
    rows, shape = len(next(iter(request.feeds.values()))), next(iter(outputs.values())).shape
    if _OUTPUT in outputs:
        value = outputs[_OUTPUT]
        if shape not in ((rows,), (rows, 1)) or value.dtype != np.float32:
            raise _unfit(_OUTPUT, value, f"float32 [{rows}] or [{rows}, 1]")
        return (value.reshape(-1),)
    for name, value in outputs.items():
        kind = "object" if name == _CLASSES else "float32"
        if tensors.name_of(value.dtype) != kind or value.ndim != 2 or len(value) != rows or value.shape != shape:
            beside = f", as {_CLASSES} {[*shape]}" if value.shape != shape else ""
            raise _unfit(name, value, f"{kind} [{rows}, classes]{beside}")
    return outputs.get(_CLASSES, np.full(shape, b"", object)), outputs.get(_SCORES, np.zeros(shape, np.float32))


def _unfit(name: str, value: NDArray[Any], wanted: str) -> Refusal:
    return invalid(f"Expected output {name} to be {wanted}, but got {tensors.name_of(value.dtype)} {[*value.shape]}")
