"""SIGHUP of a server: what it was configured with is read again."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from msplit.errors import MsplitError
from msplit.serving.server.listening import Listening
from msplit.serving.server.logs import LOG
from msplit.serving.server.models import Models
from msplit.serving.server.tensors import Refusal

_TERMINAL = "/dev/tty"


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
