"""Requests over gRPC, from their bytes to their answers: by the pool's callbacks, without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from msplit.engines.base import Arrays
from msplit.serving.server import decode, examples, messages, tensors
from msplit.serving.server import service as methods
from msplit.serving.server.models import VersionState
from msplit.serving.server.rpc import PATHS, SERVICES
from msplit.serving.server.service import (
    LARGE,
    SERVER,
    InferenceRequest,
    RequestContext,
    Service,
    keys_of,
    size_of,
    told,
    version_of,
)
from msplit.serving.server.tensors import Refusal, StatusCode, invalid, refusal

# What a server has, and changes of it: TensorFlow Serving's `ModelService`, and the repository of KServe's protocol.

_FAILED = 9
"""FAILED_PRECONDITION among TensorFlow's codes of errors."""


def serving_status(context: RequestContext, request: Any) -> Any:
    """`GetModelStatus`."""
    spec, choice = request.model_spec, request.model_spec.WhichOneof("version_choice")
    states = context.service.models.states(spec.name)
    if not states:
        raise Refusal(StatusCode.NOT_FOUND, f"Could not find any versions of model {spec.name}")
    if choice is not None:
        asked = spec.version.value if choice == "version" else version_of(context, spec).number
        if asked not in states:
            raise Refusal(StatusCode.NOT_FOUND, f"Could not find version {asked} of model {spec.name}")
        states = {asked: states[asked]}
    response = messages.GetModelStatusResponse()
    for number, found in states.items():
        status = response.model_version_status.add()
        status.version, status.state = number, found.state
        status.status.error_code = _FAILED if found.why else 0
        status.status.error_message = found.why
    return response


def _change(context: RequestContext, kind: str, what: Any, response: Any) -> Future[Any]:
    """Changes what is served. The future gives the response.

    Raises:
        Refusal: Nothing can be changed.
    """
    control = context.service.models.control
    if control is None:
        raise Refusal(StatusCode.UNIMPLEMENTED, "the models of this server stay as they are")
    return control(kind, what, response)


def serving_reload(context: RequestContext, request: Any) -> Future[Any]:
    """`HandleReloadConfigRequest`: answered when the models are ready."""
    return _change(context, "reload", request.config, messages.ReloadConfigResponse())


_INDEXED = {VersionState.AVAILABLE: "READY", VersionState.LOADING: "LOADING", VersionState.UNLOADING: "UNLOADING"}
"""Triton's names of states. All others are UNAVAILABLE."""


def open_index(context: RequestContext, request: Any) -> Any:
    """`RepositoryIndex`: the versions of all models."""
    models = context.service.models
    response = messages.RepositoryIndexResponse()
    for name in sorted({*models.versions, *models.statuses}):
        for number, found in models.states(name).items():
            if found.state is VersionState.AVAILABLE or not request.ready:
                state = _INDEXED.get(found.state, "UNAVAILABLE")
                reason = found.why or ("unloaded" if found.state is VersionState.END else "")
                response.models.add(name=name, version=str(number), state=state, reason=reason)
    return response


def open_load(context: RequestContext, request: Any) -> Future[Any]:
    """`RepositoryModelLoad`: answered when its versions are ready."""
    if request.parameters:
        raise invalid(f"parameter {next(iter(request.parameters))} is not taken: models are loaded as they are")
    return _change(context, "load", request.model_name, messages.RepositoryModelLoadResponse())


def open_unload(context: RequestContext, request: Any) -> Future[Any]:
    """`RepositoryModelUnload`: answered when no more requests are taken for it; those in flight are answered."""
    return _change(context, "unload", request.model_name, messages.RepositoryModelUnloadResponse())


# Requests.


def health(context: RequestContext, request: Any) -> Any:
    """`Check`."""
    status = _health(context.service, request.service)
    if status == _UNKNOWN:
        raise Refusal(StatusCode.NOT_FOUND, f"unknown service {request.service}")
    return messages.HealthCheckResponse(status=status)


def health_of(service: Service, data: bytes) -> bytes:
    """The health that a HealthCheckRequest asks for, for `Watch`.

    Raises:
        Refusal: It is none.
    """
    request = tensors.parsed(messages.HealthCheckRequest, data)
    found: bytes = messages.HealthCheckResponse(status=_health(service, request.service)).SerializeToString()
    return found


_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3


def _health(service: Service, name: str) -> int:
    """Health of the server, where one of its services is named, or of a model."""
    if name in SERVICES:
        return _SERVING if service.ready else _NOT_SERVING
    if name not in service.models.versions and name not in service.models.opening:
        return _UNKNOWN
    return _SERVING if service.takes and service.models.can_answer(name) else _NOT_SERVING


class _Tensors(NamedTuple):
    """Method whose requests and answers have tensors.

    Attributes:
        read: Reads a request, without protobuf.
        write: Writes an answer.
        weight: Time to write values, in multiples of that of arrays.
    """

    read: Callable[[RequestContext, bytes], InferenceRequest]
    write: Callable[[Service, InferenceRequest, Arrays], bytes]
    weight: int = 1


_MESSAGES = 8
"""Weight of answers with a message for each value: 8,000 of them take 6 ms."""


