"""Attention as one kernel: two products with a softmax between them, however a model writes them.

`match` finds attention, `masks` says what is added to its scores, `fuse_attention` puts one op in its place.
"""
