"""The runs of a proof: the layouts that can be trained here, and each as a planned run."""
