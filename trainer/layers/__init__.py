"""Layers that a group of ranks can share: split linear layers, attention, cross entropy, experts, keyed randomness."""
