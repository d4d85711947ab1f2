"""`distrain prove`: the same training curve in every layout that this machine can run."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...trainer.machine import facts as machine
from ...trainer.prove.fork_client import Server, ServerGone
from ...trainer.prove.runs import Outcome, Proved, Serving, proved
from ...trainer.prove.trials import Proof, Recipe, Refused, prepared
from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.system import atomic_file
from ...trainer.system.torch_child import Stopped, stops_raised
from ..config.arguments import read_words
from ..config.layout_words import Asked, read_asked, unread
from ..config.load import mistakes
from ..pages.format import look
from ..pages.prove_page import Table, alone_line, closing, document, near, opening

FINE, CANNOT = 0, 1


@dataclass(frozen=True, kw_only=True)
class Screen:
    """Where words go: lines for the user, problems, and the live line, which replaces the one before."""

    show: Callable[[str], None]
    tell: Callable[[Iterable[Problem]], None]
    live: Callable[[str], None]


def prove(words: Sequence[str], config_dir: Path | None, screen: Screen, *, as_json: bool, reasons: bool, serving: Serving = Server) -> int:
    """Train and compare all that the words ask for; the exit status. Raises Unreadable."""
    asked, recipe, idle = _read(words, config_dir)
    screen.tell(idle)
    if as_json and reasons:
        screen.tell([Problem(rule="idle", says="--reasons does nothing with --json, whose left_out has them all")])
    try:
        proof = _prepared(asked, recipe, screen)
    except Refused as refused:
        screen.tell(refused.problems)
        return CANNOT
    try:
        with stops_raised():
            done = _shown(proof, screen, serving, as_json=as_json)
    except ServerGone as gone:
        screen.live("")
        screen.tell([Problem(rule="server", says=str(gone))])
        return CANNOT
    except (KeyboardInterrupt, Stopped) as stop:
        screen.live("")
        screen.tell([Problem(rule="stopped", says=f"stopped; the runs so far are in {near(proof.folder)}")])
        return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    plain = json.dumps(document(proof, done), indent=2)
    atomic_file.put(proof.folder / "prove.json", f"{plain}\n".encode())
    screen.show(plain if as_json else closing(proof, done, reasons=reasons))
    return FINE if done.ok else CANNOT


def _read(words: Sequence[str], config_dir: Path | None) -> tuple[Asked, Recipe, list[Problem]]:
    asked, rest, problems = read_asked(words)
    read = read_words(rest, "prove", config_dir)
    if problems or read.problems:
        raise Unreadable([*problems, *read.problems, *mistakes(read.overrides, config_dir)])
    keys = dict.fromkeys(word.partition("=")[0].lstrip("+") for word in read.overrides if "=" in word)
    return asked, Recipe(read.conf, read.overrides, config_dir), [*read.notes, *unread(keys)]


def _prepared(asked: Asked, recipe: Recipe, screen: Screen) -> Proof:
    """What can't run at all is refused before this machine is measured; raises Refused."""
    proof = prepared(asked, recipe)
    if machine.known():
        return proof
    unmeasured = machine.measure(lambda words: print(words, file=sys.stderr, flush=True))
    screen.tell([unmeasured] if unmeasured else [])
    return prepared(asked, recipe.again())


def _shown(proof: Proof, screen: Screen, serving: Serving, *, as_json: bool) -> Proved:
    """Train everything, a line as soon as each is known."""
    table = Table(proof, look())
    if as_json:
        return proved(proof, lambda outcome: None, screen.live, serving)

    def each(outcome: Outcome) -> None:
        if outcome.trial is proof.alone:
            screen.show(f"{alone_line(outcome)}\n\n{table.head()}")
        else:
            screen.show(table.row(outcome))

    screen.show(opening(proof))
    return proved(proof, each, screen.live, serving)
