"""Parts of a compiled model: ops, steps, values, functions, and the table of lowerings."""
