"""TensorFlow's ops: their declarations, and what msplit knows of them beyond that."""
