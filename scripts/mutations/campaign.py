"""Tries mutations one after another in a copy of the checkout: `prove` first, then the tests that touch them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from .chosen_tests import named_quick_files, slow_tests
from .copies import ROOT, Copy
from .equivalents import Equivalents
from .executed_lines import NOT_RUN, RUNNING, TOO_LONG, TRAINED, is_reached
from .mutated_files import TRAINING, FileList, files_to_mutate
from .recorded_tests import RecordedTest, choose_recorded
from .sites import Mutation, mutated_source

PROVE_SECONDS, TEST_SECONDS, SLOW_SECONDS, ONE_TEST_SECONDS = 900.0, 300.0, 360.0, 150.0  # hard limits of a mutation
IMPORTED = "imported"  # the lines that a proof runs before its first layout

Verdict = Literal["prove", "tests", "equivalent", "survived"]


@dataclass(frozen=True, kw_only=True)
class TriedMutation:
    """A mutation, what found it, and how long that took."""

    mutation: Mutation
    verdict: Verdict
    says: str  # the layout or the test that found it, or why it counts as equivalent
    seconds: float
    prove_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ExecutedLines:
    """What runs in the proof of the unchanged recipe: the seconds and the lines of each layout, one process (dp1) first."""

    seconds: Mapping[str, float]
    lines: Mapping[str, frozenset[tuple[str, int]]]

    def layouts(self, mutation: Mutation) -> list[str]:
        """The layouts whose proof an error can change, those that show most in least time first; none: the proof can't find it."""
        names = [name for name in self.seconds if name != "dp1"]
        if mutation.is_of_import or is_reached(mutation.path, mutation.lines, self.lines[IMPORTED]):
            return sorted(names, key=self.seconds.__getitem__)
        reached = {name for name in self.seconds if is_reached(mutation.path, mutation.lines, self.lines[name])}
        if "dp1" in reached:  # the layouts without the error depart from one process with it
            return sorted(names, key=lambda name: (name in reached, self.seconds[name]))
        return sorted(reached, key=self.seconds.__getitem__)


