"""Loads a `Run` from a recipe and overrides."""
