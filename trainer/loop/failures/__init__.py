"""Failures of ranks: anomalous steps, what is reported, and how all ranks end together."""
