"""Embedding columns: what is proved about them, and all of them as one kernel.

`static_shapes` turns the value-dependent ops that feature columns are made of into the dense patterns they encode, where the graph proves
it; `fuse_lookups` lays the lookups of all columns together into one op.
"""
