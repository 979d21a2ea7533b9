"""Shapes of all tensors of a graph, without TensorFlow: `infer`."""

# These register what they know of ops.
from msplit.shapes import array, functional, linalg, nn, simple  # noqa: F401
from msplit.shapes.infer import infer
from msplit.shapes.registry import Shape
from msplit.shapes.result import Shapes

__all__ = ["Shape", "Shapes", "infer"]
