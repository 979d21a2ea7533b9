"""Inputs to run a model on: from files, or made up so that they fit."""
