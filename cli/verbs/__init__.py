"""The verbs of `distrain`, one file each."""
