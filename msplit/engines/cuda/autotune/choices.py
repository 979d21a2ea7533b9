"""Choices that outlive the process that measured for them: a line of JSON each, in a file of the GPU that they hold for.

A choice depends on the GPU, on the versions of what computes, and on our own code. All of these are in the file's name, so that nothing
measured elsewhere, or before an update, is ever found. A line is added in one piece, so that processes may add to one file at once; what
can not be read is left out and measured again. The folder is that of compiled kernels, with its rule: none that others may write to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels.store import kept_in
from msplit.errors import MsplitError, WriteError
from msplit.formats.atomic import append_bytes
from msplit.formats.files import JsonValue, read_bytes

T = TypeVar("T")

LARGEST = 64 << 20
"""Bytes that a file may have. A choice takes some hundred."""


@dataclass(frozen=True)
class Family(Generic[T]):
    """Family of choices that are made and kept in one way.

    Attributes:
        name: Of this family alone.
        pack: A choice as plain JSON data.
        unpack: Likewise back. It raises a MsplitError where the data are no choice.
        baseline: What is chosen before anything is known.
    """

    name: str
    pack: Callable[[T], Any]
    unpack: Callable[[JsonValue], T]
    baseline: T


class Choices:
    """The choices that are kept for one device, which owns it. Of a CPU that stands in for a GPU none are.

    Attributes:
        path: Where; None where nothing is kept.
    """

    def __init__(self, device: Device) -> None:
        self.path = kept_in(device, "choices", ".jsonl")

    def known(self, family: Family[T], key: tuple[Any, ...]) -> tuple[T] | None:
        """A choice that was kept, alone in a tuple since it may be None; None where there is none."""
        found = self._lines.get((family.name, repr(key)))
        if found is None:
            return None
        try:
            return (family.unpack(found),)
        except (MsplitError, ValueError):
            return None

    def keep(self, family: Family[T], key: tuple[Any, ...], choice: T) -> None:
        """Adds a choice. Where the disk or the file is full, or may not be written to, it is not kept, and that is all."""
        if self.path is None or " at 0x" in repr(key):  # which no other process would find
            return
        # The first line break ends what a crash has cut off.
        line = "\n" + json.dumps([family.name, repr(key), family.pack(choice)]) + "\n"
        try:
            if self.path.exists() and self.path.stat().st_size + len(line) > LARGEST:
                self.path = None
                return
            append_bytes(self.path, line.encode())
        except (OSError, WriteError):
            self.path = None

    @cached_property
    def _lines(self) -> dict[tuple[str, str], JsonValue]:
        if self.path is None or not self.path.is_file():
            return {}
        try:
            lines = read_bytes(self.path, LARGEST).split(b"\n")
        except (OSError, EOFError):
            return {}
        found = {}
        for line in filter(None, lines):
            try:
                whole = JsonValue.parse(line.decode(), str(self.path), what="choice", fix="delete the file")
                family, key, choice = whole.items(3)
                found[family.text(), key.text()] = choice
            except (ValueError, MsplitError):  # cut off by a crash, or damaged
                continue
        return found
