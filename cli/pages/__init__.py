"""The pages that verbs print, as text for people."""
