"""What there is once per GPU: streams, and memory for what is only timed."""
