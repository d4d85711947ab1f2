"""Checks of the devices during a run: which is slow, which computes wrong, which copy of the weights has departed."""
