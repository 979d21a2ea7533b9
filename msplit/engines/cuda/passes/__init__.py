"""Changes of the engine's graph: fewer and larger kernels for the same result. `pipeline` has all of them in order."""
