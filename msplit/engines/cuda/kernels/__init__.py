"""Kernels of our own, and what launches them."""
