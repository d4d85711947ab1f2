"""Text and token files become batches that depend on the seed and the samples consumed, and on nothing else."""
