"""Random recipes in random layouts, drawn from a seed and judged by `distrain prove`'s own code."""
