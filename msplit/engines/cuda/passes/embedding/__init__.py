"""Embedding columns: what is proved about them, and all of them as one kernel.

`prove` turns the value-dependent ops that feature columns are made of into the dense patterns they encode, where the graph proves
it; `join` lays the lookups of all columns together into one op.
"""
