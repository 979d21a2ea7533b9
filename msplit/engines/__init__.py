"""Engines that run a plan: the cuda engine (ours) and the tensorflow engine (the stock runtime)."""
