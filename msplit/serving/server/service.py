"""Methods of the protocols, on messages: TensorFlow Serving's `Predict` and related ones, and the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any, TypeVar

from msplit._version import __version__
from msplit.errors import DeviceLost, MsplitError
from msplit.serving.pool.ports import Port
from msplit.serving.server import decode, messages, tensors
from msplit.serving.server.metrics import Metrics
from msplit.serving.server.models import PREDICT, Models, Signature, Version
from msplit.serving.server.predict import Arrays, predict, size_of
from msplit.serving.server.refusal import Code, Refusal, invalid, is_internal, refusal
from msplit.serving.server.rpc import PATHS, SERVICES

Result = TypeVar("Result")

LARGE = 1 << 18
"""Bytes from which on a request is read, and an answer written, beside the event loop: to do so takes 10 ms and more."""
_AVAILABLE = 30
_SIGNATURES = "signature_def"


@dataclass(frozen=True)
class Service:
    """State that all protocols of a server share.

    Attributes:
        as_content: True to put values of answers into `tensor_content`.
        timeout: Seconds that a request may wait to be started, if it does not say so itself; None: any time.
        log: Called with each internal error.
        stopping: Set when the server takes no more requests.
        lost: The GPU that failed, if one did: the server then stops, for only another process can go on.
    """

    models: Models
    metrics: Metrics
    as_content: bool = False
    timeout: float | None = None
    log: Callable[[str], None] = lambda text: None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    lost: list[DeviceLost] = field(default_factory=list)
    _aside: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="msplit-large"))

    def look(self) -> None:
        """Stops the server when a GPU has failed, whether anybody was told or not."""
        for version in self.models:
            for signature in version.signatures.values():
                if (lost := signature.pool.failure) is not None and not self.lost:
                    self.lost.append(lost)
                    self.stopping.set()

    async def apart(self, size: int, work: Callable[[], Result]) -> Result:
        """Reads a request or writes an answer of so many bytes: a large one in a thread, where one at a time is worked on, so that it holds
        up nobody and its memory is taken once."""
        if size <= LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._aside, work)

    def find(self, name: str, number: int | None = None, label: str = "") -> Version:
        """Finds the version of a model; see `Models.find`.

        Raises:
            Refusal: There is no such model, or the server takes no more requests.
        """
        if self.stopping.is_set():
            raise Refusal(Code.UNAVAILABLE, "the server is stopping")
        return self.models.find(name, number, label)


@dataclass
class Asked:
    """A request while it is answered.

    Attributes:
        timeout: Seconds that it may wait; None: any time.
        version: Of the model that it is for, once that is known.
    """

    timeout: float | None = None
    version: Version | None = None


def _version(service: Service, spec: Any, asked: Asked) -> Version:
    """Version of a model that a ModelSpec names."""
    choice = spec.WhichOneof("version_choice")
    number = spec.version.value if choice == "version" else None
    asked.version = service.find(spec.name, number, spec.version_label if choice == "version_label" else "")
    return asked.version


async def serving_predict(service: Service, data: bytes, asked: Asked) -> Any:
    """`Predict`."""

    def read() -> tuple[Any, Version, Signature, Arrays]:
        parts = decode.predict_request(data)
        spec = parts.request.model_spec
        version = _version(service, spec, asked)
        signature = version.signature(spec.signature_name)
        return parts.request, version, signature, parts.feeds(signature.pool.inputs)

    request, version, signature, feeds = await service.apart(len(data), read)
    outputs = await predict(signature, feeds, request.output_filter, timeout=asked.timeout)

    def written() -> bytes:
        response = messages.PredictResponse()
        _say_spec(response.model_spec, version, signature.name)
        parts = [response.SerializeToString()]
        for key, value in outputs.items():
            tensor = tensors.tensor_proto(value, as_content=service.as_content)
            parts += tensors.field(1, [*tensors.field(1, [key.encode()]), *tensors.field(2, tensor)])
        return b"".join(parts)

    return await service.apart(size_of(outputs), written)


def _say_spec(spec: Any, version: Version, signature: str) -> None:
    spec.name, spec.signature_name = version.model, signature
    spec.version.value = version.number


async def serving_metadata(service: Service, request: Any, asked: Asked) -> Any:
    """`GetModelMetadata`."""
    if not request.metadata_field:
        raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
    for name in request.metadata_field:
        if name != _SIGNATURES:
            raise invalid(f"Metadata field {name} is not supported")
    version = _version(service, request.model_spec, asked)
    response = messages.GetModelMetadataResponse()
    _say_spec(response.model_spec, version, "")
    response.metadata[_SIGNATURES].Pack(signature_defs(version))
    return response


def signature_defs(version: Version) -> Any:
    """The signatures of a model as a SignatureDefMap."""
    found = messages.SignatureDefMap()
    for name, signature in version.signatures.items():
        definition = found.signature_def[name]
        definition.method_name = PREDICT
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


async def serving_status(service: Service, request: Any, asked: Asked) -> Any:
    """`GetModelStatus`."""
    spec = request.model_spec
    if spec.WhichOneof("version_choice") is None:
        versions = service.models.versions.get(spec.name)
        if not versions:
            raise Refusal(Code.NOT_FOUND, f"Could not find any versions of model {spec.name}")
        numbers = sorted(versions, reverse=True)
    else:
        numbers = [_version(service, spec, asked).number]
    response = messages.GetModelStatusResponse()
    for number in numbers:
        status = response.model_version_status.add()
        status.version, status.state = number, _AVAILABLE
        status.status.error_code = 0
    return response


# --- Open Inference Protocol


def _open_version(service: Service, name: str, number: str, asked: Asked) -> Version:
    if number and not (number.isascii() and number.isdigit() and len(number) < 20):
        raise invalid(f"the version of a model is a number, not {number!r}")
    asked.version = service.find(name, int(number) if number else None)
    return asked.version


async def open_live(service: Service, request: Any, asked: Asked) -> Any:
    """`ServerLive`."""
    del service, request, asked
    return messages.ServerLiveResponse(live=True)


async def open_ready(service: Service, request: Any, asked: Asked) -> Any:
    """`ServerReady`."""
    del request, asked
    return messages.ServerReadyResponse(ready=not service.stopping.is_set())


async def open_model_ready(service: Service, request: Any, asked: Asked) -> Any:
    """`ModelReady`."""
    if service.stopping.is_set():
        return messages.ModelReadyResponse(ready=False)
    _open_version(service, request.name, request.version, asked)
    return messages.ModelReadyResponse(ready=True)


async def open_server(service: Service, request: Any, asked: Asked) -> Any:
    """`ServerMetadata`."""
    del service, request, asked
    return messages.ServerMetadataResponse(name="msplit", version=__version__)


async def open_model(service: Service, request: Any, asked: Asked) -> Any:
    """`ModelMetadata`."""
    version = _open_version(service, request.name, request.version, asked)
    pool = version.signature("").pool
    numbers = sorted(service.models.versions[version.model])
    found = messages.ModelMetadataResponse(name=version.model, versions=map(str, numbers), platform="msplit")
    for listed, ports in ((found.inputs, pool.inputs), (found.outputs, pool.outputs)):
        for key, port in ports.items():
            shape = [-1 if size is None else size for size in port.shape]
            listed.add(name=key, datatype=tensors.open_name(port.dtype), shape=shape)
    return found


async def open_infer(service: Service, data: bytes, asked: Asked) -> Any:
    """`ModelInfer`."""

    def read() -> tuple[Any, Version, WantedOutputs, Arrays]:
        parts = decode.infer_request(data)
        request = parts.request
        version = _open_version(service, request.model_name, request.model_version, asked)
        wanted = wanted_by(request, version, asked)
        return request, version, wanted, parts.feeds(wanted.signature.pool.inputs)

    request, version, wanted, feeds = await service.apart(len(data), read)
    outputs = await wanted.predict(feeds)

    def written() -> bytes:
        response = messages.ModelInferResponse(
            model_name=version.model, model_version=str(version.number), id=request.id
        )
        for key, value in outputs.items():
            datatype = tensors.open_name(value.dtype.name if value.dtype.kind not in "OSU" else "object")
            response.outputs.add(name=key, datatype=datatype, shape=value.shape)
        contents = [tensors.field(6, tensors.raw_content(value)) for value in outputs.values()]
        return b"".join([response.SerializeToString(), *chain.from_iterable(contents)])

    return await service.apart(size_of(outputs), written)


@dataclass(frozen=True)
class WantedOutputs:
    """Read what a ModelInferRequest asks for beside its inputs.

    Attributes:
        outputs: Their names; none: all of them.
        timeout: Seconds that it may wait to be started; None: any time.
        priority: Its level; 0 is the most urgent.
    """

    signature: Signature
    outputs: Sequence[str]
    timeout: float | None
    priority: int

    async def predict(self, feeds: Arrays) -> Arrays:
        """The answer to these inputs."""
        return await predict(self.signature, feeds, self.outputs, timeout=self.timeout, priority=self.priority)


_PARAMETERS = {"signature_name": "string_param", "priority": "int64_param", "timeout": "int64_param"}
"""Those that are looked at, and their types. Clients may send others."""


def wanted_by(request: Any, version: Version, asked: Asked) -> WantedOutputs:
    """Read what a request asks for: its parameters are Triton's `priority` (1 is the most urgent) and `timeout` (µs), and `signature_name`,
    which Triton does not know.

    Raises:
        Refusal: One of them is of another type, or there is no such signature.
    """
    given = {name: request.parameters[name] for name in _PARAMETERS if name in request.parameters}
    for name, parameter in given.items():
        if parameter.WhichOneof("parameter_choice") != _PARAMETERS[name]:
            raise invalid(f"parameter {name} is no {'text' if name == 'signature_name' else 'whole number'}")
    name = given["signature_name"].string_param if "signature_name" in given else ""
    priority = max(given["priority"].int64_param - 1, 0) if "priority" in given else 0
    timeout = asked.timeout
    if "timeout" in given and given["timeout"].int64_param > 0:
        limit = given["timeout"].int64_param / 1e6
        timeout = limit if timeout is None else min(limit, timeout)
    return WantedOutputs(version.signature(name), [output.name for output in request.outputs], timeout, priority)


# --- All methods, by path


async def health(service: Service, request: Any, asked: Asked) -> Any:
    """`Check`."""
    del asked
    if request.service not in SERVICES:
        raise Refusal(Code.NOT_FOUND, f"unknown service {request.service}")
    return messages.HealthCheckResponse(status=2 if service.stopping.is_set() else 1)


_METHODS: tuple[tuple[str, Callable[[Service, Any, Asked], Awaitable[Any]]], ...] = (
    ("PredictRequest", serving_predict),
    ("GetModelMetadataRequest", serving_metadata),
    ("GetModelStatusRequest", serving_status),
    ("ServerLiveRequest", open_live),
    ("ServerReadyRequest", open_ready),
    ("ModelReadyRequest", open_model_ready),
    ("ServerMetadataRequest", open_server),
    ("ModelMetadataRequest", open_model),
    ("ModelInferRequest", open_infer),
    ("HealthCheckRequest", health),
)
"""Request and method for each of `PATHS`."""


_BY_PATH = {path: (path.split("/")[1], *found) for path, found in zip(PATHS, _METHODS, strict=True)}
_WITH_TENSORS = ("PredictRequest", "ModelInferRequest")
"""Requests that are read, and answers that are written, by the methods themselves."""


async def answer(service: Service, path: str, data: bytes, left: float | None) -> tuple[int, bytes]:
    """Answers what came over gRPC; an `Ask`."""
    start = perf_counter()
    asked = Asked(service.timeout if left is None else left)
    protocol, kind, method = _BY_PATH[path]
    try:
        found: bytes
        if kind in _WITH_TENSORS:
            found = await method(service, data, asked)
        else:
            request = decode.parsed(getattr(messages, kind), decode.apart(data, None, (), kind)[0])
            found = (await method(service, request, asked)).SerializeToString()
    except Exception as problem:  # noqa: BLE001  whatever it is, the client gets an answer
        why = told(service, problem)
        service.metrics.count(asked.version, protocol, why.code.name, perf_counter() - start)
        return why.code.grpc, why.said.encode()
    service.metrics.count(asked.version, protocol, "OK", perf_counter() - start)
    return 0, found


def told(service: Service, problem: BaseException) -> Refusal:
    """Refusal to send to a client. Internal errors go to the log instead."""
    cause = problem.__cause__ if isinstance(problem, Refusal) and problem.__cause__ is not None else problem
    service.look()
    if is_internal(cause):
        service.log("".join(traceback.format_exception(cause)))
    found = refusal(problem)
    if found.code is Code.INTERNAL and isinstance(cause, MsplitError):
        service.log(f"a request failed: {cause}")
    return found
