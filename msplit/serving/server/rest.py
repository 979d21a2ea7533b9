"""HTTP: TensorFlow Serving's REST with its rows and columns, the Open Inference Protocol in JSON, and what Prometheus reads."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

from google.protobuf import json_format
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from msplit.engines.base import Arrays
from msplit.serving.server import examples, exchange, json_body, messages, service, tensors
from msplit.serving.server.logs import traced
from msplit.serving.server.models import Version
from msplit.serving.server.service import InferenceRequest, RequestContext, Service, told
from msplit.serving.server.tensors import Refusal, StatusCode, invalid

SILENCE = 15.0
"""Seconds that a connection may bring no request, or no more of one that it has begun."""
_JSON = 8
"""Time to write values in JSON, in multiples of that in protobuf: 8,000 float32 take 10 ms."""
_BINARY = "inference-header-content-length"
_DEFLATED = ("gzip", "x-gzip", "deflate")
_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))")
_LIVE = ("/v2/health/live", "/livez", "/healthz")
_READY = ("/v2/health/ready", "/readyz")
_CHALLENGES = {StatusCode.UNAUTHENTICATED: {"www-authenticate": "Bearer"}}
_UNKNOWN_CLIENT = "a bearer token is needed that the server knows"
_COMPRESSED = 1 << 15
"""Bytes from which on an answer is compressed, for clients that take gzip."""


@dataclass(frozen=True)
class HttpCall:
    """A request while it is answered.

    Attributes:
        context: State that it is answered from.
        request: As it came.
        most: Bytes of the largest body.
    """

    context: RequestContext
    request: Request
    most: int

    def number(self) -> int | None:
        """The version that the path names."""
        number = self.request.path_params.get("version")
        if number is not None and not (re.fullmatch("[0-9]{1,19}", number) and int(number) < 1 << 63):
            raise invalid(f"Failed to convert version: {number} to numeric.")
        return None if number is None else int(number)

    def version(self) -> Version:
        """The model that the path names."""
        path = self.request.path_params
        return self.context.find(path["model"], self.number(), path.get("label", ""))

    async def body(self) -> bytearray:
        """Reads the body of the request.

        Raises:
            Refusal: It is too large, compressed, or does not come.
        """
        encoding, inflate = self.request.headers.get("content-encoding", "").lower(), None
        if encoding in _DEFLATED:
            inflate = zlib.decompressobj(wbits=47)  # finds out itself which of them it is
        elif encoding not in ("", "identity"):
            said = f"content-encoding {encoding} is not taken: send the body as it is, or gzip"
            raise Refusal(StatusCode.UNIMPLEMENTED, said)
        found, loop = bytearray(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SILENCE) as limit:
                async for part in self.request.stream():
                    if inflate is not None:  # in a thread: a few bytes may become many
                        room, aside = self.most + 1 - len(found), self.context.service.aside
                        part = await loop.run_in_executor(aside, inflate.decompress, part, room)
                    found += part
                    if len(found) > self.most:
                        raise Refusal(StatusCode.RESOURCE_EXHAUSTED, f"the request has more than {self.most:,} bytes")
                    limit.reschedule(loop.time() + SILENCE)
        except TimeoutError:
            raise Refusal(StatusCode.DEADLINE_EXCEEDED, f"no more of the request came for {SILENCE:g} s") from None
        except zlib.error:
            raise invalid(f"the body is no {encoding}") from None
        if inflate is not None and (not inflate.eof or inflate.unused_data):
            raise invalid(f"the body is no whole {encoding}")
        return found


class BinaryAnswer(NamedTuple):
    """Body of an answer that is not only JSON.

    Attributes:
        data: Its bytes.
        head: Number of those that are JSON, at its begin.
    """

    data: bytes
    head: int


Handler = Callable[[HttpCall], Awaitable[Any]]


def app(service: Service, most: int) -> Starlette:
    """The application of ASGI.

    Args:
        service: State of the server.
        most: Bytes of the largest request.
    """

    def route(path: str, handler: Handler, *methods: str) -> Route:
        return Route(path, partial(_answer, service, most, handler), methods=list(methods))

    async def other(request: Request, problem: Exception) -> Response:
        del problem
        return await _answer(service, most, _unknown, request)

    one, two = "/v1/models/{model}", "/v2/models/{model}"
    v1 = [one, f"{one}/versions/{{version}}", f"{one}/labels/{{label}}"]
    v2 = [two, f"{two}/versions/{{version}}"]
    metrics = partial(_metrics, service)
    return Starlette(
        routes=[
            *(route(f"{path}:predict", _predict, "POST") for path in v1),
            *(route(f"{path}:{name}", partial(_examples, kind), "POST") for path in v1 for name, kind in _EXAMPLES),
            *(route(f"{path}/metadata", _metadata, "GET") for path in v1),
            *(route(path, _status, "GET") for path in v1),
            *(route(f"{path}/infer", _infer, "POST") for path in v2),
            *(route(f"{path}/ready", _ready, "GET") for path in v2),
            *(route(path, _open_model, "GET") for path in v2),
            route("/v2", _open_server, "GET"),
            *(route(path, _live, "GET") for path in _LIVE),
            *(route(path, _ready, "GET") for path in _READY),
            route("/v2/repository/index", _index, "POST"),
            route("/v2/repository/models/{model}/load", partial(_change, "Load"), "POST"),
            route("/v2/repository/models/{model}/unload", partial(_change, "Unload"), "POST"),
            *(Route(path, metrics, methods=["GET"]) for path in ("/metrics", "/monitoring/prometheus/metrics")),
        ],
        exception_handlers={404: other, 405: other},
    )


async def _answer(service: Service, most: int, handler: Handler, request: Request) -> Response:
    """Answers a request in JSON, errors too."""
    start = perf_counter()
    traces = headers = traced(request.headers.items())
    kind = "application/json"
    context = RequestContext(service, service.timeout, headers=traces)
    try:
        # By the path that was routed: that of `request.url` is made with the client's Host header.
        if not service.allows(request.headers) and request.scope["path"] not in (*_LIVE, *_READY):
            raise Refusal(StatusCode.UNAUTHENTICATED, _UNKNOWN_CLIENT)
        document = await handler(HttpCall(context, request, most))
        if isinstance(document, BinaryAnswer):
            content, kind = document.data, "application/octet-stream"
            headers = {**headers, _BINARY: str(document.head)}
        else:
            content = document if isinstance(document, bytes) else json.dumps(document).encode()
        if len(content) >= _COMPRESSED and _GZIP.search(request.headers.get("accept-encoding", "")):
            content = await asyncio.get_running_loop().run_in_executor(service.aside, gzip.compress, content, 1)
            headers = {**headers, "content-encoding": "gzip", "vary": "accept-encoding"}
        status, name = 200, "OK"
    except ClientDisconnect:
        content, status, name = b"", StatusCode.CANCELLED.http, StatusCode.CANCELLED.name
    except Exception as problem:  # noqa: BLE001  whatever it is, the client gets an answer
        why = told(context, problem)
        headers, kind = {**traces, **_CHALLENGES.get(why.code, {})}, "application/json"
        content, status, name = json.dumps({"error": why.said}).encode(), why.code.http, why.code.name
    finally:
        context.leave()
    context.end("http", f"{request.method} {request.url.path}", name, start)
    if not service.takes:
        headers = {**headers, "connection": "close"}  # its next request would find nobody
    return Response(content, status, headers, media_type=kind)


async def _metrics(service: Service, request: Request) -> Response:
    if not service.allows(request.headers):
        return Response(_UNKNOWN_CLIENT, 401, _CHALLENGES[StatusCode.UNAUTHENTICATED])
    data, kind = await asyncio.to_thread(service.metrics.text, request.headers.get("accept", ""))
    return Response(data, media_type=kind)


_NOT_DONE = re.compile(r"/v2/(system|cuda|tpu)sharedmemory/.*|/v2/(trace|logging|models/.*(/stats|/trace/setting))")
"""Paths of Triton's REST that are known, and not served."""


