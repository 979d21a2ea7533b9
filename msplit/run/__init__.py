"""Makes a model ready and runs it: chosen, compiled, planned, verified; what services and `bench` call."""
