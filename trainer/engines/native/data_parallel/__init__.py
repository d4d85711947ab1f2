"""The data axis of engine native: weights in buckets or shards, their gradients and messages, and averages of workers."""
