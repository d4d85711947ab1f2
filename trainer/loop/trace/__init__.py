"""Traces of single steps, module by module, written by one process and compared by the ranks of a layout."""
