"""The ranks of a run: their process groups, their parts of the model, and counts of what they send and save."""
