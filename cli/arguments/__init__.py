"""Reads the arguments of a command line."""
