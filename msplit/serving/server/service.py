"""Methods of the protocols, on messages: TensorFlow Serving's `Predict` and related ones, and the Open Inference Protocol.

Answers one request of any protocol: takes inputs by name, has a pool compute, and picks outputs.

Whoever reads requests does the pool's work itself, so that no thread has to be woken for one: over HTTP the event loop (`LoopDriver`), over
gRPC the thread that calls `take` and `Service.drive`.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter, time_ns
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from msplit._version import __version__
from msplit.engines.base import Arrays
from msplit.errors import DeviceLost
from msplit.serving.pool.pool import Pool
from msplit.serving.pool.ports import Port
from msplit.serving.server import decode, messages, tensors
from msplit.serving.server.access import Tokens
from msplit.serving.server.logs import LOG
from msplit.serving.server.metrics import Metrics
from msplit.serving.server.models import Models, Signature, Version, known_as
from msplit.serving.server.tensors import Refusal, StatusCode, invalid, is_internal, refusal

try:
    from opentelemetry import propagate, trace

    tracer = trace.get_tracer("msplit", __version__)
except ModuleNotFoundError:  # requests are not traced
    tracer = None


def size_of(outputs: Arrays) -> int:
    """Number of bytes of an answer's values; of strings, only the first `tensors.PIECE` are counted."""
    return sum([value.nbytes + tensors.text_bytes(value.reshape(-1)[: tensors.PIECE]) for value in outputs.values()])


class InferenceRequest(NamedTuple):
    """Request for outputs, of any protocol, as it was read.

    Attributes:
        said: The request as the protocol has it, without its inputs.
        version: Version of the model.
        signature: Signature whose pool computes.
        feeds: Arrays by the names of the pool's inputs.
        outputs: Names of outputs, as the client wrote them; none: all outputs.
        timeout: Seconds that it may wait to be started; None: any time.
        priority: Priority level; 0 is the most urgent.
        then: Gives the next request of several that have one answer, for the outputs of this one; None where this is the last.
    """

    said: Any
    version: Version
    signature: Signature
    feeds: Arrays
    outputs: Sequence[str] = ()
    timeout: float | None = None
    priority: int = 0
    then: Callable[[Arrays], InferenceRequest] | None = None


def keys_of(request: InferenceRequest) -> tuple[dict[str, str], int]:
    """Names of outputs as the client wrote them -> the pool's names; and the priority level that the pool has for the request.

    Raises:
        Refusal: There is no such output.
    """
    signature = request.signature
    return _keys(signature, request.outputs), min(request.priority, signature.pool.settings.priorities - 1)


async def predict(request: InferenceRequest) -> dict[str, NDArray[Any]]:
    """Answers a request on the event loop.

    Returns:
        Arrays by the names that were asked for.

    Raises:
        Refusal: The request is wrong, or could not be answered.
    """
    keys, priority = keys_of(request)
    try:
        answer = request.signature.pool.submit(request.feeds, timeout=request.timeout, priority=priority)
    except Exception as problem:
        raise refusal(problem) from problem
    waiter = request.signature.driver.ask(answer)
    try:
        outputs = await waiter
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except Exception as problem:
        raise refusal(problem, ran=True) from problem
    return {asked: outputs[key] for asked, key in keys.items()}


def _keys(signature: Signature, wanted: Sequence[str]) -> dict[str, str]:
    """Names of outputs as the client wrote them -> the pool's names."""
    outputs = signature.pool.outputs
    if not wanted:
        return {key: key for key in outputs}
    found: dict[str, str] = {}
    for name in wanted:
        key = known_as(name, outputs)
        if key is None:
            known = f"Outputs expected to be in the set {{{','.join(outputs)}}}."
            raise invalid(f"output tensor alias not found in signature: {name} {known}")
        if name in found:
            raise invalid(f"duplicate output tensor alias: {name}")
        found[name] = key
    return found


