"""Attention as one kernel: two products with a softmax between them, however a model writes them.

`axes` tells which axis of one value is which of another, `match` finds attention, `masks` says what is added to its scores, `rewrite`
puts one op in its place.
"""
