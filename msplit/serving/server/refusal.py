"""Reasons why a request is not answered, as the protocols say them."""

from __future__ import annotations

import asyncio
from enum import Enum

from msplit import escape
from msplit.errors import Busy, Closed, DeviceLost, EngineError, InvalidInput, MsplitError, TimedOut


class StatusCode(Enum):
    """gRPC's number and HTTP's."""

    CANCELLED = (1, 499)
    INVALID_ARGUMENT = (3, 400)
    DEADLINE_EXCEEDED = (4, 504)
    NOT_FOUND = (5, 404)
    RESOURCE_EXHAUSTED = (8, 429)
    FAILED_PRECONDITION = (9, 412)
    UNIMPLEMENTED = (12, 501)
    INTERNAL = (13, 500)
    UNAVAILABLE = (14, 503)

    @property
    def grpc(self) -> int:
        """Number of the status in gRPC."""
        return self.value[0]

    @property
    def http(self) -> int:
        """Status in HTTP."""
        return self.value[1]


LONGEST = 1_000
"""Most characters of a message: what it tells of may be as long as the client likes."""


class Refusal(Exception):
    """A request is refused, or has failed.

    Args:
        code: Kind of failure.
        said: For whoever sent it; made one line in which nothing is hidden.
    """

    def __init__(self, code: StatusCode, said: str) -> None:
        said = escape.line(said[: LONGEST + 1])
        self.code, self.said = code, said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"
        super().__init__(self.said)


def invalid(said: str) -> Refusal:
    """The request is wrong."""
    return Refusal(StatusCode.INVALID_ARGUMENT, said)


def refusal(problem: BaseException, *, ran: bool = False) -> Refusal:
    """Refusal to send to the client whose request raised an error.

    Args:
        problem: The error.
        ran: True if the model had been run, so that the error is not the client's.
    """
    if isinstance(problem, Refusal):
        return problem
    if isinstance(problem, MsplitError):
        # Not the fix: it is for whoever runs the server, and names what only they can change.
        other = StatusCode.INTERNAL if ran else StatusCode.INVALID_ARGUMENT
        return Refusal(next((code for kind, code in _CODES if isinstance(problem, kind)), other), problem.what)
    if isinstance(problem, asyncio.CancelledError):
        return Refusal(StatusCode.CANCELLED, "the request was cancelled")
    if isinstance(problem, MemoryError):
        return Refusal(StatusCode.RESOURCE_EXHAUSTED, "there is not enough memory for this request")
    return Refusal(StatusCode.INTERNAL, "internal error; the server's log has more")


_CODES: tuple[tuple[type[EngineError], StatusCode], ...] = (
    (Busy, StatusCode.RESOURCE_EXHAUSTED),
    (TimedOut, StatusCode.DEADLINE_EXCEEDED),
    (Closed, StatusCode.UNAVAILABLE),
    (DeviceLost, StatusCode.UNAVAILABLE),
    (InvalidInput, StatusCode.INVALID_ARGUMENT),
)


def is_internal(problem: BaseException) -> bool:
    """True for a fault of the server, which goes to its log."""
    return not isinstance(problem, Refusal | MsplitError | asyncio.CancelledError)
