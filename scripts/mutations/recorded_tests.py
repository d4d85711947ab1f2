"""Which quick tests run which lines of the files to mutate: recorded for each state of a test file, and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chosen_tests import quick_files
from .copies import ROOT, Copy, run_on_copies
from .mutated_files import FILE_LISTS

RECORD_SECONDS = 600.0  # hard limit of a test file
CHOSEN_SECONDS = 60.0  # of the tests that are chosen for one error, as recorded


@dataclass(frozen=True, kw_only=True)
class RecordedTest:
    """A test that passes without an error: its id, how long it took, and the lines that it ran, by path from the checkout's root."""

    name: str
    seconds: float
    lines: Mapping[str, frozenset[int]]

    def runs(self, path: str, lines: tuple[int, int] | None) -> bool:
        """Whether it ran any line of a statement, or, of no statement, any line of the file."""
        ran = self.lines.get(path, frozenset())
        if lines is None:
            return bool(ran)
        return any(number in ran for number in range(lines[0], lines[1] + 1))


def choose_recorded(tests: Iterable[RecordedTest], path: str, lines: tuple[int, int] | None) -> list[str]:
    """The ids of the tests that run a statement, or any line of the file: the quickest case of each test function, then the next of each,
    for CHOSEN_SECONDS."""
    cases: dict[str, list[RecordedTest]] = {}
    for test in sorted((each for each in tests if each.runs(path, lines)), key=lambda each: each.seconds):
        cases.setdefault(test.name.partition("[")[0], []).append(test)
    chosen, seconds = list[str](), 0.0
    for test in _round_robin(sorted(cases.values(), key=lambda same: same[0].seconds)):
        if chosen and seconds + test.seconds > CHOSEN_SECONDS:
            continue
        chosen.append(test.name)
        seconds += test.seconds
    return chosen


def _round_robin(groups: Sequence[Sequence[RecordedTest]]) -> Iterator[RecordedTest]:
    for place in range(max(map(len, groups), default=0)):
        yield from (group[place] for group in groups if place < len(group))


def read_recorded_tests(copies: Sequence[Copy], cache: Path, state: str, show: Callable[[str], None], files: str) -> list[RecordedTest]:
    """The quick tests and their lines in a list of files; those of tests that are not in the cache are recorded now, one file a copy at a
    time.

    `state` names the state of the files to mutate. Raises RuntimeError if a file of tests does not end.
    """
    kept = {file: cache / f"{_digest(state, file)}.json" for file in quick_files(ROOT, FILE_LISTS[files].tests)}
    missing = [file for file, record in kept.items() if not record.exists()]
    if missing:
        show(f"runs {len(missing)} files of quick tests without an error, to see which lines each test runs ...")
        cache.mkdir(parents=True, exist_ok=True)

        def record(copy: Copy, file: str) -> None:
            answer = copy.ask("record_tests", seconds=RECORD_SECONDS, file=file, files=files)
            if "ended" in answer:
                raise RuntimeError(f"{file} does not end without an error: {answer['ended']}")
            kept[file].write_text(json.dumps(answer["tests"]), encoding="utf-8")

        run_on_copies(copies, missing, record)
    return [test for record in kept.values() for test in _read(json.loads(record.read_text(encoding="utf-8")))]


def _read(rows: Mapping[str, Any]) -> Iterator[RecordedTest]:
    for name, row in rows.items():
        yield RecordedTest(name=name, seconds=row["seconds"], lines={path: frozenset(numbers) for path, numbers in row["lines"].items()})


def _digest(state: str, file: str) -> str:
    return hashlib.sha256(state.encode() + file.encode() + (ROOT / file).read_bytes()).hexdigest()[:24]
