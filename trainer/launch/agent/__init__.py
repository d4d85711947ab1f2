"""The agent of a rank: a small process beside it that starts it, passes signals on, and ends all of it."""
