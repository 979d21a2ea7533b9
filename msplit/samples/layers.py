"""Parts of sample models: layers, seeded weights, and the sample as a whole.

The few layers that the hand-written models share, as plain TensorFlow graph ops under readable names.

All of them run inside `ModelBuilder.graph`. Weights are `Const -> Identity` pairs named `<scope>/<name>` and
`<scope>/<name>/read`, the form that freezing a variable leaves behind.

What a sample is: a frozen graph, the tensors to feed and the tensors to fetch.

Seeded weights: written into a graph as a recipe, generated from it anywhere.

Every weight of a sample is a `Const` node that carries a recipe in its `_msplit_weights` attribute. The values are a
function of the recipe alone, so a graph can travel without its weights: `strip` drops them, `fill` brings the very same
bytes back, on any machine that has NumPy and the protobuf classes (TensorFlow itself is not needed).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msplit.engines.tensorflow.runtime import tensorflow


@dataclass(frozen=True)
class SampleInput:
    """One placeholder of a sample.

    Attributes:
        name: Name of the placeholder node (without `:0`).
        dtype: NumPy name of its type, such as `float32` or `int32`.
        shape: Its shape; None stands for the batch where the batch is not fixed.
        high: For integer inputs, values are drawn from `0 <= value < high`; the size of the table they index.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    high: int | None = None


@dataclass(frozen=True)
class Sample:
    """A model built by this package.

    Attributes:
        name: The builder's name, such as `mmoe`.
        graph_def: A frozen inference graph (`tensorflow.GraphDef`), free of control flow.
        inputs: Its placeholders, in the order a user would list them.
        outputs: Names of the nodes to fetch (port 0 of each).
    """

    name: str
    graph_def: Any
    inputs: tuple[SampleInput, ...]
    outputs: tuple[str, ...]


