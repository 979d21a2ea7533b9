"""Measures what kernels cost, one by one, and plans as a whole."""
