"""Every script answers --help with what it says of itself, and does nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distrain.scripts.show_help import show_help
from distrain.tests.fakes.deadline import DEADLINE

ROOT = Path(__file__).parents[2]
PROCESSES = {"staged_ranks.py", "warm_process.py", "optimizer_step.py", "host_step.py", "trace_process.py"}  # that a script starts
PROGRAMS = [
    each for each in sorted((ROOT / "scripts").rglob("*.py")) if '__name__ == "__main__"' in each.read_text() and each.name not in PROCESSES
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.relative_to(ROOT / "scripts")))
def test_a_script_looks_for_help_before_it_begins(program: Path) -> None:
    text = program.read_text()
    start = text[text.index('if __name__ == "__main__"') :].splitlines()[1].strip()
    assert start == "show_help(__doc__)" or "argparse" in text


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_is_the_docstring(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["script", word])
    with pytest.raises(SystemExit, match="0"):
        show_help("Measures a thing.\n")
    assert capsys.readouterr().out == "Measures a thing.\n"
    monkeypatch.setattr(sys, "argv", ["script", "seed=1"])
    show_help("Measures a thing.\n")


def test_a_campaign_of_faults_asked_for_help_breaks_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distrain.scripts.faults", "--help"], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert done.stdout.startswith("Injects faults into real runs")
