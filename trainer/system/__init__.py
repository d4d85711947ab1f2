"""Calls to the operating system: files, signals, CPUs, child processes."""
