"""Costs of nodes: shapes, FLOPs, bytes and times on a GPU's data sheet.

shapes = infer(flat, batch=128)
costs = estimate(flat, shapes, "h200")
"""

from msplit.cost.costs import Costs
from msplit.cost.estimate import estimate
from msplit.cost.gpus import DEFAULT_GPU, Gpu, data_sheet, gpu_names
from msplit.shapes import Shapes, infer

__all__ = ["DEFAULT_GPU", "Costs", "Gpu", "Shapes", "data_sheet", "estimate", "gpu_names", "infer"]
