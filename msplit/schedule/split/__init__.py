"""One step on several GPUs: what is where, what crosses between them, how long that takes, and whether it pays."""
