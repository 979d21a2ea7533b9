"""A pool: several steps of one model in flight over one set of weights, for requests from any number of threads."""