class Heads:
    """Answers that were written, apart from their values: those of one model with outputs of the same types and shapes differ in nothing
    else."""

    def __init__(self) -> None:
        self._known: dict[Any, list[bytes]] = {}

    def write(self, key: Any, outputs: Arrays, whole: Callable[[], list[list[bytes]]], *, as_content: bool) -> bytes:
        """Writes an answer.

        Args:
            key: The same for answers that differ in nothing but outputs.
            outputs: Arrays by name.
            whole: Writes it in parts: what comes before the outputs, and then each of them, its values last.
            as_content: True where values are written as the bytes of an array, whatever their type.
        """
        place = (key, as_content, *[(name, value.dtype, value.shape) for name, value in outputs.items()])
        heads = self._known.get(place)
        if heads is None:
            parts = whole()
            if outputs and all(tensors.is_plain(value, as_content=as_content) for value in outputs.values()):
                first, *others = [b"".join(part[:-1]) for part in parts[1:]]
                if len(self._known) >= _MOST_HEADS:
                    self._known.clear()
                self._known[place] = [b"".join(parts[0]) + first, *others]
            return b"".join([piece for part in parts for piece in part])
        written = list[bytes]()
        for head, value in zip(heads, outputs.values(), strict=True):
            written += (head, value.tobytes())
        return b"".join(written)

    def forget(self, version: Version) -> None:
        """Drops the answers of a version that is closed."""
        for place in [*self._known]:
            if version in (place[0], *(place[0] if isinstance(place[0], tuple) else ())):
                self._known.pop(place, None)


_MOST_HEADS = 1024
_LONGEST_PATH = 256
"""Most characters of a path in the log."""

Result = TypeVar("Result")

LARGE = 1 << 18
"""Bytes from which on a request is read, and an answer written, in a thread beside the others: to do so takes 10 ms and more."""
_SIGNATURES = "signature_def"
SERVER = {"name": "msplit", "version": __version__}
"""Fields of a ServerMetadataResponse."""


@dataclass(frozen=True)
class Service:
    """State that all protocols of a server share.

    Attributes:
        as_content: True to put values of answers into `tensor_content`.
        timeout: Seconds that a request may wait to be started, if it does not say so itself; None: any time.
        access: Share of the requests that are logged.
        tokens: Tokens of which requests need one; None: they need none.
        leaving: Set when clients are to go elsewhere: it is not ready, and goes on answering.
        stopping: Set when the server takes no more requests.
        lost: The GPU that failed, if one did: the server then stops, for only another process can go on.
        aside: Thread in which large requests are read and large answers written, one at a time.
        busy: Pools that `drive` is to work for.
        predicts: Reads PredictRequests.
        infers: Reads ModelInferRequests.
        heads: Answers that were written, apart from their values.
    """

    models: Models
    metrics: Metrics
    as_content: bool = False
    timeout: float | None = None
    access: float = 0.0
    tokens: Tokens | None = None
    leaving: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)
    lost: list[DeviceLost] = field(default_factory=list)
    aside: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="msplit-large"))
    busy: dict[Pool, None] = field(default_factory=dict)
    predicts: decode.Reader = field(default_factory=lambda: decode.Reader(decode.predict_request))
    infers: decode.Reader = field(default_factory=lambda: decode.Reader(decode.infer_request))
    heads: Heads = field(default_factory=lambda: Heads())

    def __post_init__(self) -> None:
        self.models.closing.append(self._forget)

    def _forget(self, version: Version) -> None:
        """Drops what is kept for a version that is closed."""
        self.heads.forget(version)
        self.metrics.forget(version)

    @property
    def ready(self) -> bool:
        """True while it takes requests and can answer them."""
        return self.takes and self.models.ready

    def allows(self, headers: Mapping[str, str]) -> bool:
        """True where a request may come in, given its headers."""
        return self.tokens is None or self.tokens.allow(headers.get("authorization", ""))

    @property
    def takes(self) -> bool:
        """True while clients are to send requests here, whether the models are ready or not."""
        return not (self.leaving.is_set() or self.stopping.is_set())

    @property
    def reason(self) -> str:
        """Why it is not ready."""
        if self.lost:
            return self.lost[0].what
        if not self.takes:
            return "the server is stopping"
        names = ", ".join(self.models.unready)
        if self.models.opening:
            return f"models are being opened: {names}"
        return f"the processes of a model are being started again: {names}"

    def look(self) -> None:
        """Stops the server when a GPU has failed, whether anybody was told or not."""
        for version in self.models:
            for signature in version.signatures.values():
                if (lost := signature.pool.failure) is not None and not self.lost:
                    self.lost.append(lost)
                    about = {"model": version.model, "version": version.number}
                    LOG.critical("the GPU has failed: %s", lost.what, extra=about)
                    self.stopping.set()

    def drive(self) -> bool:
        """Does the work of the pools that have requests from `take`. True while there is any."""
        for pool in [*self.busy]:
            if not pool.drive():
                del self.busy[pool]
        return bool(self.busy)

    async def apart(self, size: int, work: Callable[[], Result]) -> Result:
        """Reads a request or writes an answer of so many bytes: a large one in a thread, where one at a time is worked on, so that it holds
        up nobody and its memory is taken once."""
        if size <= LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.aside, work)

    async def answer(
        self,
        size: int,
        read: Callable[[], InferenceRequest],
        write: Callable[[InferenceRequest, Arrays], bytes],
        weight: int = 1,
    ) -> bytes:
        """Answers a request for outputs.

        Args:
            size: Bytes of the request.
            read: Reads it.
            write: Writes the answer.
            weight: Time to write values, in multiples of that in protobuf.
        """
        request = await self.apart(size, read)
        outputs = await predict(request)
        return await self.apart(weight * size_of(outputs), lambda: write(request, outputs))