def read_executed_lines(copy: Copy, show: Callable[[str], None]) -> ExecutedLines:
    """Prove the recipe without an error, once for each state of the checkout; raises RuntimeError if it is not the same."""
    file = _cache_file()
    if not file.exists():
        show("proves tiny_full without an error, to see which lines each layout runs ...")
        answer = copy.ask("prove", seconds=3600.0, record=True)
        if found := _error_found(answer):
            raise RuntimeError(f"tiny_full is not proved without an error: {found}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(answer), encoding="utf-8")
    answer = json.loads(file.read_text(encoding="utf-8"))
    lines = {name: frozenset((path, number) for path, number in rows) for name, rows in answer["lines"].items()}
    return ExecutedLines(seconds=answer["seconds"], lines=lines)


def _cache_file() -> Path:
    """Where what the proof runs is kept: a file for each state of the files to mutate, the recipe and the prover."""
    prover = (ROOT / "recipes" / "tiny_full.yaml", *sorted((ROOT / "trainer" / "prove").glob("*.py")))
    return cache_folder() / f"{state_digest(prover)}.json"


def cache_folder() -> Path:
    """Where what was recorded is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distrain" / "mutations"


def state_digest(further: Iterable[Path] = (), files: FileList = TRAINING) -> str:
    """A name for the state of the files to mutate, and of further ones."""
    digest = hashlib.sha256()
    for path in (*files_to_mutate(ROOT, files), *further):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class MutationCampaign:
    """Tries mutations in one copy."""

    def __init__(
        self,
        copy: Copy,
        executed: ExecutedLines | None,
        tests: Sequence[RecordedTest],
        equivalents: Equivalents,
        files: FileList = TRAINING,
    ) -> None:
        """`executed`: what the proof runs; None of files that are not proved."""
        self.copy, self.executed, self.tests, self.equivalents, self.files = copy, executed, tests, equivalents, files
        self._sound: dict[str, bool] = {}  # whether a layout or a test passes without an error, by its name

    def try_mutation(self, mutation: Mutation) -> TriedMutation:
        """Plant an error and return what finds it; the copy is as before afterwards."""
        start = monotonic()
        if reason := self.equivalents.reason(mutation):
            return TriedMutation(mutation=mutation, verdict="equivalent", says=reason, seconds=0.0)
        self._plant(mutation)
        try:
            found = self._prove(mutation)
            proved = monotonic() - start
            verdict: Verdict = "prove" if found else "survived"
            if not found and (found := self._test(mutation)):
                verdict = "tests"
        finally:
            self.copy.restore(mutation.path)
        return TriedMutation(mutation=mutation, verdict=verdict, says=found, seconds=monotonic() - start, prove_seconds=proved)

    def _prove(self, mutation: Mutation) -> str:
        """The layout in which prove finds an error, and how; "" if in none, or if not all are trained in PROVE_SECONDS."""
        layouts = self.executed.layouts(mutation) if self.executed else []
        answer = self.copy.ask("prove", seconds=PROVE_SECONDS, layouts=layouts) if layouts else {"found": ""}
        if "ended" in answer and not self._is_sound(mutation, layouts[0], "prove", layouts=layouts[:1]):
            raise RuntimeError(f"{layouts[0]} is not proved without an error either: {answer['ended']}: {' '.join(answer['tail'][-2:])}")
        is_slow = answer.get("ended") == TOO_LONG and any(line.startswith(TRAINED) for line in answer["tail"])
        return "" if is_slow else _error_found(answer)

    def _test(self, mutation: Mutation) -> str:
        """The first test that fails or does not end with the error, and passes without; "" if none does in the time for tests.

        First the quick tests that run the statement (one that runs at import: any line of its module), or where none does those named
        for its module, which may start a program that runs it; then the slow ones of its rooms.
        """
        recorded = choose_recorded(self.tests, mutation.path, None if mutation.is_of_import else mutation.lines)
        quick = recorded or named_quick_files(self.copy.root, mutation.path, self.files.tests)
        slow = slow_tests(self.copy.root, mutation.path, self.files.tests)
        for names, seconds in ((quick, TEST_SECONDS), (slow, SLOW_SECONDS)):
            if names and (found := self._failing_test(mutation, names, seconds)):
                return found
        return ""

    def _failing_test(self, mutation: Mutation, names: Sequence[str], seconds: float) -> str:
        """The first of these tests that fails with the error and passes without it; those that fail without it too are left out."""
        left_out = [name for name, is_sound in self._sound.items() if not is_sound and "::" in name]
        answer = self.copy.ask("tests", seconds=seconds, names=names, left_out=left_out)
        if "ended" not in answer:
            found = str(answer["found"])
            if found.startswith(NOT_RUN) and not self._is_sound(mutation, found, "tests", names=names[:1]):
                raise RuntimeError(f"tests can't run in {self.copy.root}, without an error either: {found}")
            if not found or self._is_sound(mutation, found, "tests", names=[found]):
                return found
            return self._failing_test(mutation, names, seconds) if "::" in found and found not in left_out else ""
        test = next((line.removeprefix(RUNNING).strip() for line in reversed(answer["tail"]) if line.startswith(RUNNING)), "")
        if not test or (answer["ended"] == TOO_LONG and not self._ends_too_late(test)):
            return ""
        return f"{test}: {answer['ended']}" if self._is_sound(mutation, test, "tests", names=[test]) else ""

    def _ends_too_late(self, test: str) -> bool:
        """Whether a test alone does not end in the time of a long one."""
        return "ended" in self.copy.ask("tests", seconds=ONE_TEST_SECONDS, names=[test])

    def _is_sound(self, mutation: Mutation, name: str, action: str, **arguments: Any) -> bool:
        """Whether a layout or a test passes without the error; the error is planted again afterwards."""
        if name not in self._sound:
            self.copy.restore(mutation.path)
            self._sound[name] = not _error_found(self.copy.ask(action, seconds=TEST_SECONDS, **arguments))
            self._plant(mutation)
        return self._sound[name]

    def _plant(self, mutation: Mutation) -> None:
        self.copy.plant(mutation.path, mutated_source(self.copy.root, mutation, self.files))


def _error_found(answer: Mapping[str, Any]) -> str:
    return str(answer["ended"]) if "ended" in answer else str(answer["found"])


def counts(tried: Iterable[TriedMutation], kind: str) -> dict[str, int]:
    """How many mutations of a kind were drawn, and how many had each verdict."""
    rows = [each for each in tried if kind in ("all", each.mutation.kind)]
    verdicts = ("prove", "tests", "equivalent", "survived")
    return {"drawn": len(rows), **{verdict: sum(each.verdict == verdict for each in rows) for verdict in verdicts}}
