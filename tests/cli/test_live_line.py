"""The live line of work that takes long: it goes when the work ends, also by an error."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from distrain.cli.pages.printing import live_line


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def fail_under_a_live_line(terminal: Terminal) -> None:
    with live_line("working ..."):
        assert terminal.getvalue() == "\r\x1b[Kworking ..."
        raise ValueError("no")


def test_the_live_line_goes_with_its_work_also_where_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with pytest.raises(ValueError, match="no"):
        fail_under_a_live_line(terminal)
    assert terminal.getvalue() == "\r\x1b[Kworking ...\r\x1b[K"