@dataclass(eq=False)
class RequestContext:
    """A request while it is answered.

    Attributes:
        service: State of the server.
        timeout: Seconds that it may wait; None: any time.
        version: Version of the model that it is for, once that is known.
        headers: Headers that say which request it is; its answer has them, too.
        request_id: The client's name of it; "": it has none.
    """

    service: Service
    timeout: float | None = None
    version: Version | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    request_id: str = ""

    @property
    def about(self) -> dict[str, Any]:
        """Fields of what is logged of it."""
        found: dict[str, Any] = {}
        if self.version is not None:
            found |= {"model": self.version.model, "version": self.version.number}
        if identifier := self.headers.get("x-request-id", self.request_id):
            found["request_id"] = identifier
        return found | {name: value for name, value in self.headers.items() if name != "x-request-id"}

    def end(self, protocol: str, method: str, status: str, start: float) -> None:
        """Counts the request, which is answered, logs it if it is among those that are, and leaves its version."""
        service, seconds = self.service, perf_counter() - start
        service.metrics.count(self.version, protocol, status, seconds)
        if service.access and random.random() < service.access:
            done = {"protocol": protocol, "status": status, "seconds": round(seconds, 6)}
            LOG.info("%s", method[:_LONGEST_PATH], extra={**self.about, **done})
        if tracer is not None:
            self._trace(method[:_LONGEST_PATH], protocol, status, seconds)
        self.leave()

    def _trace(self, name: str, protocol: str, status: str, seconds: float) -> None:
        """Tells OpenTelemetry of the request as a span, whose parent is that of its ``traceparent``."""
        end, about = time_ns(), {**self.about, "protocol": protocol, "status": status}
        begin, parent = end - round(seconds * 1e9), propagate.extract(self.headers)
        span = tracer.start_span(name, parent, trace.SpanKind.SERVER, about, start_time=begin)
        if status != "OK":
            span.set_status(trace.StatusCode.ERROR, status)
        span.end(end)

    def find(self, name: str, number: int | None = None, label: str = "") -> Version:
        """Finds the version of a model; see `Models.find`.

        Raises:
            Refusal: There is no such model, or the server takes no more requests.
        """
        if self.service.stopping.is_set():
            raise Refusal(StatusCode.UNAVAILABLE, self.service.reason)
        while True:
            self.leave()
            self.version = None
            found = self.version = self.service.models.find(name, number, label)
            found.users[self] = None
            if not found.retired:  # else it was replaced meanwhile, and may be closed already
                return found

    def leave(self) -> None:
        """Says that the version is not needed any more."""
        if self.version is not None:
            self.version.users.pop(self, None)


