"""Addresses of a server, its ports, and the signals that end it or have it read its configuration again."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from msplit.errors import MsplitError
from msplit.serving.server.access import Certificates, Tokens
from msplit.serving.server.logs import LOG
from msplit.serving.server.models import Models
from msplit.serving.server.tensors import Refusal

_ENDS, _TERMINAL = (signal.SIGTERM, signal.SIGINT), "/dev/tty"


@dataclass(frozen=True)
class Listening:
    """Addresses and limits of a server.

    Attributes:
        host: Address, as in ``127.0.0.1``.
        port: Port of gRPC; 0: none.
        rest_port: Port of HTTP; 0: none.
        most: Bytes of the largest request.
        lame_duck: Seconds for which it goes on answering, not ready any more, when it is to stop.
        grace: Seconds that what is in flight may take after that.
        as_content: True to put values of TensorFlow Serving's answers into `tensor_content`.
        timeout: Seconds that a request may wait to be started, if it does not say so itself.
        access: Share of the requests that are logged.
        tokens: Tokens of which requests need one; None: they need none.
        certificates: Certificates for TLS; None: there is none.
        channel: Further settings of gRPC, by name.
        fronts: Processes that take requests; 1: this one does.
    """

    host: str = "127.0.0.1"
    port: int = 8500
    rest_port: int = 8501
    most: int = 64 << 20
    lame_duck: float = 0.0
    grace: float = 10.0
    as_content: bool = False
    timeout: float | None = None
    access: float = 0.0
    tokens: Tokens | None = None
    certificates: Certificates | None = None
    channel: Sequence[tuple[str, int | str]] = ()
    fronts: int = 1


@contextlib.contextmanager
def held(where: Listening, *, shares: bool = False) -> Iterator[dict[int, socket.socket]]:
    """Holds the ports of a server, so that what is taken is told before anything else is done. Nobody can connect to them yet.

    Args:
        where: Ports, and whether other processes are to listen on them.
        shares: True in one of those, for ports that are held already.

    Raises:
        MsplitError: One of them can not be had.
    """
    with contextlib.ExitStack() as stack:
        found = {}
        for port in filter(None, (where.port, where.rest_port)):
            if port in found:
                raise MsplitError(f"gRPC and HTTP are both to be on port {port}", fix="give them different ports")
            found[port] = stack.enter_context(contextlib.closing(_bound(where.host, port, shares=shares)))
            if where.fronts > 1:  # only now: else it would have a port that another server listens on
                found[port].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield found


def _bound(host: str, port: int, *, shares: bool) -> socket.socket:
    made = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what closed connections leave behind is no server
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
        made.bind(address)
    except OSError as problem:
        if made is not None:
            made.close()
        fix = "choose another with --port and --rest_api_port, or end what has it"
        what = f"can not listen on port {port} of {host}: {problem.strerror or problem}"
        raise MsplitError(what, fix=fix) from problem
    return made


@contextlib.contextmanager
def heeding(stop: Callable[[int], object]) -> Iterator[None]:
    """A block in which each SIGTERM or SIGINT calls a function with its number, in the main thread."""

    def come(number: int, frame: object) -> None:
        del frame
        LOG.info("stopping: %s came", signal.Signals(number).name)
        stop(number)

    heard = [number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN]  # `nohup` ignores one
    for number in heard:
        signal.signal(number, come)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class Reloading:
    """A block in which SIGHUP has tokens, certificates and models read again, where the main thread enters it.

    Args:
        where: Tokens and certificates of the server.
        models: Its models.
        then: Called when tokens and certificates were read.
    """

    def __init__(self, where: Listening, models: Models, then: Callable[[], object]) -> None:
        self._where, self._models, self._then = where, models, then
        self._reloading = threading.Lock()
        self._before: Any = None

    def __enter__(self) -> Reloading:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGHUP)
            attended = self._before is not signal.SIG_IGN and _has_terminal()
            signal.signal(signal.SIGHUP, lambda number, frame: self._hang_up(attended))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGHUP, self._before)

    def _hang_up(self, attended: bool) -> None:
        """Reloads what can be, at SIGHUP; called in the main thread.

        Args:
            attended: True where the server was begun at a terminal. Where that is gone the signal does what it did before, which is to end
                the process: nobody wanted it to outlive its terminal.
        """
        if attended and not _has_terminal():
            signal.signal(signal.SIGHUP, self._before)
            signal.raise_signal(signal.SIGHUP)
        else:
            threading.Thread(target=self._reload, name="msplit-reload", daemon=True).start()

    def _reload(self) -> None:
        """Reads again what the server was configured with. What is wrong is told, and stays as it was."""
        control, proofs = self._models.control, (self._where.tokens, self._where.certificates)
        sources: dict[str, Callable[[], object]] = {one.what: one.read for one in proofs if one is not None}
        if control is not None:
            sources["models"] = lambda: control("reread", None, None).result()
        with self._reloading:
            LOG.info("reloading: SIGHUP came")
            for what, read in sources.items():
                try:
                    read()
                    self._then()
                except (MsplitError, Refusal) as problem:
                    LOG.warning("reloading: %s stay as they were: %s", what, " ".join(str(problem).split("\n")))
                except Exception:  # noqa: BLE001  whatever it is, the others are read
                    LOG.exception("reloading: %s stay as they were", what)
                else:
                    LOG.info("reloading: %s are as configured now", what)


def _has_terminal() -> bool:
    """True where this process has a terminal, which is still there."""
    with contextlib.suppress(OSError), open(_TERMINAL):
        return True
    return False