def make_inputs(sample: Sample, batch: int = 1, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Seeded values for every input of a sample, by placeholder name.

    Floating-point inputs are standard normal, those of rank four are images (blotches and noise); integer
    inputs are uniform over the rows of the table they index.

    Args:
        batch: Size of the batch. A sample whose batch is fixed keeps its own.
        seed: Equal seeds give equal values.

    Raises:
        ValueError: An integer input does not say how many rows its table has.
    """
    rng = np.random.default_rng(seed)
    values: dict[str, npt.NDArray[Any]] = {}
    for spec in sample.inputs:
        shape = tuple(batch if size is None else size for size in spec.shape)
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            values[spec.name] = (_images(rng, shape) if len(shape) == 4 else rng.standard_normal(shape)).astype(
                dtype, order="C"
            )
        elif spec.high is not None:
            values[spec.name] = rng.integers(0, spec.high, shape).astype(dtype)
        else:
            raise ValueError(
                f"input {spec.name!r} of sample {sample.name!r} is {dtype} but names no upper limit (high)"
            )
    return values


def _images(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return images [n, height, width, channels] that differ from each other, as white noise does not once pooled."""
    count, height, width, channels = shape
    blotches = rng.standard_normal((count, 4, 4, channels))
    stretched = blotches[:, np.arange(height) * 4 // height][:, :, np.arange(width) * 4 // width]
    return np.asarray(0.8 * stretched + 0.6 * rng.standard_normal(shape))


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
class WeightRecipe:
    """Distribution of the values of one weight: uniform over `low <= value < high`, then perhaps centred.

    Attributes:
        key: Text that the random stream depends on beside the seed; the name the node had when it was built, so that a
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
    def decode(cls, data: bytes) -> WeightRecipe:
        """Read a recipe back.

        Raises:
            ValueError: The attribute does not hold a recipe.
        """
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{ATTRIBUTE} holds no weight recipe: {data[:80]!r}") from error


def kernel(key: str, seed: int, shape: Sequence[int], gain: float = 1.0) -> WeightRecipe:
    """Return the recipe of a kernel whose last dimension is its output: variance `gain**2 / fan_in`, centred.

    A gain of 1 keeps the size of inputs of mean zero; `RELU_GAIN` that of inputs that come from a ReLU.
    """
    limit = gain * math.sqrt(3.0 / math.prod(shape[:-1]))
    return WeightRecipe(key, seed, -limit, limit, centred=True)


# A ReLU leaves (pi - 1) / (2 pi) of a normal value's variance, and centred kernels see nothing but the variance.
RELU_GAIN = math.sqrt(2 * math.pi / (math.pi - 1))


def generate(recipe: WeightRecipe, shape: Sequence[int], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Return the values of a recipe.

    Built on the raw words of a bit generator, which NumPy promises to keep the same between versions (it does not for
    its distributions), so equal recipes give equal bytes everywhere.

    Args:
        recipe: Recipe of the values.
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
    stripped = copy.deepcopy(graph_def)
    for tensor, _, shape, dtype in _generated(stripped):
        if math.prod(shape) * dtype.itemsize >= threshold:
            _clear(tensor)
    return stripped


def fill(graph_def: Any) -> Any:
    """Return a copy of `graph_def` in which every weight with a recipe has its values.

    `fill(strip(graph)) == graph` for every graph made by `build`. Needs no TensorFlow.

    Raises:
        ValueError: A recipe cannot be read, or belongs to a type that has no generator.
    """
    filled = copy.deepcopy(graph_def)
    for tensor, recipe, shape, dtype in _generated(filled):
        _clear(tensor)
        tensor.tensor_content = generate(WeightRecipe.decode(recipe), shape, dtype).tobytes()
    return filled


def _generated(graph_def: Any) -> Iterator[tuple[Any, bytes, tuple[int, ...], np.dtype[Any]]]:
    """Every weight with a recipe: its tensor, the recipe, its shape and its type."""
    for node in graph_def.node:
        if node.op == "Const" and ATTRIBUTE in node.attr:
            tensor = node.attr["value"].tensor
            if tensor.dtype not in _DTYPES:
                raise ValueError(
                    f"weight {node.name!r} has data type number {tensor.dtype}, for which there is no generator"
                )
            shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
            yield tensor, node.attr[ATTRIBUTE].s, shape, _DTYPES[tensor.dtype]


def _clear(tensor: Any) -> None:
    for field in _VALUE_FIELDS:
        tensor.ClearField(field)


class ModelBuilder:
    """Collects one frozen graph: its placeholders, weights and outputs. A batch of None leaves its size unknown.

    A subclass may make something else of weights: `make_weight`, `embedding` and `finish` are all that know what they are.
    """

    @classmethod
    def of(cls, seed: int | ModelBuilder, batch: int | None) -> ModelBuilder:
        """A builder for a seed, or the one that is given instead."""
        return seed if isinstance(seed, ModelBuilder) else cls(seed, batch)

    def __init__(self, seed: int, batch: int | None) -> None:
        self.tf = tensorflow()
        self.seed = seed
        self.batch = batch
        self.graph = self.tf.Graph()
        self._inputs: list[SampleInput] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Open a name scope below the current one."""
        with self.graph.as_default(), self.tf.name_scope(name):
            yield

    def input(self, name: str, shape: Sequence[int], dtype: str = "float32", high: int | None = None) -> Any:
        """Add a placeholder of shape `[batch, *shape]` and return it."""
        full = (self.batch, *shape)
        with self.graph.as_default():
            tensor = self.tf.compat.v1.placeholder(dtype, full, name=name)
        self._inputs.append(SampleInput(tensor.op.name, dtype, full, high))
        return tensor

    def weight(self, name: str, shape: Sequence[int], low: float, high: float) -> Any:
        """Add a weight, uniform over `low..high`, in the current scope and return the tensor that reads it."""
        return self.make_weight(name, shape, lambda key: WeightRecipe(key, self.seed, low, high))

    def kernel(self, shape: Sequence[int], name: str = "kernel", gain: float = RELU_GAIN) -> Any:
        """Add a kernel whose last dimension is its output (see `layers.kernel`)."""
        return self.make_weight(name, shape, lambda key: kernel(key, self.seed, shape, gain))

    def make_weight(self, name: str, shape: Sequence[int], recipe: Callable[[str], WeightRecipe]) -> Any:
        """Add a weight by the recipe of its full name in the current scope, and return the tensor that reads it."""
        with self.graph.as_default():
            # A splat: the values come from the recipe when the graph is finished.
            constant = self.tf.constant(0.0, self.tf.float32, tuple(shape), name=name)
            encoded = recipe(constant.op.name).encode()
            constant.op._set_attr(ATTRIBUTE, self.tf.compat.v1.AttrValue(s=encoded))
            return self.tf.identity(constant, name=f"{name}/read")

    def bias(self, size: int, name: str = "bias") -> Any:
        """Add a small bias."""
        return self.weight(name, (size,), -0.1, 0.1)

    def dense(self, x: Any, units: int, scope: str, activation: str | None = "relu") -> Any:
        """MatMul, BiasAdd and an activation (`relu`, `sigmoid`, `tanh` or None) on a `[batch, n]` tensor."""
        with self.scope(scope):
            weights = self.kernel((x.shape[-1], units), gain=RELU_GAIN if activation == "relu" else 1.0)
            y = self.tf.nn.bias_add(self.tf.matmul(x, weights, name="MatMul"), self.bias(units), name="BiasAdd")
            return self.activate(y, activation)

    def activate(self, x: Any, activation: str | None) -> Any:
        """Apply an activation by name, or none."""
        if activation is None:
            return x
        name = activation.capitalize()
        function = {"relu": self.tf.nn.relu, "sigmoid": self.tf.sigmoid, "tanh": self.tf.tanh}[activation]
        return function(x, name=name)

    def mlp(self, x: Any, units: Sequence[int], prefix: str = "dense") -> Any:
        """A chain of dense layers with ReLU, in scopes `<prefix>_0`, `<prefix>_1`, …"""
        for index, size in enumerate(units):
            x = self.dense(x, size, f"{prefix}_{index}")
        return x

    def embedding(self, ids: Any, rows: int, width: int, scope: str) -> Any:
        """Look `ids` up in a new table of `rows` by `width`: one GatherV2."""
        with self.scope(scope):
            # Variance 1, so that what follows sees inputs of the usual size.
            table = self.weight("table", (rows, width), -math.sqrt(3.0), math.sqrt(3.0))
            return self.tf.gather(table, ids, name="lookup")

    def finish(self, name: str, outputs: Sequence[Any]) -> Sample:
        """Return the sample, with all weights in place."""
        graph_def = fill(self.graph.as_graph_def())
        return Sample(name, graph_def, tuple(self._inputs), tuple(tensor.op.name for tensor in outputs))
