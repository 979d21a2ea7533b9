"""Many requests at once: a pool, the server in front of it, and the benchmark of both."""
