"""A server that imports torch and DeepSpeed once and forks the ranks of many short runs."""
