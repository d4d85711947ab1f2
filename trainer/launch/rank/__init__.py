"""The side of the rank itself: its environment, its log, and its channel to the process that launched it."""
