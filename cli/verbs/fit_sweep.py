"""`distrain fit -m`: check all runs of a sweep, train them one after the other, and print a table of their results."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from shlex import quote

from ...trainer.launch.admission import check_start
from ...trainer.launch.file_checks import FileChecks
from ...trainer.launch.rank.channel import STOPPED
from ...trainer.launch.train_run import TrainingResult
from ...trainer.machine import measure_machine as machine
from ...trainer.plan.plan import make_plan
from ...trainer.rundir.absolute_paths import relative_folder
from ...trainer.rundir.files import run_folder
from ...trainer.rundir.measured_run import read_measured_run
from ...trainer.spec.changed_run import with_changes
from ...trainer.spec.numbers.as_text import count_text, plural
from ...trainer.spec.problem import Problem, Unreadable, one_line
from ...trainer.spec.run import Run
from ..arguments.command_name import command_name
from ..config.load import load_recipe, load_sweep
from ..keys.keys import config_keys
from ..pages.compare_page import lowest_loss
from ..pages.printing import print_error, print_line
from ..pages.text_layout import page_width, table
from .exit_status import FAILED, OK
from .fit_run import fit_run

PLAIN_VALUE = re.compile(r"[A-Za-z0-9._-]+")  # values that a folder's name shows unchanged; all of these are shell-safe
LONGEST_NAME = 150  # characters of a run's name
DIGEST_DIGITS = 8  # hexadecimal digits that distinguish values which look alike in a folder's name
UNNAMED = ("conf", "name")  # keys whose swept values are in the runs' own names already

WANDB_GROUP = "WANDB_RUN_GROUP"  # the variable of wandb's group, in which the runs of a sweep are shown together
RESULTS = {OK: "trained", FAILED: "failed", STOPPED: "stopped and saved"}  # by exit status; 130 and the like are "stopped"


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep, under its own name; `group` is the recipe's, `swept` are the overrides that vary, `arguments` all of them, the
    recipe first."""

    group: str
    swept: tuple[str, ...]
    arguments: tuple[str, ...]
    run: Run


def fit_sweep(
    conf: str, overrides: Sequence[str], config_dir: Path | None, fit: Callable[[Callable[[], Run]], TrainingResult] = fit_run
) -> int:
    """Train every run of a sweep with `fit`; return 0 where all trained, 1 where one failed or can't run, else the status of a stopped one.

    Raises Unreadable with all that is wrong with the command line.
    """
    runs, problems = _checked_runs(conf, overrides, config_dir)
    if not problems and not machine.is_measured(_kind(runs)):  # what can't run at all is refused before this machine is measured
        unmeasured = machine.measure_once(lambda: _kind(sweep_runs(conf, overrides, config_dir)), print_line)
        if unmeasured:
            print_error(f"distrain: {one_line(str(unmeasured))}")
        runs, problems = _checked_runs(conf, overrides, config_dir)
    for problem in dict.fromkeys(problems):
        print_error(f"distrain: {one_line(problem)}")
    if problems:
        return FAILED
    statuses: list[int] = []
    stopped = OK
    for number, each in enumerate(runs, 1):
        print_line(f"\nrun {number} of {len(runs)}: {short_overrides(each.swept) or each.run.name}")
        with _wandb_group(each.group):
            result = _result(partial(fit, partial(_reread_run, each, config_dir)))
        statuses.append(result.status)
        if result.status not in (OK, FAILED):
            stopped = result.status
            break
        if result.stop_signals:  # it came to its end all the same; the sweep stops here
            stopped = 128 + result.stop_signals[-1]
            break
    print_line("\n" + "\n".join(result_lines(runs, statuses)))
    return stopped or max(statuses, default=OK)


def _kind(runs: Sequence[SweepRun]) -> str:
    """The kind of device of which most must be known: a CPU where a run is on one."""
    return "cpu" if any(each.run.cluster.device.kind == "cpu" for each in runs) else "cuda"


def sweep_runs(conf: str, overrides: Sequence[str], config_dir: Path | None) -> list[SweepRun]:
    """Return the runs of a sweep under their own names; raises Unreadable, also where two would share a folder."""
    runs = [
        SweepRun(
            group=each.run.name,
            swept=each.swept,
            arguments=each.arguments,
            run=with_changes(each.run, [("name", sweep_name(each.run.name, each.swept))]),
        )
        for each in load_sweep(conf, overrides, config_dir)
    ]
    folders = Counter(run_folder(each.run) for each in runs)
    shared = [folder for folder, number in folders.items() if number > 1]
    if shared:
        says = f"{plural(folders[shared[0]], 'run')} of the sweep would share {shared[0]}"
        raise Unreadable([Problem(rule="sweep", says=says, mend="remove what is listed twice, or give the recipes other names")])
    return runs


def sweep_name(name: str, swept: Sequence[str]) -> str:
    """Return the name of a sweep's run: mine.lr=1e-3.tp=2. Equal overrides give equal names, different ones different names.

    A key is named by its last part where no other key has that. A value with special characters, or a name that is too long,
    gets the first digits of its SHA-256.
    """
    parts = [_name_part(override) for override in swept if override.partition("=")[0] not in UNNAMED]
    whole = ".".join((name, *parts))
    if len(".".join(parts)) <= LONGEST_NAME:
        return whole
    return f"{name}.{'.'.join(parts)[: LONGEST_NAME - DIGEST_DIGITS]}-{_digest(whole)}"


