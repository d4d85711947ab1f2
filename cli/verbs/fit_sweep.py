"""`distrain fit -m`: the runs of a sweep, all checked before the first starts, trained one after the other, and told in a table."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from shlex import quote

import typer

from ...trainer.launch.admission import FileChecks
from ...trainer.launch.rank.channel import STOPPED
from ...trainer.machine import facts as machine
from ...trainer.plan.changed_run import changed
from ...trainer.plan.plan import make_plan
from ...trainer.rundir.measured import ran
from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.spec.run import Run
from ..config.keys import keys
from ..config.load import load, sweep
from ..pages.console import show, tell
from ..pages.format import count, many, one_line, table, width
from .fit import fit_run, folder_of, from_here, refused, typed

PLAIN = re.compile(r"[A-Za-z0-9._-]+")  # a value that stands in a folder's name as it is; what crosses to hosts is of these too
LONGEST = 150  # characters of a folder's name
MARK = 8  # hexadecimal digits that tell values apart which look alike in a folder's name
UNNAMED = ("conf", "name")  # what sweeps the runs' own names

TRAINED, FAILED = 0, 1
TOLD = {TRAINED: "trained", FAILED: "failed", STOPPED: "stopped and saved"}  # by exit status; 130 and the like are "stopped"


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep: the words that sweep, all words that give it (its recipe first), and the run under its own name."""

    words: tuple[str, ...]
    texts: tuple[str, ...]
    run: Run


def fit_sweep(
    conf: str, overrides: Sequence[str], config_dir: Path | None, fit: Callable[[Callable[[], Run], list[int]], int] = fit_run
) -> int:
    """Train every run of a sweep with `fit`; 0 where all did, 1 where one failed or can't run, else the status of one that was stopped.

    Raises Unreadable with all that is wrong with the words.
    """
    runs, problems = _checked(conf, overrides, config_dir)
    if not problems and not machine.known():  # what can't run at all is refused before this machine is measured
        unmeasured = machine.measure(show)
        if unmeasured:
            tell(f"distrain: {one_line(str(unmeasured))}")
        runs, problems = _checked(conf, overrides, config_dir)
    for problem in dict.fromkeys(problems):
        tell(f"distrain: {one_line(problem)}")
    if problems:
        return FAILED
    statuses: list[int] = []
    for number, each in enumerate(runs, 1):
        show(f"\nrun {number} of {len(runs)}: {short_words(each.words) or each.run.name}")
        stops: list[int] = []
        statuses.append(_status(partial(fit, partial(_read, each, config_dir), stops)))
        if stops and statuses[-1] in (TRAINED, FAILED):
            stopped = 128 + stops[-1]  # it came to its end all the same; the sweep stops there
            break
        if statuses[-1] not in (TRAINED, FAILED):
            stopped = statuses[-1]
            break
    else:
        stopped = TRAINED
    show("\n" + "\n".join(result_lines(runs, statuses)))
    return stopped or max(statuses, default=TRAINED)


def sweep_runs(conf: str, overrides: Sequence[str], config_dir: Path | None) -> list[SweepRun]:
    """The runs of a sweep under their own names; raises Unreadable, also where two would share a folder."""
    runs = [
        SweepRun(words=each.words, texts=each.texts, run=changed(each.run, [("name", sweep_name(each.run.name, each.words))]))
        for each in sweep(conf, overrides, config_dir)
    ]
    folders = Counter(folder_of(each.run) for each in runs)
    shared = [folder for folder, number in folders.items() if number > 1]
    if shared:
        says = f"{many(folders[shared[0]], 'run')} of the sweep would share {shared[0]}"
        raise Unreadable([Problem(rule="sweep", says=says, mend="leave out what is listed twice, or give the recipes other names")])
    return runs