def version_of(context: RequestContext, spec: Any) -> Version:
    """Version of a model that a ModelSpec names."""
    if not spec.name:
        raise invalid("ModelSpec has no name specified.")
    choice = spec.WhichOneof("version_choice")
    number = spec.version.value if choice == "version" else None
    return context.find(spec.name, number, spec.version_label if choice == "version_label" else "")


def read_predict(context: RequestContext, data: bytes) -> InferenceRequest:
    """Reads a PredictRequest.

    Raises:
        Refusal: It is none, or there is no such model, or the model takes no such inputs.
    """
    parts = context.service.predicts.parts(data)
    said, spec = parts.request, parts.request.model_spec
    version = version_of(context, spec)
    signature = version.signature(spec.signature_name)
    feeds = parts.feeds(signature.pool.inputs)
    return InferenceRequest(said, version, signature, feeds, said.output_filter, context.timeout)


def write_predict(service: Service, request: InferenceRequest, outputs: Arrays) -> bytes:
    """Writes a PredictResponse."""

    def whole() -> list[list[bytes]]:
        response = messages.PredictResponse()
        say_spec(response.model_spec, request.version, request.signature.name)
        parts = [[response.SerializeToString()]]
        for key, value in outputs.items():
            tensor = tensors.tensor_proto(value, as_content=service.as_content)
            parts.append(tensors.field(1, [*tensors.field(1, [key.encode()]), *tensors.field(2, tensor)]))
        return parts

    return service.heads.write((request.version, request.signature.name), outputs, whole, as_content=service.as_content)


def say_spec(spec: Any, version: Version, signature: str) -> None:
    """Fills the ModelSpec of an answer."""
    spec.name, spec.signature_name = version.model, signature
    spec.version.value = version.number


def serving_metadata(context: RequestContext, request: Any) -> Any:
    """`GetModelMetadata`."""
    if not request.metadata_field:
        raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
    for name in request.metadata_field:
        if name != _SIGNATURES:
            raise invalid(f"Metadata field {name} is not supported")
    version = version_of(context, request.model_spec)
    response = messages.GetModelMetadataResponse()
    say_spec(response.model_spec, version, "")
    response.metadata[_SIGNATURES].Pack(signature_defs(version))
    return response


def signature_defs(version: Version) -> Any:
    """The signatures of a model as a SignatureDefMap."""
    found = messages.SignatureDefMap()
    for name, signature in version.signatures.items():
        definition = found.signature_def[name]
        definition.method_name = signature.method
        _infos(definition.inputs, signature.pool.inputs, signature)
        _infos(definition.outputs, signature.pool.outputs, signature)
    return found


def _infos(infos: Any, ports: Mapping[str, Port], signature: Signature) -> None:
    for key, port in ports.items():
        info = infos[key]
        info.name = signature.tensors.get(key, key)
        info.dtype = tensors.dtype_number(port.dtype)
        for size in port.shape:
            info.tensor_shape.dim.add().size = -1 if size is None else size


# --- Open Inference Protocol


def _openversion_of(context: RequestContext, name: str, number: str) -> Version:
    if number and not (number.isascii() and number.isdigit() and len(number) < 20):
        raise invalid(f"the version of a model is a number, not {number!r}")
    return context.find(name, int(number) if number else None)


def open_model_ready(context: RequestContext, request: Any) -> Any:
    """`ModelReady`."""
    service = context.service
    if not service.takes or request.name in service.models.opening:
        return messages.ModelReadyResponse(ready=False)
    version = _openversion_of(context, request.name, request.version)
    return messages.ModelReadyResponse(ready=version.ready)


def open_model(context: RequestContext, request: Any) -> Any:
    """`ModelMetadata`."""
    version = _openversion_of(context, request.name, request.version)
    pool = version.signature("").pool
    numbers = sorted(context.service.models.versions[version.model])
    found = messages.ModelMetadataResponse(name=version.model, versions=map(str, numbers), platform="msplit")
    for listed, ports in ((found.inputs, pool.inputs), (found.outputs, pool.outputs)):
        for key, port in ports.items():
            shape = [-1 if size is None else size for size in port.shape]
            listed.add(name=key, datatype=tensors.open_name(port.dtype), shape=shape)
    return found


