"""Kernels in Triton's language. They need Triton: `launch` imports them when one is to be compiled."""
