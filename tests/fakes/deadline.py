"""How long a test waits before it fails: a test never claims that something is fast, only that it ends."""

DEADLINE = 300.0  # seconds, for what takes seconds on an idle machine
