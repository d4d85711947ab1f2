"""Writes recipes and options of config groups as YAML."""
