"""Groups of pointwise ops as one kernel each."""
