"""Shapes of all tensors of a graph, without TensorFlow: `infer`."""

# These register what they know of ops.
from msplit.shapes import array, elementwise, functional, gather, linalg, nn, simple, state  # noqa: F401
from msplit.shapes.infer import Shapes, infer
from msplit.shapes.registry import Shape

__all__ = ["Shape", "Shapes", "infer"]
