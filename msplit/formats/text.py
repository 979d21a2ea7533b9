"""Text files that a stranger may have written: of a bounded length, whatever the file says of itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from msplit.errors import MsplitError
from msplit.formats.special import read_bytes


def read_text(path: Path, most: int) -> str:
    """The text of a file.

    Args:
        path: The file, or a pipe that somebody writes to; see `special.read_bytes`.
        most: Bytes that it may have.

    Raises:
        OSError: It can not be read.
        EOFError: It has more bytes.
        ValueError: It is not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_file(path: str | os.PathLike[str], most: int, *, what: str, fix: str) -> str:
    """The text of a file of msplit's own.

    Args:
        path: The file.
        most: Longest it may be, bytes.
        what: What it should be, such as ``"plan"``, for messages.
        fix: How to come by a good one, for messages.

    Raises:
        MsplitError: It can not be read, is too long, or is no text.
    """
    where = os.fspath(path)
    try:
        return read_text(Path(path), most)
    except EOFError:
        raise MsplitError(f"the {what} is longer than {most >> 20} MiB", where=where, fix=fix) from None
    except OSError as error:
        raise MsplitError(f"the {what} can not be read: {error.strerror}", where=where, fix="check the path") from None
    except ValueError:
        raise MsplitError(f"the {what} is not UTF-8 text", where=where, fix=fix) from None


def parse_json(text: str, source: str, *, what: str, fix: str) -> Any:
    """The value that a JSON text holds.

    Args:
        text: JSON.
        source: Its name, for messages.
        what: As in `read_file`.
        fix: Likewise.

    Raises:
        MsplitError: It is no JSON; the message says where.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise MsplitError(f"the {what} is nested too deep", where=source, fix=fix) from None
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise MsplitError(f"the {what} is not valid JSON: {reason}", where=f"{source}{line}", fix=fix) from None
