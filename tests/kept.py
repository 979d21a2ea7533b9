"""TensorFlow's answers, kept in `kept_answers.bin` by a hash of the question, so that tests which only compare need not ask again.

    MSPLIT_ANSWERS=anew scripts/test                                asks TensorFlow everything, and fails where a kept answer is another
    MSPLIT_ANSWERS=write pytest tests/engines/cuda/ops              writes the file anew, with the answers to what these tests ask

A question is an op with its attributes and inputs. Answers hold for one version of TensorFlow and one kind of processor, whose kernels may
round in another order than those of others: elsewhere TensorFlow is asked. `.ci/nightly` asks everything.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import platform
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (names its types to NumPy)
import numpy as np

FILE = Path(__file__).parent / "kept_answers.bin"
LARGEST = 1024
"""Bytes of an answer that is kept, all outputs together: most have a few numbers."""

HOW = os.environ.get("MSPLIT_ANSWERS", "kept")

Answer = tuple[np.ndarray, ...]


@functools.cache
def place() -> str:
    """Version of TensorFlow and kind of processor: the vector instructions that its kernels choose by."""
    try:
        (flags, *_) = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, ValueError):
        flags = ""
    try:
        release = version("tensorflow")
    except PackageNotFoundError:
        release = "no TensorFlow"
    vectors = sorted(word for word in flags.split() if word.startswith(("avx", "fma", "amx", "sse4")))
    return " ".join((release, platform.machine(), *vectors))


@functools.cache
def _named(dtype: np.dtype) -> str:
    """The name of a dtype, which NumPy puts together anew each time."""
    return dtype.name


def key(op: str, inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> str:
    """A hash of a question."""
    found = hashlib.sha256(repr((op, sorted(attrs.items()))).encode())
    for array in inputs:
        found.update(f"{_named(array.dtype)} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:20]


def encoded(answers: Mapping[str, Answer]) -> bytes:
    """Answers as a file holds them: JSON that says which arrays there are, and behind it their bytes, all compressed."""
    rows = {name: [(array.dtype.name, array.shape) for array in arrays] for name, arrays in sorted(answers.items())}
    head = json.dumps([place(), rows], separators=(",", ":")).encode()
    body = b"".join(array.tobytes() for name in rows for array in answers[name])
    return zlib.compress(b"%d\n" % len(head) + head + body, 9)


def decoded(content: bytes) -> dict[str, Answer]:
    """Answers of a file; none where they were given elsewhere."""
    size, _, rest = zlib.decompress(content).partition(b"\n")
    where, rows = json.loads(rest[: int(size)])
    if where != place():
        return {}
    found, at = {}, int(size)
    for name, arrays in rows.items():
        values = []
        for dtype, shape in arrays:
            kind = np.dtype(dtype)
            count = int(np.prod(shape, dtype=np.int64))
            values.append(np.frombuffer(rest, kind, count, at).reshape(shape))
            at += count * kind.itemsize
        found[name] = tuple(values)
    return found


@functools.cache
def answers() -> dict[str, Answer]:
    """The kept answers that hold here."""
    return decoded(FILE.read_bytes()) if FILE.exists() and HOW != "write" else {}


def kept(ask: Callable[..., Answer]) -> Callable[..., Answer]:
    """Has a function of an op, inputs and attributes ask TensorFlow only what is not kept."""

    @functools.wraps(ask)
    def asked(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any] | None = None) -> Answer:
        arrays = [np.asarray(array) for array in inputs]
        if any(array.dtype.kind == "O" for array in arrays):
            return ask(op, arrays, attrs)
        name = key(op, arrays, attrs or {})
        known = answers().get(name)
        if known is not None and HOW == "kept":
            return tuple(array.copy() for array in known)
        found = ask(op, arrays, attrs)
        if known is not None:
            same = len(known) == len(found) and all(map(_same, known, found))
            assert same, f"TensorFlow's answer to {op} is not the kept one ({name}): {found}, kept: {known}"
        elif HOW == "write" and sum(array.nbytes for array in found) <= LARGEST and not any(map(_is_text, found)):
            _new[name] = found
        return found

    return asked


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def _is_text(array: np.ndarray) -> bool:
    return array.dtype.kind in "OSU"


_new: dict[str, Answer] = {}

if HOW == "write":
    atexit.register(lambda: FILE.write_bytes(encoded(_new)))
