"""Shapes of all tensors of a graph, without TensorFlow: `infer`."""

# These register what they know of ops.
from msplit.shapes import array, functional, linalg, nn, simple  # noqa: F401
from msplit.shapes.infer import Shapes, infer
from msplit.shapes.registry import Shape

__all__ = ["Shape", "Shapes", "infer"]
