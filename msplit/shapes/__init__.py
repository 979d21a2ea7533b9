"""Shapes of all tensors of a graph, without TensorFlow: `infer`."""

from msplit.shapes import functional as functional  # registers the ops that run functions
from msplit.shapes.infer import Shapes, infer
from msplit.shapes.registry import Shape

__all__ = ["Shape", "Shapes", "infer"]
