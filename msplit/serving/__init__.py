"""Many requests at once: a pool of arenas, the server in front of it, and the benchmark of both."""
