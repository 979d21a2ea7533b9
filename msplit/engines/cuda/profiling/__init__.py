"""Measures what kernels cost, one by one."""
