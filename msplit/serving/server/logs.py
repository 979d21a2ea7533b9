"""Logs of a server: one logger, `msplit`, with lines of text or JSON that name the model, version and request they are about.

Names, texts of requests and errors are strangers' data: each record is one line in which nothing is hidden, and a traceback is indented.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from msplit import escape
from msplit.progress import LOG as LOG

_TRACED = {
    "x-request-id": re.compile(r"[!-~]{1,128}"),
    "traceparent": re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
}
"""Headers that say which request it is, with what they may hold."""
_FIELDS = ("model", "version", "request_id", "traceparent", "protocol", "status", "seconds")
"""Attributes of a record that say what it is about, as ``extra={"model": "ranker"}`` gives them."""


def traced(headers: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    """Headers of a request that say which it is, for logs and its answer. What is no such value is left out."""
    found = {}
    for name, value in headers:
        kind = _TRACED.get(name)
        if kind is not None and isinstance(value, str) and kind.fullmatch(value):
            found[name] = value
    return found


class LogHandler(logging.Handler):
    """Writes records as lines.

    Args:
        write: Writes a text and a line break.
        as_json: True for JSON, false for text.
    """

    def __init__(self, write: Callable[[str], None], *, as_json: bool) -> None:
        super().__init__()
        self.write, self.as_json, self._format = write, as_json, _json if as_json else _text

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        try:
            said = vars(record)
            self.write(self._format(record, {name: said[name] for name in _FIELDS if name in said}))
        except Exception:  # noqa: BLE001  a log that fails fails no request
            self.handleError(record)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cause(record: logging.LogRecord) -> str:
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else ""


def _text(record: logging.LogRecord, fields: Mapping[str, Any]) -> str:
    about = "".join(
        f" {name}={value if isinstance(value, float) else json.dumps(value)}" for name, value in fields.items()
    )
    said = escape.line(f"{_time(record)} {record.levelname} {record.getMessage()}{about}")
    return "\n    ".join([said, *escape.lines(_cause(record)).splitlines()])


def _json(record: logging.LogRecord, fields: Mapping[str, Any]) -> str:
    said = {"time": _time(record), "level": record.levelname, "message": record.getMessage(), **fields}
    if cause := _cause(record):
        said["cause"] = cause
    return escape.json_document(json.dumps(said), ascii_only=True)


@contextlib.contextmanager
def logging_to(write: Callable[[str], None], *, as_json: bool) -> Iterator[None]:
    """Has what a server does logged for as long as the block lasts, and nothing twice.

    Args:
        write: Writes a text and a line break.
        as_json: True for JSON, false for text.
    """
    handler, before = LogHandler(write, as_json=as_json), []
    for name, level in ((LOG.name, logging.INFO), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        before.append((logger, logger.handlers, logger.propagate, logger.level))
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
