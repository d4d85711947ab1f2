"""The config keys, the groups and the recipes that exist."""
