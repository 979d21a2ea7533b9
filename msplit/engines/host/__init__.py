"""The host part without TensorFlow: strings, hashes, lookup tables, parsing of examples, and the work around them, on NumPy."""
