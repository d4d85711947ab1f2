"""The controller's side: one handle a rank, what they report, which of them failed or hangs, and how the run ended."""
