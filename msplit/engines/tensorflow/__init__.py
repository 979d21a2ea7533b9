"""The `tensorflow` engine: the stock runtime, one logical device per stream."""
