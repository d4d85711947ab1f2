"""Bring the output that README and docs show of `distrain plan`, `search` and `simulate` up to date.

    python -m distrain.scripts.shown_output

A block of text that begins with `$ distrain plan ...`, or `search` or `simulate` in its place, holds commands, each before what it prints:
its errors where it is refused or its page goes to a file, else its page. A line `...` stands for lines that are left out: the lines before
it are the first of the output, those after it the last. Blocks of a reader's own recipe, conf=mine.yaml, stay as they are.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .show_help import show_help

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(?<=^```\n)\$ distrain (?:plan|search|simulate) (?!conf=mine\.yaml).*?(?=^```$)", re.DOTALL | re.MULTILINE)
COMMAND, LEFT_OUT = "$ distrain ", "..."


def main() -> None:
    """Rewrite the pages whose output is another today, and name them."""
    for page in PAGES:
        shown = page.read_text(encoding="utf-8")
        if (today := page_of_today(shown)) != shown:
            page.write_text(today, encoding="utf-8")
            print(page.relative_to(ROOT))


def page_of_today(page: str) -> str:
    """Return the text of a page with today's output."""
    return BLOCK.sub(lambda block: "".join(f"{line}\n" for line in _block_of_today(block[0].splitlines())), page)


def _block_of_today(lines: Sequence[str]) -> Iterator[str]:
    starts = [at for at, line in enumerate(lines) if line.startswith(COMMAND)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start]
        yield from shorten(_output(lines[start].removeprefix(COMMAND)), lines[start + 1 : end])


def shorten(output: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Return the lines of an output that are shown, where lines that were shown before say how many that is."""
    if LEFT_OUT not in shown:
        return list(output)
    before = shown.index(LEFT_OUT)
    after = len(shown) - before - 1
    return [*output[:before], LEFT_OUT, *(output[-after:] if after else ())]


def _output(command: str) -> list[str]:
    """Return the lines that a command prints: its errors where it is refused or its page goes to a file, else its page."""
    words, _, file = command.partition(" > ")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))  # commands to type name the script
    done = subprocess.run(
        ["distrain", *shlex.split(words)], capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )  # fmt: skip
    return (done.stderr if file or done.returncode == 2 else done.stdout).splitlines()


if __name__ == "__main__":
    show_help(__doc__)
    main()
