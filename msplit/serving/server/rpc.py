"""gRPC: the methods of the protocols on one port, on an event loop. Requests and answers are bytes here, so that what is no message is told
in our words."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from msplit.serving.server import messages, service
from msplit.serving.server.refusal import Code, Refusal, invalid, is_internal, refusal
from msplit.serving.server.service import Asked, Service

Method = Callable[[Service, Any, Asked], Awaitable[Any]]

_SERVING = "/tensorflow.serving."
_OPEN = "/inference.GRPCInferenceService/"
METHODS: dict[str, tuple[str, str, Method]] = {
    f"{_SERVING}PredictionService/Predict": ("PredictRequest", "tensorflow", service.serving_predict),
    f"{_SERVING}PredictionService/GetModelMetadata": (
        "GetModelMetadataRequest",
        "tensorflow",
        service.serving_metadata,
    ),
    f"{_SERVING}ModelService/GetModelStatus": ("GetModelStatusRequest", "tensorflow", service.serving_status),
    f"{_OPEN}ServerLive": ("ServerLiveRequest", "inference", service.open_live),
    f"{_OPEN}ServerReady": ("ServerReadyRequest", "inference", service.open_ready),
    f"{_OPEN}ModelReady": ("ModelReadyRequest", "inference", service.open_model_ready),
    f"{_OPEN}ServerMetadata": ("ServerMetadataRequest", "inference", service.open_server),
    f"{_OPEN}ModelMetadata": ("ModelMetadataRequest", "inference", service.open_model),
    f"{_OPEN}ModelInfer": ("ModelInferRequest", "inference", service.open_infer),
}
"""Path of a method -> its request, its protocol, and what it does."""

_HEALTH = "/grpc.health.v1.Health/"
_SERVICES = {"", *(path.split("/")[1] for path in METHODS)}
_SERVING_NOW, _NOT_SERVING, _UNKNOWN = 1, 2, 3
_STATUS = {status.value[0]: status for status in grpc.StatusCode}


def server(service: Service, most: int) -> grpc.aio.Server:
    """A server that listens nowhere yet.

    Args:
        service: What it offers.
        most: Bytes of the largest request.
    """
    options = [
        ("grpc.max_receive_message_length", most),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a second server on the same port would take a part of the first one's requests
    ]
    made = grpc.aio.server(options=options)
    made.add_generic_rpc_handlers((_Handlers(service),))
    return made


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All methods, by path."""

    def __init__(self, service: Service) -> None:
        unary = grpc.unary_unary_rpc_method_handler
        self._by_path = {path: unary(_answering(service, *said)) for path, said in METHODS.items()}
        self._by_path[f"{_HEALTH}Check"] = unary(_answering(service, "HealthCheckRequest", "health", _check))
        self._by_path[f"{_HEALTH}Watch"] = grpc.unary_stream_rpc_method_handler(_watching(service))

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a method, None where there is none."""
        return self._by_path.get(handler_call_details.method)


def _answering(service: Service, kind: str, protocol: str, method: Method) -> Callable[[bytes, Any], Awaitable[bytes]]:
    """A method on bytes, which answers or aborts."""
    parse = getattr(messages, kind).FromString

    async def handle(data: bytes, context: Any) -> bytes:
        start = perf_counter()
        left = context.time_remaining()
        asked = Asked(service.timeout if left is None else left)
        try:
            try:
                request = parse(data)
            except (DecodeError, RecursionError, UnicodeDecodeError):
                raise invalid(f"what came is no {kind}") from None
            response = await method(service, request, asked)
            answer: bytes = response.SerializeToString()
        except Exception as problem:  # noqa: BLE001  whatever it is, the client gets an answer
            why = told(service, problem)
            service.metrics.count(asked.version, protocol, why.code.name, perf_counter() - start)
            await context.abort(_STATUS[why.code.grpc], why.said)
        service.metrics.count(asked.version, protocol, "OK", perf_counter() - start)
        return answer

    return handle


def told(service: Service, problem: BaseException) -> Refusal:
    """What to say to a client; the log gets what is no business of its."""
    cause = problem.__cause__ if isinstance(problem, Refusal) and problem.__cause__ is not None else problem
    if is_internal(cause):
        service.log("".join(traceback.format_exception(cause)))
    return refusal(problem)


async def _check(service: Service, request: Any, asked: Asked) -> Any:
    del asked
    if request.service not in _SERVICES:
        raise Refusal(Code.NOT_FOUND, f"unknown service {request.service}")
    return messages.HealthCheckResponse(status=_NOT_SERVING if service.stopping.is_set() else _SERVING_NOW)


def _watching(service: Service) -> Callable[[bytes, Any], AsyncIterator[bytes]]:
    async def watch(data: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            name = messages.HealthCheckRequest.FromString(data).service
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "what came is no HealthCheckRequest")
        say = messages.HealthCheckResponse
        if name not in _SERVICES:
            yield say(status=_UNKNOWN).SerializeToString()
        elif not service.stopping.is_set():
            yield say(status=_SERVING_NOW).SerializeToString()
        await service.stopping.wait()
        if name in _SERVICES:
            yield say(status=_NOT_SERVING).SerializeToString()

    return watch
