"""Has PyTorch's compiler loaded, as msplit loads it, by its import: for processes that are forked (`tests/forked.py`)."""

from msplit.engines.cuda.passes.pointwise_fusion import fuse

fuse.load()
