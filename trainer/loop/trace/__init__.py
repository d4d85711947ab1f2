"""Traces of single steps, module by module: one process writes a reference, and the ranks of a layout compare themselves with it."""
