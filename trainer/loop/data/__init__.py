"""From text and token files to batches, which depend only on the seed and the number of samples consumed."""
