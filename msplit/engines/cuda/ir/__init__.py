"""What a compiled model is: ops, steps, values, functions, and the table of lowerings."""
