"""What is decided of a model without running it: analysis, assignment, and what they were made with."""
