"""What a forked process does in a copy in which an error may be planted: it proves tiny_full, or runs tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from .copies import ROOT
from .executed_lines import NOT_RUN, RUNNING, TRAINED, LineRecorder, read_lines, read_test_lines
from .forked_popen import install
from .mutated_files import FILE_LISTS

RECIPE = "tiny_full"
PATIENCE = 25.0  # seconds that a layout has beside its steps
BUSY_SECONDS = 40.0  # of processor time that a test's own process may use: longer is an endless loop
RECORD = Path("lines.txt")
MICROBATCH, RESUME = "microbatch", "resume"  # the checks beside the layouts


class Found(Exception):
    """A layout was not proved."""


def prove(layouts: Sequence[str] | None = None, record: bool = False) -> dict[str, Any]:
    """Prove the recipe in its default layouts and checks, those named in `layouts` in that order, up to the first that is not the same.

    Returns {"found": what prove says, or ""}, and {"seconds": of each layout} and, with `record`, {"lines": that each ran}.
    """
    install()
    if record:
        RECORD.unlink(missing_ok=True)
        LineRecorder(ROOT, RECORD)
    from ...cli.verbs.prove_run import RecipeForRanks
    from ...trainer.prove import run_trials
    from ...trainer.prove.fork_client import ServerGone
    from ...trainer.prove.trials.plan_proof import NothingToProve

    run_trials.PATIENCE = PATIENCE
    vars(run_trials)["locate_departure"] = lambda *_: ""  # where it departs is not asked
    recipe = RecipeForRanks(RECIPE, [f"log.dir={Path.cwd() / 'proofs'}"], None)
    try:
        proof = _plan(recipe, layouts)
    except NothingToProve as error:
        return {"found": f"refused: {error}"}
    if layouts is not None:
        proof = _with_chosen_trials(proof, layouts)
    lines, end = read_lines(RECORD) if record else (set(), 0)
    results: dict[str, Any] = {"seconds": {}, "lines": {"imported": sorted(lines)}}
    start = time.monotonic()

    def on_result(result: Any) -> None:
        nonlocal start, end
        name = result.trial.check or result.trial.layout.name
        print(f"{TRAINED} {name}", flush=True)
        results["seconds"][name] = time.monotonic() - start
        start = time.monotonic()
        if record:
            lines, end = read_lines(RECORD, end)
            results["lines"][name] = sorted(lines)
        if result.verdict != "same":
            raise Found(f"{name}: {result.verdict}: {result.reason}")

    try:
        result = run_trials.run_proof(proof, on_result, lambda _: None)
    except Found as found:
        return {"found": str(found), **results}
    except ServerGone as error:
        return {"found": str(error), **results}
    return {"found": "" if result.ok else "prove says that it is not the same", **results}


def _plan(recipe: Any, layouts: Sequence[str] | None) -> Any:
    """Plan the recipe's proof; only the layouts that are named, where all can run and no other is needed: all take seconds."""
    from ...cli.arguments.prove_arguments import read_layouts
    from ...trainer.prove.trials.layouts import ProveLayout
    from ...trainer.prove.trials.plan_proof import NothingToProve, ProveRequest, plan_proof

    if layouts is not None and RESUME not in layouts and (names := [each for each in layouts if each != MICROBATCH]):
        named = tuple(each for each in read_layouts(",".join(names)) if isinstance(each, ProveLayout))
        with suppress(NothingToProve):
            return plan_proof(ProveRequest(chosen="named", layouts=named), recipe.run(), recipe.run_on)
    return plan_proof(ProveRequest(), recipe.run(), recipe.run_on)


def _with_chosen_trials(proof: Any, layouts: Sequence[str]) -> Any:
    """The proof with only the trials and checks of these names, in that order, and the trial that saves for the resumed one."""
    named = {each.layout.name: each for each in proof.trials}
    saver = [proof.saver.layout.name] if proof.saver and RESUME in layouts else []
    order = dict.fromkeys([*(name for name in layouts if name in named), *saver])
    return replace(
        proof,
        trials=tuple(named[name] for name in order),
        control=proof.control if MICROBATCH in layouts else None,
        resume=proof.resume if RESUME in layouts else None,
    )


def run_tests(names: Sequence[str], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Run test files, or tests by their ids, but for those left out, in that order up to the first failure; {"found": its id or ""}."""
    install()
    failed: list[str] = []
    hook = import_module("pytest").hookimpl

    class FailureWatch:
        @hook(trylast=True)  # type: ignore[untyped-decorator]  # after conftest.py, which puts slow files first
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            places = {name: place for place, name in enumerate(names)}

            def place(item: Any) -> int:
                kept = (item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0])
                return next((places[name] for name in kept if name in places), len(places))

            items.sort(key=place)

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            os.write(1, f"\n{RUNNING} {nodeid}\n".encode())

        @hook(wrapper=True)  # type: ignore[untyped-decorator]
        def pytest_runtest_call(self, item: Any) -> Generator[None, object, object]:
            signal.setitimer(signal.ITIMER_VIRTUAL, BUSY_SECONDS, BUSY_SECONDS)
            try:
                return (yield)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid)

    signal.signal(signal.SIGVTALRM, _stop_test)
    status = _run_pytest(["-x", *(f"--deselect={each}" for each in left_out), *names], FailureWatch())
    return {"found": failed[0] if failed else "" if status in (0, 5) else f"{NOT_RUN} {status}"}


def _stop_test(*_: object) -> None:
    raise TimeoutError(f"the test computes for {BUSY_SECONDS:.0f} seconds")


def record_tests(file: str, files: str = "training") -> dict[str, Any]:
    """Run a test file; {"tests": {id: {"seconds": ..., "lines": {path: numbers}}}} of the tests that pass, in a list of FILE_LISTS."""
    install()
    RECORD.unlink(missing_ok=True)
    recorder, seconds = LineRecorder(ROOT, RECORD, FILE_LISTS[files]), dict[str, float]()

    class TimeWatch:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            recorder.begin_test(nodeid)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" and report.passed:
                seconds[report.nodeid] = report.duration

    record = RECORD.absolute()
    _run_pytest([file], TimeWatch())
    lines = read_test_lines(record)
    record.unlink()
    return {"tests": {name: {"seconds": seconds[name], "lines": lines.get(name, {})} for name in seconds}}


def _run_pytest(words: Sequence[str], plugin: object) -> int:
    """Run pytest in the checkout; return its exit status."""
    pytest: Any = import_module("pytest")  # of the extra `dev`, which a checkout with tests has
    os.chdir(ROOT)
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={ROOT.parent / 'pytest'}"]
    return int(pytest.main([*options, *words], plugins=[plugin]))


ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {"prove": prove, "tests": run_tests, "record_tests": record_tests}
