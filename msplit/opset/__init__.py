"""What TensorFlow's ops are: their declarations, and what msplit knows of them beyond that."""
