"""Overrides of a command line, of which a test replaces some."""

from __future__ import annotations


def without_repeats(*words: str) -> list[str]:
    """The overrides without those that a later one of the same key replaces, for which the command line prints a warning."""
    return list({word.partition("=")[0]: word for word in words}.values())