_METHODS: dict[str, _Tensors | Callable[[RequestContext, Any], Any]] = {
    "Predict": _Tensors(methods.read_predict, methods.write_predict),
    "Classify": _Tensors(examples.read_classify, examples.write, _MESSAGES),
    "Regress": _Tensors(examples.read_regress, examples.write, _MESSAGES),
    "MultiInference": _Tensors(examples.read_multi_inference, examples.write_multi_inference, _MESSAGES),
    "GetModelMetadata": methods.serving_metadata,
    "GetModelStatus": serving_status,
    "HandleReloadConfigRequest": serving_reload,
    "ServerLive": lambda context, request: messages.ServerLiveResponse(live=True),
    "ServerReady": lambda context, request: messages.ServerReadyResponse(ready=context.service.ready),
    "ModelReady": methods.open_model_ready,
    "ServerMetadata": lambda context, request: messages.ServerMetadataResponse(**SERVER),
    "ModelMetadata": methods.open_model,
    "ModelInfer": _Tensors(methods.read_infer, methods.write_infer),
    "RepositoryIndex": open_index,
    "RepositoryModelLoad": open_load,
    "RepositoryModelUnload": open_unload,
    "Check": health,
}


_KINDS = {"Check": "HealthCheckRequest", "HandleReloadConfigRequest": "ReloadConfigRequest"}
"""Requests that are not called after their methods."""

_BY_PATH = {path: (path.split("/")[1], (name := path.split("/")[2]), _METHODS[name]) for path in PATHS}
"""Path of a method -> its protocol, its name, and what answers it."""


class Reply(Protocol):
    """Call of gRPC that is to be answered once; see `rpc.GrpcCall`."""

    path: str
    headers: Mapping[str, str]
    cancel: Callable[[], object] | None

    def answer(self, data: bytes) -> None:
        """Sends the answer."""

    def fail(self, status: int, message: str) -> None:
        """Sends a status of gRPC other than 0, and what it is about."""


class _Exchange:
    """Request over gRPC, from its bytes to its answer."""

    __slots__ = ("_aside", "_context", "_keys", "_method", "_protocol", "_reply", "_request", "_start")

    def __init__(self, service: Service, reply: Reply, left: float | None) -> None:
        self._start, self._reply = perf_counter(), reply
        self._context = RequestContext(service, service.timeout if left is None else left, headers=reply.headers)

    def begin(self, data: bytes) -> None:
        """Answers the request, or hands it to its pool."""
        service = self._context.service
        try:
            self._protocol, name, method = _BY_PATH[self._reply.path]
            if isinstance(method, _Tensors):
                self._method = method
                if len(data) > LARGE:
                    service.aside.submit(self._trying, self._submit, data, aside=True)
                else:
                    self._submit(data)
            else:
                kind = _KINDS.get(name, f"{name}Request")
                request = tensors.parsed(getattr(messages, kind), decode.apart(data, None, (), kind)[0])
                found = method(self._context, request)
                if isinstance(found, Future):
                    found.add_done_callback(lambda done: self._trying(self._answer, done))
                else:
                    self._end(found.SerializeToString())
        except Exception as problem:  # noqa: BLE001  whatever it is, the client gets an answer
            self._fail(problem)

    def _answer(self, done: Future[Any]) -> None:
        """Answers with a message that has come."""
        self._end(done.result().SerializeToString())

    def _trying(self, work: Callable[..., None], *values: Any, **named: Any) -> None:
        try:
            work(*values, **named)
        except Exception as problem:  # noqa: BLE001  whatever it is, the client gets an answer
            self._fail(problem)

    def _submit(self, data: bytes, *, aside: bool = False) -> None:
        """Reads the request and has its pool compute. Where the pool's steps are over when somebody polls, whoever has called `take` does;
        of a large request, and where the pool has threads that run steps, these threads do."""
        self._aside = aside
        self._ask(self._method.read(self._context, data))

    def _ask(self, request: InferenceRequest) -> None:
        """Has the pool of a request compute."""
        self._request = request
        self._keys, priority = keys_of(request)
        pool, left = request.signature.pool, request.timeout
        driven = pool.polls and not self._aside
        if driven:
            self._context.service.busy[pool] = None
        try:
            if driven:
                future = pool.submit_driven(request.feeds, self._arrive, priority=priority, timeout=left)
            else:
                future = pool.submit(request.feeds, priority=priority, timeout=left)
        except Exception as problem:
            raise refusal(problem) from problem
        self._reply.cancel = future.cancel
        if not driven:
            future.add_done_callback(self._arrive)

    def _arrive(self, future: Future[Any]) -> None:
        """Takes the pool's answer, in the thread that delivers it."""
        self._reply.cancel = None  # its cycle would keep all arrays of the request until somebody collects garbage
        self._trying(self._take_outputs, future)

    def _take_outputs(self, future: Future[Any]) -> None:
        if future.cancelled():
            raise refusal(asyncio.CancelledError())
        try:
            found = future.result()
        except Exception as problem:
            raise refusal(problem, ran=True) from problem
        outputs = {asked: found[key] for asked, key in self._keys.items()}
        if self._request.then is not None:
            self._ask(self._request.then(outputs))
        elif self._method.weight * size_of(outputs) > LARGE:
            self._context.service.aside.submit(self._trying, self._write, outputs)
        else:
            self._write(outputs)

    def _write(self, outputs: Arrays) -> None:
        self._end(self._method.write(self._context.service, self._request, outputs))

    def _end(self, data: bytes) -> None:
        self._reply.answer(data)
        self._context.end(self._protocol, self._reply.path, "OK", self._start)

    def _fail(self, problem: Exception) -> None:
        why = told(self._context, problem)
        self._reply.fail(why.code.grpc, why.said)
        self._context.end(self._protocol, self._reply.path, why.code.name, self._start)


def take(service: Service, reply: Reply, data: bytes, left: float | None) -> None:
    """Answers what came over gRPC, now or later, in this thread or another.

    Args:
        service: State of the server.
        reply: Call that gets the answer.
        data: Bytes of the request.
        left: Seconds that its client waits; None: as long as it takes.
    """
    _Exchange(service, reply, left).begin(data)
