"""The flat view of a model: functions inlined, loops cut, regions and placement known.

flat = flatten(model)
ids, conflicts = to_ids(flat, streams)
"""

from msplit.flatten.build import body, flatten
from msplit.flatten.flat import Conflict, FlatGraph, OriginalNode, Region, Tensor, to_ids

__all__ = ["Conflict", "FlatGraph", "OriginalNode", "Region", "Tensor", "body", "flatten", "to_ids"]
