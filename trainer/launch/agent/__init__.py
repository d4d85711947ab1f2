"""The agent: a small process beside a rank that starts it, forwards signals to it, and ends all of its processes."""
