"""Chooses kernels by measuring them."""
