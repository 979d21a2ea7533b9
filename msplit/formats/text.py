"""Text files that a stranger may have written: of a bounded length, whatever the file says of itself."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path, most: int) -> str:
    """The text of a file.

    Args:
        path: The file. A device or a pipe may never end, and says that it is empty.
        most: Bytes that it may have.

    Raises:
        OSError: It can not be read.
        EOFError: It has more bytes.
        ValueError: It is not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise EOFError(f"{path} has more than {most:,} bytes")
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
