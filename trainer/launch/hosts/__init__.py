"""The hosts of a run: where they are named, how they are reached, and what is written on them."""
