"""A rank as its process sees itself: its environment, its log, its channel to whoever started it."""
