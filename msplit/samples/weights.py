"""Seeded weights: written into a graph as a recipe, generated from it anywhere.

Every weight of a sample is a `Const` node that carries a recipe in its `_msplit_weights` attribute. The values are a
function of the recipe alone, so a graph can travel without its weights: `strip` drops them, `fill` brings the very same
bytes back, on any machine that has NumPy and the protobuf classes (TensorFlow itself is not needed).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ATTRIBUTE = "_msplit_weights"

# Enum values of tensorflow.DataType, which are fixed by the protocol.
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    19: np.dtype("<f2"),
}
_VALUE_FIELDS = ("tensor_content", "half_val", "float_val", "double_val", "int_val", "int64_val")


@dataclass(frozen=True)
class Recipe:
    """How the values of one weight are made: uniform over `low <= value < high`, then perhaps centred.

    Attributes:
        key: What the random stream depends on beside the seed; the name the node had when it was built, so that a
            renamed or cloned node keeps its values.
        seed: The seed given to `build`.
        low: Lower end.
        high: Upper end.
        centred: Shift every output (last dimension) so that its weights have mean `(low + high) / 2` exactly. A deep
            chain of ReLU and kernels that are not centred drowns the input in its own mean.
    """

    key: str
    seed: int
    low: float
    high: float
    centred: bool = False

    def encode(self) -> bytes:
        """Return the recipe as the bytes of the node's attribute."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> Recipe:
        """Read a recipe back.

        Raises:
            ValueError: The attribute does not hold a recipe.
        """
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{ATTRIBUTE} holds no weight recipe: {data[:80]!r}") from error


def kernel(key: str, seed: int, shape: Sequence[int], gain: float = 1.0) -> Recipe:
    """Return the recipe of a kernel whose last dimension is its output: variance `gain**2 / fan_in`, centred.

    A gain of 1 keeps the size of inputs of mean zero; `RELU_GAIN` that of inputs that come from a ReLU.
    """
    limit = gain * math.sqrt(3.0 / math.prod(shape[:-1]))
    return Recipe(key, seed, -limit, limit, centred=True)


# A ReLU leaves (pi - 1) / (2 pi) of a normal value's variance, and centred kernels see nothing but the variance.
RELU_GAIN = math.sqrt(2 * math.pi / (math.pi - 1))


def generate(recipe: Recipe, shape: Sequence[int], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Return the values of a recipe.

    Built on the raw words of a bit generator, which NumPy promises to keep the same between versions (it does not for
    its distributions), so equal recipes give equal bytes everywhere.

    Args:
        recipe: What to make.
        shape: Shape of the result.
        dtype: A floating-point or integer type.
    """
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    digest = hashlib.sha256(f"{recipe.seed}:{recipe.key}".encode()).digest()
    words = np.random.PCG64(np.frombuffer(digest, "<u4").astype(np.uint64).tolist()).random_raw((count + 1) // 2)
    # 24 bits fit a float32 exactly. Integers up to here, so that not even a sum depends on the machine.
    numbers = words.astype("<u8").view("<u4")[:count] >> 8
    low, high = recipe.low, recipe.high
    if dtype.kind in "iu":
        integers: npt.NDArray[Any] = np.floor(low + numbers * (2.0**-24 * (high - low))).astype(dtype)
        return integers.reshape(tuple(shape))
    wide = np.dtype(np.float64 if dtype.itemsize == 8 else np.float32).type
    unit = numbers.astype(wide) * wide(2.0**-24)
    if recipe.centred:
        columns = numbers.reshape(-1, shape[-1])
        shift = 0.5 - columns.sum(axis=0, dtype=np.int64) * (2.0**-24 / len(columns))
        unit = (unit.reshape(columns.shape) + shift.astype(wide)).reshape(-1)
    return (unit * wide(high - low) + wide(low)).astype(dtype).reshape(tuple(shape))


def strip(graph_def: Any, threshold: int = 4096) -> Any:
    """Return a copy of `graph_def` in which large generated weights have lost their values.

    Such a `Const` keeps its type, shape and recipe. Weights without a recipe are left as they are: nothing could bring
    them back.

    Args:
        graph_def: A graph made by `build`.
        threshold: Weights of at least this many bytes are stripped.
    """
    stripped = type(graph_def)()
    for field, value in graph_def.ListFields():
        if field.name != "node":
            getattr(stripped, field.name).CopyFrom(value)
    for node in graph_def.node:
        tensor = node.attr["value"].tensor if _is_generated(node) else None
        if tensor is None or math.prod(_shape(tensor)) * _dtype(node.name, tensor).itemsize < threshold:
            stripped.node.add().CopyFrom(node)
            continue
        bare = stripped.node.add(name=node.name, op=node.op, device=node.device, input=node.input)
        for key, value in node.attr.items():
            if key != "value":
                bare.attr[key].CopyFrom(value)
        bare.attr["value"].tensor.dtype = tensor.dtype
        bare.attr["value"].tensor.tensor_shape.CopyFrom(tensor.tensor_shape)
        if node.HasField("experimental_debug_info"):
            bare.experimental_debug_info.CopyFrom(node.experimental_debug_info)
    return stripped


def fill(graph_def: Any) -> Any:
    """Return a copy of `graph_def` in which every weight with a recipe has its values.

    `fill(strip(graph)) == graph` for every graph made by `build`. Needs no TensorFlow.

    Raises:
        ValueError: A recipe cannot be read, or belongs to a type that has no generator.
    """
    filled = type(graph_def)()
    filled.CopyFrom(graph_def)
    for node in filled.node:
        if _is_generated(node):
            tensor = node.attr["value"].tensor
            values = generate(Recipe.decode(node.attr[ATTRIBUTE].s), _shape(tensor), _dtype(node.name, tensor))
            for field in _VALUE_FIELDS:
                tensor.ClearField(field)
            tensor.tensor_content = values.tobytes()
    return filled


def _is_generated(node: Any) -> bool:
    return node.op == "Const" and ATTRIBUTE in node.attr


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(dim.size for dim in tensor.tensor_shape.dim)


def _dtype(name: str, tensor: Any) -> np.dtype[Any]:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"weight {name!r} has data type number {tensor.dtype}, for which there is no generator")
    return _DTYPES[tensor.dtype]
