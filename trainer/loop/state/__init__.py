"""The state of training: what a rank trains with, where it starts from, and what checkpoints hold of it."""
