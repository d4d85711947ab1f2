"""Traces of single steps, module by module: one process records what it computes, and the ranks of a layout compare theirs with it."""