def read_infer(context: RequestContext, data: bytes) -> InferenceRequest:
    """Reads a ModelInferRequest.

    Raises:
        Refusal: It is none, or there is no such model, or the model takes no such inputs.
    """
    parts = context.service.infers.parts(data)
    version = _openversion_of(context, parts.request.model_name, parts.request.model_version)
    return open_request(context, version, parts.request, parts.feeds)


def write_infer(service: Service, request: InferenceRequest, outputs: Arrays) -> bytes:
    """Writes a ModelInferResponse."""
    version, identifier = request.version, request.said.id

    def whole() -> list[list[bytes]]:
        response = messages.ModelInferResponse(model_name=version.model, model_version=str(version.number))
        for key, value in outputs.items():
            datatype = tensors.open_name(tensors.name_of(value.dtype))
            response.outputs.add(name=key, datatype=datatype, shape=value.shape)
        contents = [tensors.field(6, tensors.raw_content(value)) for value in outputs.values()]
        return [[response.SerializeToString()], *contents]

    written = service.heads.write(version, outputs, whole, as_content=True)
    return written + messages.ModelInferResponse(id=identifier).SerializeToString() if identifier else written


_PARAMETERS = {"signature_name": "string_param", "priority": "int64_param", "timeout": "int64_param"}
"""Those that are looked at, and their types. Clients may send others."""


def open_request(
    context: RequestContext, version: Version, request: Any, feeds: Callable[[Mapping[str, Port]], Arrays]
) -> InferenceRequest:
    """A ModelInferRequest with its inputs. Its parameters are Triton's `priority` (1 is the most urgent) and `timeout` (µs), and
    `signature_name`, which Triton does not know.

    Raises:
        Refusal: One of them is of another type, or there is no such signature, or the model takes no such inputs.
    """
    context.request_id = request.id
    given = {name: request.parameters[name] for name in _PARAMETERS if name in request.parameters}
    for name, parameter in given.items():
        if parameter.WhichOneof("parameter_choice") != _PARAMETERS[name]:
            raise invalid(f"parameter {name} is no {'text' if name == 'signature_name' else 'whole number'}")
    values = {name: getattr(parameter, _PARAMETERS[name]) for name, parameter in given.items()}
    timeout = context.timeout
    if values.get("timeout", 0) > 0:
        limit = values["timeout"] / 1e6
        timeout = limit if timeout is None else min(limit, timeout)
    signature = version.signature(values.get("signature_name", ""))
    for tensor in request.outputs:
        for name in ("classification", "shared_memory_region"):
            if name in tensor.parameters:
                raise Refusal(StatusCode.UNIMPLEMENTED, f"output {tensor.name}: {name} is not done here")
    outputs, priority = [output.name for output in request.outputs], max(values.get("priority", 0) - 1, 0)
    return InferenceRequest(request, version, signature, feeds(signature.pool.inputs), outputs, timeout, priority)


def binary_outputs(request: Any, outputs: Arrays) -> Sequence[str]:
    """Outputs whose values a ModelInferRequest wants as bytes behind the JSON of its answer."""
    every = request.parameters["binary_data_output"].bool_param if "binary_data_output" in request.parameters else False
    wanted = {
        output.name: output.parameters["binary_data"].bool_param if "binary_data" in output.parameters else every
        for output in request.outputs
    }
    return [name for name in outputs if wanted.get(name, every)]


def told(context: RequestContext, problem: BaseException) -> Refusal:
    """Refusal to send to a client. Internal errors go to the log instead, with their causes."""
    cause = problem.__cause__ if isinstance(problem, Refusal) and problem.__cause__ is not None else problem
    context.service.look()
    found = refusal(problem)
    if is_internal(cause) or found.code is StatusCode.INTERNAL:
        LOG.error("a request failed: %s", cause, exc_info=cause, extra=context.about)
    return found