def sweep_name(name: str, words: Sequence[str]) -> str:
    """The name of a sweep's run: mine.lr=1e-3.tp=2. The same words give the same name, and other words another.

    A key is named by its last part where no other key has that. A value of other than plain characters, or a name that is too
    long, is told apart by the start of its SHA-256.
    """
    parts = [_part(word) for word in words if word.partition("=")[0] not in UNNAMED]
    whole = ".".join((name, *parts))
    if len(".".join(parts)) <= LONGEST:
        return whole
    return f"{name}.{'.'.join(parts)[: LONGEST - MARK]}-{_mark(whole)}"


def short_words(words: Sequence[str]) -> str:
    """Words that sweep, by their keys' last parts: lr=1e-3 tp=2."""
    return " ".join(f"{_short(key)}={value}" for key, _, value in (word.partition("=") for word in words))


def result_lines(runs: Sequence[SweepRun], statuses: Sequence[int]) -> list[str]:
    """A row a run: its words, its last losses, its speed, how it ended; then what to look at next."""
    cells = [["loss", "validation", "tokens/s", "status"]]
    cells += [_figures(each.run, status) for each, status in zip(runs, statuses, strict=False)]
    cells += [["-", "-", "-", "not started"] for _ in runs[len(statuses) :]]
    names = ["run", *(one_line(short_words(each.words) or each.run.name) for each in runs)]
    numbers = table(cells, left=(3,))
    wide = min(max(map(len, names)), width() - 2 - max(map(len, numbers)))
    lines = []
    for name, line in zip(names, numbers, strict=True):
        lines += [name] if len(name) > wide else []
        lines.append(f"{(name if len(name) <= wide else '').ljust(wide)}  {line}")
    trained = [from_here(folder_of(each.run)) for each, status in zip(runs, statuses, strict=False) if status == TRAINED]
    return [*lines, *(["", "Next:", f"  {typed()} report {' '.join(map(quote, trained))}"] if len(trained) > 1 else [])]


def _checked(conf: str, overrides: Sequence[str], config_dir: Path | None) -> tuple[list[SweepRun], list[str]]:
    """The runs of a sweep, and why any of them can't be started, each with the words that make it."""
    runs = sweep_runs(conf, overrides, config_dir)
    checks = FileChecks()
    found = [(each, problem) for each in runs for problem in (*refused(each.run, make_plan(each.run)), *checks.look(each.run).problems)]
    return runs, [f"{short_words(each.words)}: {problem}" if each.words else str(problem) for each, problem in found]


def _read(each: SweepRun, config_dir: Path | None) -> Run:
    """The run as this machine is now known to be."""
    recipe, *words = each.texts
    return changed(load(recipe.removeprefix("conf="), words, config_dir), [("name", each.run.name)])


def _status(fit: Callable[[], int]) -> int:
    """The exit status of one run, whatever ended it."""
    try:
        return fit()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except typer.Exit as stopped:
        return stopped.exit_code
    except Unreadable as wrong:
        for problem in wrong.problems:
            tell(f"distrain: {one_line(str(problem))}")
        return FAILED


def _figures(run: Run, status: int) -> list[str]:
    found = ran(folder_of(run))
    losses = [f"{curve[-1][1]:.4f}" if curve else "-" for curve in (found.losses, found.validation)]
    speed = next((each.measured for each in found.speed if each.name == "tokens/s"), None)
    return [*losses, count(speed) if speed is not None else "-", TOLD.get(status, "stopped")]


def _part(word: str) -> str:
    key, _, value = word.partition("=")
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", f"{_short(key)}")
    if PLAIN.fullmatch(value):
        return f"{plain}={value}"
    return f"{plain}={re.sub(r'[^A-Za-z0-9._-]+', '_', value)[:40].strip('_')}-{_mark(word)}"


def _short(key: str) -> str:
    """The last part of a key where no other key ends so, else the key."""
    bare = key.lstrip("+")
    last = bare.rpartition(".")[2]
    return last if sum(each.rpartition(".")[2] == last for each in keys()) == 1 else bare


def _mark(words: str) -> str:
    return sha256(words.encode(errors="surrogateescape")).hexdigest()[:MARK]
