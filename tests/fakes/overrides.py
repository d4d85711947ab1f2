"""Overrides of a command line, some of which a test replaces."""

from __future__ import annotations


def without_repeats(*words: str) -> list[str]:
    """Return the overrides without those that a later one of the same key replaces; the command line would warn of them."""
    return list({word.partition("=")[0]: word for word in words}.values())
