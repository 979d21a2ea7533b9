"""Tensors of other libraries, as inputs and as results: whatever speaks DLPack, wherever it lies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays, Feeds, is_array, is_tensor, not_an_array, starting_pytorch
from msplit.errors import EngineError
from msplit.formats.build import LengthInputs

if TYPE_CHECKING:
    import torch

_HOST = (1, 3)
"""DLPack's names of the host's memory: kDLCPU, and kDLCUDAHost for what is pinned."""


def is_tensorflow(value: Any) -> bool:
    """Whether a value is a tensor of TensorFlow's, as it hands them to users."""
    return type(value).__module__.partition(".")[0] == "tensorflow"


def lies_on(value: Any, device: str) -> bool:
    """Whether a value is a tensor that lies on the device of an engine, "cuda" or "cpu", so that it need not go through the host.

    On the CPU, which stands in for a GPU, arrays of NumPy are the host's all the same, and so are strings.
    """
    if not is_tensor(value) or getattr(value.dtype, "name", "") == "string":
        return False
    on_host: bool = value.__dlpack_device__()[0] in _HOST
    return on_host == (device == "cpu")


def tensor(name: str, value: Any, *, settled: bool = False) -> torch.Tensor:
    """An input as a PyTorch tensor: an array's on the host, a tensor of whatever library where it lies.

    Args:
        settled: Wait for what its library, and this thread's current stream, still have to do to it: any stream may read it then.

    Raises:
        EngineError: Its library hands it to nobody.
    """
    with starting_pytorch():
        from msplit.engines.cuda.ir.dtypes import to_torch
        from msplit.engines.cuda.runtime import input_staging

    if is_array(value):
        return to_torch(value)
    return input_staging.settled(name, value) if settled else input_staging.taken(name, value)


def as_array(name: str, value: Any) -> NDArray[Any]:
    """An input's values on the host.

    Raises:
        EngineError: It is a tensor that its library hands to nobody.
    """
    if is_array(value):
        return np.asarray(value)
    if is_tensorflow(value):
        return np.asarray(value.numpy())
    if "torch" in sys.modules or value.__dlpack_device__()[0] not in _HOST:
        from msplit.engines.cuda.ir.dtypes import to_numpy

        return to_numpy(tensor(name, value))
    return np.from_dlpack(value)


def as_tensors(arrays: Arrays, device: str) -> dict[str, Any]:
    """Copies arrays to PyTorch tensors on a device, strings left as they are: what lies there a step takes without writing to `buffers`."""
    if "torch" not in sys.modules:
        return dict(arrays)
    return {
        name: value if value.dtype.kind in "OSU" else tensor(name, np.array(value)).to(device)
        for name, value in arrays.items()
    }


def pieces(rows: int, most: int) -> Iterator[tuple[int, int]]:
    """First row, and the one behind the last, of each piece of so many rows at most."""
    return ((start, min(start + most, rows)) for start in range(0, rows, most))


def pieces_of_users(index: NDArray[np.int32], most: int, users: int) -> Iterator[tuple[int, int]]:
    """First row, and the one behind the last, of each piece of so many rows at most, of so many users at most, by the user of each row."""
    start, seen = 0, set[int]()
    for row, user in enumerate(index.tolist()):
        if row - start == most or (user not in seen and len(seen) == users):
            yield start, row
            start, seen = row, set()
        seen.add(user)
    yield start, len(index)


def part(value: Any, start: int, end: int, entries: int) -> Any:
    """Rows of an array or a PyTorch tensor of which so many entries belong to a row; all of one without rows (0)."""
    return value[start * entries : end * entries] if entries else value


def joined(parts: Sequence[Mapping[str, Any]], made: Mapping[str, int], rows: int) -> dict[str, Any]:
    """Joins the outputs of several steps to those of so many rows; `made` has the entries per row. One without rows is equal in all."""

    def whole(name: str, first: Any) -> Any:
        entries, values = made.get(name, 0), [one[name] for one in parts]
        if not entries:
            return first
        if len(values) == 1:
            return first[: rows * entries]
        if is_array(first):
            return np.concatenate(values)
        import torch

        place = first.device  # several GPUs may have run parts
        found = torch.cat([value.to(place) for value in values])
        if place.type == "cuda":  # whatever stream reads it
            torch.cuda.current_stream(place).synchronize()
        return found

    return {name: whole(name, first) for name, first in parts[0].items()}


def length_of(feeds: Feeds, about: LengthInputs, most: int) -> int:
    """Length of the rows of a request or a step, all of which have the same.

    Raises:
        EngineError: They are longer than `most` or empty, or inputs have different lengths.
    """
    known = f"all of {', '.join(about.inputs)} have rows of one length, of 1 to {most}"
    sizes = {name: tuple(getattr(feeds.get(name), "shape", ())) for name in about.inputs}
    if about.name in feeds or len({size[1:2] for size in sizes.values()}) > 1 or len(sizes[about.inputs[0]]) < 2:
        given = ", ".join(f"{name} {list(size)}" for name, size in sizes.items())
        raise EngineError(f"inputs are not the model's, or have no rows of one length: {given}", fix=known)
    length: int = sizes[about.inputs[0]][1]
    if not 0 < length <= most:
        cut = "cut them, or prepare that length, too: lengths (build: --lengths, serve: --pool lengths=)"
        raise EngineError(
            f"rows are {length} long, and lengths up to {most} were prepared", fix=cut if length else known
        )
    return length


def to_length(feeds: Feeds, about: LengthInputs, length: int) -> dict[str, Any]:
    """Inputs with their rows filled up to a length, with copies of the first position, which is legal wherever it stands."""
    found = dict(feeds)
    for name in about.inputs:
        value = as_array(name, found[name]) if is_tensor(found[name]) else found[name]
        if not is_array(value):
            raise not_an_array(name, value)
        missing = length - value.shape[1]
        found[name] = np.concatenate([value, np.repeat(value[:, :1], missing, 1)], 1) if missing else value
    return found


def cut_to_length(outputs: Mapping[str, Any], about: LengthInputs, length: int) -> dict[str, Any]:
    """Outputs, arrays or PyTorch tensors, without what lies beyond a length."""
    found = dict(outputs)
    for name, axes in about.outputs.items():
        if any(found[name].shape[axis] > length for axis in axes):
            ends = [slice(length if axis in axes else None) for axis in range(found[name].ndim)]
            found[name] = found[name][tuple(ends)]
    return found


def made_like(value: Any) -> Callable[[Any], Any]:
    """What makes a PyTorch tensor one of the library of another tensor, in the same memory. PyTorch's own it stays where that library has
    no way that all of them share."""
    if is_tensorflow(value):
        return _as_tensorflow
    space = getattr(value, "__array_namespace__", None)
    if space is None:
        return lambda tensor: tensor
    return lambda tensor: space().from_dlpack(tensor)


def _as_tensorflow(tensor: Any) -> Any:
    from msplit.engines.tensorflow.runtime import tensorflow

    return tensorflow().experimental.dlpack.from_dlpack(tensor.__dlpack__())
