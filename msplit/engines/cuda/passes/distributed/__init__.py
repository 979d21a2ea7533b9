"""A step over several GPUs or processes: copies, and what they exchange."""