async def _unknown(call: HttpCall) -> Any:
    method, path = call.request.method, call.request.url.path
    if _NOT_DONE.fullmatch(path):
        raise Refusal(StatusCode.UNIMPLEMENTED, f"this server does not do this: {method} {path}")
    if path.startswith("/v1/"):  # so says TensorFlow Serving
        raise invalid(f"Malformed request: {method} {path}")
    raise Refusal(StatusCode.NOT_FOUND, f"there is nothing here: {method} {path}")


# --- TensorFlow Serving


async def _predict(call: HttpCall) -> Any:
    version = call.version()
    data = await call.body()

    def read() -> InferenceRequest:
        nonlocal data
        body = json_body.read(data)
        signature = version.signature(body.signature)
        feeds = json_body.feeds(body, signature.pool.inputs)
        data = bytearray()  # the step has memory of its own
        return InferenceRequest(replace(body, values=None), version, signature, feeds, timeout=call.context.timeout)

    def write(request: InferenceRequest, outputs: Arrays) -> bytes:
        return json_body.answer(outputs, rows=request.said.rows)

    return await call.context.service.answer(len(data), read, write, _JSON)


_EXAMPLES = (("classify", examples.CLASSIFY), ("regress", examples.REGRESS))
"""Methods that take `tf.Example`s, by their names in paths."""


