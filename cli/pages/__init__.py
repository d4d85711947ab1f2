"""Pages of text for people."""
