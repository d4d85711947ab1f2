"""The folder of a run: its files, lock, checkpoints and measurements, read without torch."""
