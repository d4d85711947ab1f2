"""One step of training: how far the run has come, what the model reads, its results, and the evaluation."""
