"""Shapes of all tensors of a graph, without TensorFlow: `infer`."""

from msplit.cost.shapes import functional as functional  # registers the ops that run functions
from msplit.cost.shapes.infer import Shapes, infer
from msplit.cost.shapes.registry import Shape

__all__ = ["Shape", "Shapes", "infer"]
