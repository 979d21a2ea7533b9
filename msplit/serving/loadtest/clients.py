"""A server that runs somewhere, as a target: processes that send it requests over gRPC, each its share of the table's rows.

What a client takes itself is part of what is measured: one in Python sends some thousands of requests per second, so there are several.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msplit.engines.base import Arrays
from msplit.errors import Busy, EngineError, MsplitError, TimedOut
from msplit.serving.loadtest.corpus import by_steps
from msplit.serving.loadtest.dispatcher import RowShare, Watch, drive
from msplit.serving.loadtest.generator import MOST_PARTS, RequestTable
from msplit.serving.loadtest.targets import ECHO, NAP, LocalTarget, ProcessTarget, ProcessTask, Target
from msplit.serving.server import decode, messages, tensors

TENSORFLOW, KSERVE = "tensorflow", "kserve"
PROTOCOLS = (TENSORFLOW, KSERVE)
"""TensorFlow Serving's `Predict`, and the Open Inference Protocol's `ModelInfer`, which Triton and KServe speak."""

_CONNECT = 10.0
"""Seconds until a server must have answered."""

_PATIENCE = 60.0
"""Seconds for a plain request: the first ones may be slow."""


@dataclass(frozen=True)
class ServerUnderTest:
    """Server that is to be measured.

    Attributes:
        address: Its host and port.
        model: Name of the model there.
        protocol: One of `PROTOCOLS`.
        processes: Clients that send side by side.
        authorities: PEM file of the certificates that sign the server's; None: it is asked without TLS.
        certificate: PEM file of the clients' certificate; None: they have none.
        key: PEM file of its key.
        token_file: File of which the first bearer token is sent with each request; None: none is.

    Raises:
        MsplitError: There is no such protocol, or that are too many processes; a file is of no use, or lacks another one.
    """

    address: str
    model: str
    protocol: str = TENSORFLOW
    processes: int = 4
    authorities: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise MsplitError(f"there is no protocol {self.protocol!r}", fix=f"one of: {', '.join(PROTOCOLS)}")
        if not 1 <= self.processes <= MOST_PARTS:
            raise MsplitError(f"{self.processes} processes can not send", fix=f"give 1 to {MOST_PARTS}")
        if (self.certificate is None) != (self.key is None) or (self.certificate and not self.authorities):
            raise MsplitError("a client's certificate needs its key, and TLS", fix="give ca, cert and key")
        if importlib.util.find_spec("grpc") is None:
            raise MsplitError("gRPC is not installed, and clients need it", fix="pip install 'grpcio>=1.71'")
        self.proofs()

    def proofs(self) -> tuple[Any, Sequence[tuple[str, str]]]:
        """Credentials of a channel, None without TLS, and metadata of each call. Files are read anew."""
        from msplit.serving.server import access

        metadata = [("authorization", f"Bearer {access.tokens_of(self.token_file)[0]}")] if self.token_file else []
        if self.authorities is None:
            return None, metadata
        return access.client_credentials(self.authorities, self.certificate, self.key), metadata


@dataclass(frozen=True, eq=False)
class ClientTask(ProcessTask):
    """Task of one of the client processes."""

    server: ServerUnderTest
    feeds: Sequence[Arrays]
    part: RowShare

    def open(self) -> Target:
        """Connects, and has answers to all requests, or in all but the first process to one of them."""
        channel = Channel(self.server, self.feeds)
        plain = by_steps(channel.step, self.feeds if self.part.number == 0 else self.feeds[:1])

        def run(table: RequestTable, watch: Watch, timeout: float | None) -> Mapping[str, int]:
            return drive(table, channel, self.feeds, watch, timeout=timeout, nap=NAP, part=self.part)

        return LocalTarget("server", "", plain, run)


def clients_of(server: ServerUnderTest, feeds: Sequence[Arrays], table: RequestTable) -> ProcessTarget:
    """Starts the processes that send requests to a server, as a target."""
    shares = [RowShare(number, server.processes) for number in range(server.processes)]
    tasks = [ClientTask(table.layout, table.handle, server, feeds, share) for share in shares]
    clients = f"{server.processes} client process{'' if server.processes == 1 else 'es'}"
    about = f"{server.model} at {server.address}, {server.protocol}'s protocol, {clients}"
    return ProcessTarget("server", about, ECHO, "a client", tasks)


class Channel:
    """Sends prepared requests. Their bytes are made once. What `dispatcher.drive` drives."""

    def __init__(self, server: ServerUnderTest, feeds: Sequence[Arrays]) -> None:
        import grpc

        self._grpc = grpc
        unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        credentials, self._metadata = server.proofs()
        if credentials is None:
            self._channel = grpc.insecure_channel(server.address, unlimited)
        else:
            self._channel = grpc.secure_channel(server.address, credentials, unlimited)
        try:
            grpc.channel_ready_future(self._channel).result(_CONNECT)
        except grpc.FutureTimeoutError:
            self._channel.close()  # otherwise a thread goes on trying
            how = "with" if server.authorities else "without"
            fix = f"start one: msplit serve MODEL; or check host and port, and certificates: it was asked {how} TLS"
            raise EngineError(f"no server answers at {server.address}", fix=fix) from None
        encode, self._decode, method = _protocol(server)
        self._call = self._channel.unary_unary(method)
        self._requests = {id(one): encode(one) for one in feeds}

    def submit(self, feeds: Arrays, *, priority: int = 0, timeout: float | None = None) -> Any:
        """Sends one of the prepared requests. The protocols have no priorities that all servers know."""
        return _Reply(self._call.future(self._requests[id(feeds)], timeout, self._metadata), self)

    def step(self, feeds: Arrays) -> Arrays:
        """Sends one, and waits for its answer."""
        return self.decoded(self._call.future(self._requests[id(feeds)], _PATIENCE, self._metadata))

    def drive(self, seconds: float = 0.0) -> bool:
        """Nothing: gRPC has threads."""
        return False

    def decoded(self, call: Any) -> Arrays:
        """The answer of a call that is over.

        Raises:
            Busy, TimedOut: The server did not take it, or not in time.
            EngineError: The server refused it.
            CancelledError: Nobody waits for it any more.
        """
        try:
            data = call.result()
        except self._grpc.FutureCancelledError:
            raise CancelledError from None
        except self._grpc.RpcError as problem:
            code, said = problem.code(), str(problem.details())
            if code is self._grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Busy(said) from None
            if code is self._grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimedOut(said) from None
            raise EngineError(f"the server says {code.name}: {said}") from None
        return self._decode(data)


@dataclass(frozen=True, eq=False)
class _Reply:
    """A call as a future whose result is an answer."""

    call: Any
    channel: Channel

    def add_done_callback(self, told: Callable[[Any], None]) -> None:
        self.call.add_done_callback(lambda call: told(self))

    def cancel(self) -> bool:
        return bool(self.call.cancel())

    def result(self) -> Arrays:
        return self.channel.decoded(self.call)


def _protocol(server: ServerUnderTest) -> tuple[Callable[[Arrays], bytes], Callable[[bytes], Arrays], str]:
    """Function that encodes a request, function that decodes an answer, and path of the method."""

    def predict(feeds: Arrays) -> bytes:
        request = messages.PredictRequest()
        request.model_spec.name = server.model
        for name, value in feeds.items():
            tensors.to_tensor_proto(np.asarray(value), request.inputs[name], as_content=True)
        return bytes(request.SerializeToString())

    def predicted(data: bytes) -> Arrays:
        response = messages.PredictResponse.FromString(data)
        return {name: decode.array_of(proto, name) for name, proto in response.outputs.items()}

    def infer(feeds: Arrays) -> bytes:
        request = messages.ModelInferRequest(model_name=server.model)
        for name, value in feeds.items():
            datatype = tensors.open_name(tensors.name_of(value.dtype))
            request.inputs.add(name=name, datatype=datatype, shape=value.shape)
            request.raw_input_contents.append(b"".join(tensors.raw_content(value)))
        return bytes(request.SerializeToString())

    def inferred(data: bytes) -> Arrays:
        response = messages.ModelInferResponse.FromString(data)
        raw = [*response.raw_output_contents] or [None] * len(response.outputs)
        return {one.name: decode.array_of_infer(one, data) for one, data in zip(response.outputs, raw, strict=True)}

    if server.protocol == TENSORFLOW:
        return predict, predicted, "/tensorflow.serving.PredictionService/Predict"
    return infer, inferred, "/inference.GRPCInferenceService/ModelInfer"
