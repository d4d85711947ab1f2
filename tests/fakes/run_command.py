"""The command line, run in the test's own process."""

import shlex

import pytest

from distrain.cli.app import command


def run_command(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run `distrain` with these words, split as a shell splits them. Return its exit status, stdout and stderr."""
    status = command(shlex.split(words))
    return status, *capsys.readouterr()