async def _examples(method: str, call: HttpCall) -> Any:
    version = call.version()
    data = await call.body()
    size = _JSON * len(data)  # examples take as much longer to be read

    def read() -> InferenceRequest:
        nonlocal data
        name, found = examples.read_json(data)
        request = examples.request_for(call.context, version, version.signature(name), method, found)
        data = bytearray()  # the request has memory of its own
        return request

    def write(request: InferenceRequest, outputs: Arrays) -> bytes:
        return json_body.results(*examples.results_of(request, outputs))

    return await call.context.service.answer(size, read, write, _JSON)


async def _status(call: HttpCall) -> Any:
    path = call.request.path_params
    request = messages.GetModelStatusRequest()
    request.model_spec.name = path["model"]
    if "version" in path:
        request.model_spec.version.value = call.number()
    elif "label" in path:
        request.model_spec.version_label = path["label"]
    return _document(exchange.serving_status(call.context, request))


async def _metadata(call: HttpCall) -> Any:
    version = call.version()
    spec = {"name": version.model, "signature_name": "", "version": str(version.number)}
    return {"model_spec": spec, "metadata": {"signature_def": _document(service.signature_defs(version))}}


def _document(message: Any) -> Any:
    return json_format.MessageToDict(
        message,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        descriptor_pool=messages.pool(),
    )


# --- Open Inference Protocol


async def _live(call: HttpCall) -> Any:
    del call
    return {"live": True}


async def _ready(call: HttpCall) -> Any:
    state = call.context.service
    if not ((call.version().ready and state.takes) if "model" in call.request.path_params else state.ready):
        raise Refusal(StatusCode.UNAVAILABLE, state.reason)
    return {"ready": True}


async def _open_server(call: HttpCall) -> Any:
    del call
    return _document(messages.ServerMetadataResponse(**service.SERVER))


async def _open_model(call: HttpCall) -> Any:
    path = call.request.path_params
    request = messages.ModelMetadataRequest(name=path["model"], version=path.get("version", ""))
    found = _document(service.open_model(call.context, request))
    for tensor in (*found["inputs"], *found["outputs"]):
        tensor["shape"] = [int(size) for size in tensor["shape"]]  # JSON of protobuf has them as strings
    return found


async def _repository(call: HttpCall, method: str, **named: str) -> Any:
    """A request of the model repository, whose body may be left out."""
    request = getattr(messages, f"Repository{method}Request")(**named)
    try:
        pool = messages.pool()
        return json_format.Parse(bytes(await call.body()) or b"{}", request, descriptor_pool=pool)
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as problem:
        raise invalid(f"Malformed request: {problem}") from None


async def _index(call: HttpCall) -> Any:
    found = exchange.open_index(call.context, await _repository(call, "Index"))
    return [_document(model) for model in found.models]


async def _change(method: str, call: HttpCall) -> Any:
    request = await _repository(call, f"Model{method}", model_name=call.request.path_params["model"])
    change = exchange.open_load if method == "Load" else exchange.open_unload
    await asyncio.wrap_future(change(call.context, request))
    return b""


async def _infer(call: HttpCall) -> Any:
    version, size = call.version(), call.request.headers.get(_BINARY)
    data = await call.body()
    if size is not None and not (size.isascii() and size.isdigit() and int(size[:20]) <= len(data)):
        raise invalid(f"{_BINARY} is {size[:20]!r}, of a body of {len(data):,} bytes")
    head = 0

    def read() -> InferenceRequest:
        nonlocal data
        request, feeds = json_body.read_open(data, None if size is None else int(size))
        data = bytearray()
        return service.open_request(call.context, version, request, feeds)

    def write(request: InferenceRequest, outputs: Arrays) -> bytes:
        nonlocal head
        said = {"model_name": version.model, "model_version": str(version.number)}
        if request.said.id:
            said["id"] = request.said.id
        raw = {name: tensors.raw_content(outputs[name]) for name in service.binary_outputs(request.said, outputs)}
        begin = json.dumps(said).encode()[:-1] + b', "outputs": '
        text = b"".join([begin, *json_body.open_outputs(outputs, raw), b"}"])
        head = len(text) if raw else 0
        return b"".join([text, *chain.from_iterable(raw.values())])

    answer = await call.context.service.answer(len(data), read, write, _JSON)
    return BinaryAnswer(answer, head) if head else answer
