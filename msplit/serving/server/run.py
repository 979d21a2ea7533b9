"""A server from its first request to its last: gRPC in a thread, HTTP on an event loop in another, until a signal comes.

The main thread opens the models meanwhile, and then waits: ports are open from the start, and say what is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any

import uvicorn

from msplit.errors import MsplitError
from msplit.serving.server import rest, rpc
from msplit.serving.server.exchange import health_of, take
from msplit.serving.server.fronts import Fronts
from msplit.serving.server.listening import Listening, Reloading, heeding, held
from msplit.serving.server.metrics import Metrics
from msplit.serving.server.models import Models
from msplit.serving.server.service import Service
from msplit.serving.server.tensors import StatusCode

__all__ = ["Answering", "Listening", "answering", "held"]

_LOOK = 0.5
"""Seconds between two looks whether a GPU has failed: nobody may ask just then."""
_BACKLOG = 2048
_MOST_CONNECTIONS = 4096
"""Connections over HTTP, beyond which requests are refused: a process may have some thousand files."""
_STOPPING = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 35\r\nconnection: close\r\n\r\n"
_STOPPING += b'{"error": "the server is stopping"}'
_NOTICE = 0.3
"""Seconds for which a server that is to stop refuses requests before it closes its doors."""


@contextlib.contextmanager
def answering(models: Models, where: Listening, ports: dict[int, socket.socket]) -> Iterator[Answering | Fronts]:
    """Answers requests in threads for as long as the block lasts, also while models are yet to be opened: it is live then, and not ready.

    Args:
        models: Models that are served. They may become ready later.
        where: It listens.
        ports: From `held`.

    Raises:
        MsplitError: It can not listen.
    """
    server = Fronts(models, where) if where.fronts > 1 else Answering.of(models, where, Metrics(models))
    with Reloading(where, models, server.reread):
        try:
            server.start(ports)
            yield server
        finally:
            server.end()


class Answering:
    """A server that answers; see `answering`.

    Args:
        service: State of the server.
        where: It listens.
    """

    def __init__(self, service: Service, where: Listening) -> None:
        self._service, self._where = service, where
        self._came: list[int] = []
        self._listening = threading.Event()
        self._failed: list[BaseException] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @staticmethod
    def of(models: Models, where: Listening, metrics: Metrics) -> Answering:
        """Server of these models."""
        service = Service(models, metrics, where.as_content, where.timeout, access=where.access, tokens=where.tokens)
        return Answering(service, where)

    def start(self, ports: dict[int, socket.socket]) -> None:
        """Begins to listen.

        Raises:
            MsplitError: It can not.
        """
        self._thread = threading.Thread(target=self._serve, args=(ports,), name="msplit-server", daemon=True)
        self._thread.start()
        self._listening.wait()
        if self._failed:
            raise self._failed[0]

    def wait(self, ready: Callable[[], None]) -> None:
        """Waits until SIGTERM or SIGINT comes and what is in flight is answered; a second one ends it at once.

        Args:
            ready: Called when signals are heard. Models are ready by then.

        Raises:
            DeviceLost: The GPU has failed.
        """
        with heeding(self.stop):
            ready()
            self.join()
        if self._service.lost:
            raise self._service.lost[0]

    def join(self) -> None:
        """Waits until it has ended. Raises what ended it, if that was a fault."""
        assert self._thread is not None
        self._thread.join()
        if self._failed:
            raise self._failed[0]

    def end(self) -> None:
        """Ends it without delay, if it has not ended."""
        if self._thread is not None and self._thread.is_alive():
            self._service.stopping.set()
            self.stop(0)
            self._thread.join()

    def reread(self) -> None:
        """Takes note that tokens and certificates were read again: they are those of `where`."""

    def stop(self, number: int) -> None:
        """Has it end, called a second time at once; number of the signal that came, 0 for none."""
        self._came.append(number)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe((self._first if len(self._came) == 1 else self._at_once).set)

    def _serve(self, ports: dict[int, socket.socket]) -> None:
        """Body of the thread."""
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._run(ports))
        except BaseException as problem:  # noqa: BLE001  raised in the main thread
            self._failed.append(problem)
        finally:
            self._listening.set()

    async def _run(self, ports: dict[int, socket.socket]) -> None:
        service, where = self._service, self._where
        self._first, self._at_once = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._came:  # before there was a loop
            self._first.set()
        doors: list[_Grpc | _Http] = []
        try:
            if where.port:
                doors.append(_Grpc(service, where))
            if where.rest_port:
                doors.append(_Http(service, where))
            for door in doors:
                await door.start(ports)
            self._listening.set()
            stops = asyncio.create_task(self._first.wait())
            while not (self._first.is_set() or service.stopping.is_set()):
                await asyncio.wait([stops], timeout=_LOOK)
                service.look()
            # Health checks say so from here on, while requests are still answered: who sends them needs time to hear of it.
            service.leaving.set()
            hurry = asyncio.create_task(self._at_once.wait())
            if where.lame_duck and not service.stopping.is_set():
                await asyncio.wait([hurry], timeout=where.lame_duck)
            # Now they are refused: clients go elsewhere while there is still somebody to tell them.
            service.stopping.set()
            if not hurry.done():
                await asyncio.wait([hurry], timeout=min(_NOTICE, where.grace))
            ends = asyncio.create_task(_all(door.stop() for door in doors))
            await asyncio.wait([hurry, ends], return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        finally:
            for door in doors:
                await door.close()


def loop_factory() -> Callable[[], Any] | None:
    """Factory of event loops: uvloop if installed, which takes a quarter less time per request."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    found: Callable[[], Any] = uvloop.new_event_loop
    return found


