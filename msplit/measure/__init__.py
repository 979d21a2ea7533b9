"""Runs variants of one model side by side, checks that they agree, and says honestly what each gains."""
