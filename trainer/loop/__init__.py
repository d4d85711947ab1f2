"""The process of a rank: set-up, training loop, checkpoints and measurements."""
