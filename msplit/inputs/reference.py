"""Saved inputs and outputs, for machines where nothing else could compute the reference.

An .npz with ``input/NAME`` and ``output/NAME`` per tensor; strings and types that NumPy's format does not know are stored as
bytes and described in ``msplit``, a JSON text. No pickle, so a reference file can not run code.
"""

from __future__ import annotations

import io
import itertools
import json
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.errors import LoadError
from msplit.formats.atomic import write_bytes_atomic
from msplit.formats.files import open_regular
from msplit.formats.tensors import numpy_dtype

_VERSION = 1
PACKED = "msplit"
"""The entry that describes what is packed."""
DAMAGED = (
    *(ValueError, KeyError, TypeError, AttributeError, EOFError, SyntaxError, RuntimeError),
    *(tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
"""Errors that NumPy, zipfile and json raise on a file that is damaged, or is something else."""

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Reference:
    """Reference outputs of a model for some inputs.

    Attributes:
        feeds: Inputs by name.
        source: Where it comes from, in words.
        computed: Output -> the coarser type that it was computed in; None where the model is there to ask.
        learns: Whether TensorFlow is there to ask what further steps make of variables.
        needed: Output -> the tolerance that it needed where it was held against these outputs first; empty where nobody did so.
    """

    feeds: Arrays
    outputs: Arrays
    source: str
    computed: Mapping[str, str] | None = None
    learns: bool = False
    needed: Mapping[str, float] = field(default_factory=dict)


def save_reference(path: Path, reference: Reference, *, force: bool = False) -> None:
    """Writes a reference, whole or not at all. Only `force` replaces a file that is there.

    Raises:
        WriteError: It can not be written; what stood there before is unharmed.
    """
    write_bytes_atomic(path, packed_reference(reference), force=force)


def packed_reference(reference: Reference) -> bytes:
    """A reference as the bytes of its file."""
    arrays: dict[str, NDArray[Any]] = {}
    described: dict[str, Any] = {}
    for group, values in (("input", reference.feeds), ("output", reference.outputs)):
        for name, value in values.items():
            key = f"{group}/{name}"
            arrays[key], how = _pack(np.asarray(value))
            if how:
                described[key] = how
    head = {"version": _VERSION, "source": reference.source, "packed": described, "needed": {**reference.needed}}
    arrays[PACKED] = np.array(json.dumps(head, sort_keys=True))
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    return packed.getvalue()


def load_reference(path: Path) -> Reference:
    """Reads a reference.

    Raises:
        LoadError: It can not be read, or is none.
    """
    where = str(path)
    fix = "make one with: msplit bench MODEL --measure save-reference=FILE.npz"
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
        head = json.loads(str(arrays.pop(PACKED)[()]))
        if head["version"] != _VERSION:
            raise LoadError(
                f"the reference has version {head['version']}, this msplit reads {_VERSION}", where=where, fix=fix
            )
        needed = {str(name): float(value) for name, value in head.get("needed", {}).items()}
        values = {key: unpacked(array, head["packed"].get(key)) for key, array in arrays.items()}
    except OSError as error:
        raise LoadError(f"the reference can not be read: {error.strerror or error}", where=where, fix=fix) from error
    except (*DAMAGED, MemoryError) as error:  # a header may claim any size
        raise LoadError("this is not a reference file of msplit", where=where, fix=fix) from error
    groups = ("input/", "output/")
    feeds, outputs = ({key.removeprefix(of): values[key] for key in values if key.startswith(of)} for of in groups)
    return Reference(feeds, outputs, str(head["source"]), needed=needed)


def _pack(array: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Any] | None]:
    if array.dtype.kind in "OSU":
        items = [item.encode() if isinstance(item, str) else bytes(item) for item in array.reshape(-1).tolist()]
        how = {"dtype": "string", "shape": list(array.shape), "lengths": [len(item) for item in items]}
        return np.frombuffer(b"".join(items), np.uint8), how
    if array.dtype.kind == "V":
        how = {"dtype": array.dtype.name, "shape": list(array.shape)}
        return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8), how
    return array, None


def unpacked(array: NDArray[Any], how: Mapping[str, Any] | None) -> NDArray[Any]:
    """An array of a reference file, with what the file says of how it is packed."""
    if how is None:
        return array
    data = array.tobytes()
    if how["dtype"] != "string":
        return np.frombuffer(data, numpy_dtype(how["dtype"])).reshape(how["shape"])
    ends = np.cumsum([0, *how["lengths"]])
    items = [data[start:end] for start, end in itertools.pairwise(ends)]
    return np.array(items, dtype=object).reshape(how["shape"])
