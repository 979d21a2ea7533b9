"""Updates of many variables, or of rows of many tables, as one op."""
