"""The answer of a script to --help."""

from __future__ import annotations

import sys


def show_help(says: str | None) -> None:
    """With --help or -h on the command line, print what a script says of itself and exit."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print((says or "").strip())
        sys.exit(0)
