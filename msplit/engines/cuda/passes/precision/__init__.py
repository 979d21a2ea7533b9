"""Half precision where it gains, and rounding where results are made."""
