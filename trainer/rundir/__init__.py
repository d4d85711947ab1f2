"""A run's folder as it lies on the disk, read and judged without torch."""