def short_overrides(swept: Sequence[str]) -> str:
    """Return the overrides with the last parts of their keys: lr=1e-3 tp=2."""
    return " ".join(f"{_short_key(key)}={value}" for key, _, value in (override.partition("=") for override in swept))


def result_lines(runs: Sequence[SweepRun], statuses: Sequence[int]) -> list[str]:
    """Return a row per run: its overrides, its last losses, its speed, its result; then the command to try next."""
    cells = [["loss", "validation", "tokens/s", "status"]]
    cells += [_result_cells(each.run, status) for each, status in zip(runs, statuses, strict=False)]
    cells += [["-", "-", "-", "not started"] for _ in runs[len(statuses) :]]
    names = ["run", *(one_line(short_overrides(each.swept) or each.run.name) for each in runs)]
    numbers = table(cells, left=(3,))
    wide = min(max(map(len, names)), page_width() - 2 - max(map(len, numbers)))
    lines = []
    for name, line in zip(names, numbers, strict=True):
        lines += [name] if len(name) > wide else []
        lines.append(f"{(name if len(name) <= wide else '').ljust(wide)}  {line}")
    trained = [relative_folder(run_folder(each.run)) for each, status in zip(runs, statuses, strict=False) if status == OK]
    lines += lowest_loss_lines(runs, statuses)
    return [*lines, *(["", "Next:", f"  {command_name()} report {' '.join(map(quote, trained))}"] if len(trained) > 1 else [])]


def lowest_loss_lines(runs: Sequence[SweepRun], statuses: Sequence[int]) -> list[str]:
    """Return which of the runs that trained has the lowest loss, as `report` compares them; no line where none has."""
    trained = [each for each, status in zip(runs, statuses, strict=False) if status == OK]
    measured = {short_overrides(each.swept) or each.run.name: read_measured_run(run_folder(each.run)) for each in trained}
    found = lowest_loss({name: each for name, each in measured.items() if each.losses})
    return [f"lowest {found.words} at step {found.step:,}: {one_line(found.run)}"] if found else []


@contextmanager
def _wandb_group(name: str) -> Iterator[None]:
    """Name wandb's group for the runs that are started inside, unless the user has."""
    if WANDB_GROUP in os.environ:
        yield
        return
    os.environ[WANDB_GROUP] = name
    try:
        yield
    finally:
        os.environ.pop(WANDB_GROUP, None)


def _checked_runs(conf: str, overrides: Sequence[str], config_dir: Path | None) -> tuple[list[SweepRun], list[str]]:
    """Return the runs of a sweep, and why any of them can't be started, each with its overrides."""
    runs = sweep_runs(conf, overrides, config_dir)
    checks = FileChecks()
    found = [
        (each, problem)
        for each in runs
        for problem in (*check_start(each.run, make_plan(each.run)).problems, *checks.check_run(each.run).problems)
    ]
    return runs, [f"{short_overrides(each.swept)}: {problem}" if each.swept else str(problem) for each, problem in found]


def _reread_run(each: SweepRun, config_dir: Path | None) -> Run:
    """Read the run again, now that this machine has been measured."""
    recipe, *overrides = each.arguments
    return with_changes(load_recipe(recipe.removeprefix("conf="), overrides, config_dir), [("name", each.run.name)])


def _result(fit: Callable[[], TrainingResult]) -> TrainingResult:
    """Return the result of one run, also where an exception ended it."""
    try:
        return fit()
    except KeyboardInterrupt:
        return TrainingResult(status=128 + signal.SIGINT)
    except Unreadable as wrong:
        for problem in wrong.problems:
            print_error(f"distrain: {one_line(str(problem))}")
        return TrainingResult(status=FAILED)


def _result_cells(run: Run, status: int) -> list[str]:
    found = read_measured_run(run_folder(run))
    losses = [f"{curve[-1][1]:.4f}" if curve else "-" for curve in (found.losses, found.validation)]
    speed = next((each.measured for each in found.speed if each.name == "tokens/s"), None)
    return [*losses, count_text(speed) if speed is not None else "-", RESULTS.get(status, "stopped")]


def _name_part(override: str) -> str:
    key, _, value = override.partition("=")
    plain_key = re.sub(r"[^A-Za-z0-9._-]", "_", _short_key(key))
    if PLAIN_VALUE.fullmatch(value):
        return f"{plain_key}={value}"
    return f"{plain_key}={re.sub(r'[^A-Za-z0-9._-]+', '_', value)[:40].strip('_')}-{_digest(override)}"


def _short_key(key: str) -> str:
    """The last part of a key where no other key of as few parts ends so, else the key."""
    bare = key.lstrip("+")
    last, parts = bare.rpartition(".")[2], bare.count(".")
    same = [each for each in config_keys() if each.rpartition(".")[2] == last and each.count(".") <= parts]
    return last if same == [bare] else bare


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogateescape")).hexdigest()[:DIGEST_DIGITS]