async def _all(ends: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*ends)


class _Grpc:
    """gRPC in a thread of this process."""

    def __init__(self, service: Service, where: Listening) -> None:
        self._service, self._where = service, where
        ask, health = partial(take, service), partial(health_of, service)
        allow = self._allow if where.tokens is not None else None
        self._server = rpc.GrpcServer(
            ask, service.stopping, where.most, service.drive, health, allow, where.channel, shares=where.fronts > 1
        )

    def _allow(self, path: str, headers: Iterable[tuple[str, Any]]) -> bool:
        """True where a call may come in; else it is counted."""
        if path in rpc.OPEN_TO_ALL or self._service.allows(dict(headers)):
            return True
        self._service.metrics.count(None, path.split("/")[1], StatusCode.UNAUTHENTICATED.name, 0.0)
        return False

    async def start(self, ports: dict[int, socket.socket]) -> None:
        """Begins to listen."""
        where = self._where
        ports[where.port].close()
        credentials = None if where.certificates is None else where.certificates.credentials()
        if not self._server.start(where.host, where.port, credentials):
            what = f"can not listen on port {where.port} of {where.host}: somebody took it meanwhile"
            raise MsplitError(what, fix="choose another with --port")

    async def stop(self) -> None:
        """Ends it, and waits for what is in flight."""
        await self._server.end(self._where.grace)

    async def close(self) -> None:
        """Ends it at once."""
        await self._server.end()


async def _refuse(connection: socket.socket, plain: bool) -> None:
    """Refuses what a connection asks for that nobody else will read. With TLS it is only closed, since it would not understand that."""
    loop = asyncio.get_running_loop()
    with connection, contextlib.suppress(OSError, TimeoutError):
        if not plain:
            return
        connection.setblocking(False)
        await asyncio.wait_for(loop.sock_recv(connection, 1 << 16), _NOTICE)
        await loop.sock_sendall(connection, _STOPPING)


class _Http(uvicorn.Server):
    """Uvicorn on a loop that it does not own: signals are not its business."""

    def __init__(self, service: Service, where: Listening) -> None:
        config = uvicorn.Config(
            rest.app(service, where.most),
            log_config=None,
            log_level="error",  # each of its warnings is about a request, such as one for another protocol: clients could fill the log
            access_log=False,
            lifespan="off",
            server_header=False,
            ws="none",  # by default what is installed decides, and such connections know no limits
            backlog=_BACKLOG,
            timeout_graceful_shutdown=max(1, round(where.grace)),
            limit_concurrency=_MOST_CONNECTIONS,
        )
        if where.certificates is not None:
            config.load()  # which would set it
            config.ssl = where.certificates.context
        super().__init__(config)
        self._since: dict[Any, tuple[Any, float]] = {}
        self._port = where.rest_port
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stay with who has them."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: ends connections that have brought no request for too long. Uvicorn ends those between two requests only."""
        now, before = asyncio.get_running_loop().time(), self._since
        self._since = {}
        one: Any
        for one in self.server_state.connections:
            if (cycle := one.cycle) is None or cycle.response_complete:
                same, since = before.get(one, (cycle, now))
                self._since[one] = (cycle, since if same is cycle else now)
                if now - self._since[one][1] > rest.SILENCE:
                    one.transport.close()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more connections, and has those that are there bring their requests, which are refused, before it ends them."""
        doors = [one.dup() for one in sockets or ()]
        for server in self.servers:
            server.close()
        await asyncio.sleep(0.01)
        queued = []
        for door in doors:  # who still stands in its queue would be cut off with it
            door.setblocking(False)
            with door, contextlib.suppress(BlockingIOError):
                while True:
                    queued.append(door.accept()[0])
        refusals = asyncio.gather(*(_refuse(connection, self.config.ssl is None) for connection in queued))
        over = asyncio.get_running_loop().time() + _NOTICE
        while self.server_state.connections and asyncio.get_running_loop().time() < over:
            await asyncio.sleep(0.01)
        await refusals
        await super().shutdown(sockets)

    async def start(self, ports: dict[int, socket.socket]) -> None:
        """Begins to listen."""
        self._task = asyncio.create_task(self.serve([ports[self._port]]))
        while not self.started:
            if self._task.done():
                self._task.result()
                raise MsplitError("the HTTP server has ended before it began", fix="report what was told before that")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Ends it, and waits for what is in flight."""
        self.should_exit = True
        assert self._task is not None
        await self._task

    async def close(self) -> None:
        """Ends it at once."""
        if self._task is not None:
            self._task.cancel()
