"""Layers that a group of ranks can share: linear layers, attention, cross entropy, experts, random numbers."""
