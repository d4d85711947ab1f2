"""Words of a command line of which the tests replace some."""

from __future__ import annotations


def unrepeated(*words: str) -> list[str]:
    """The words without those that a later word of the same key takes back, which the command line would say."""
    return list({word.partition("=")[0]: word for word in words}.values())
