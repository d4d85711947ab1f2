"""A fork server for short runs: it imports torch and DeepSpeed once and forks the ranks of each run."""
