"""The cuda engine: runs a plan on real CUDA streams and captures it as one CUDA graph. PyTorch is its kernel library."""
