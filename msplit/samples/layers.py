"""The few layers that the hand-written models share, as plain TensorFlow graph ops under readable names.

All of them run inside `Builder.graph`. Weights are `Const -> Identity` pairs named `<scope>/<name>` and
`<scope>/<name>/read`, the form that freezing a variable leaves behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msplit.samples.types import Input, Sample
from msplit.samples.weights import ATTRIBUTE, RELU_GAIN, Recipe, fill, kernel


class Builder:
    """Collects one frozen graph: its placeholders, weights and outputs. A batch of None leaves its size unknown.

    A subclass may make something else of weights: `make_weight`, `embedding` and `finish` are all that know what they are.
    """

    @classmethod
    def of(cls, seed: int | Builder, batch: int | None) -> Builder:
        """A builder for a seed, or the one that is given instead."""
        return seed if isinstance(seed, Builder) else cls(seed, batch)

    def __init__(self, seed: int, batch: int | None) -> None:
        from msplit.engines.tensorflow.runtime import tensorflow

        tf = tensorflow()

        self.tf = tf
        self.seed = seed
        self.batch = batch
        self.graph = tf.Graph()
        self._inputs: list[Input] = []

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
        self._inputs.append(Input(tensor.op.name, dtype, full, high))
        return tensor

    def weight(self, name: str, shape: Sequence[int], low: float, high: float) -> Any:
        """Add a weight, uniform over `low..high`, in the current scope and return the tensor that reads it."""
        return self.make_weight(name, shape, lambda key: Recipe(key, self.seed, low, high))

    def kernel(self, shape: Sequence[int], name: str = "kernel", gain: float = RELU_GAIN) -> Any:
        """Add a kernel whose last dimension is its output (see `weights.kernel`)."""
        return self.make_weight(name, shape, lambda key: kernel(key, self.seed, shape, gain))

    def make_weight(self, name: str, shape: Sequence[int], recipe: Callable[[str], Recipe]) -> Any:
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
