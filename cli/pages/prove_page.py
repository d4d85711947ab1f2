"""A proof as text, a row as soon as its layout has ended, and as one JSON document."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from ...trainer.prove.layouts import Layout
from ...trainer.prove.runs import AMONG, Outcome, Proved, furthest, moved
from ...trainer.prove.trials import Proof, Trial
from .format import Look, many, seconds, width, wrapped

# What a newcomer reads above the table, of what it holds.
MEANS = {
    "dp": "dp: replicas share out the batch",
    "zero": "zero: they share out the optimizer (1), gradients (2), weights (3) too",
    "tp": "tp: ranks share out each matrix product",
    "sequence": "sequence: and the tokens between products",
    "cp": "cp: ranks share out the tokens of each sequence",
    "ep": "ep: replicas share out the experts",
    "pp": "pp: stages share out the layers",
}
COLUMNS = ("engine", "schedule", "micros", "loss", "norm", "weights", "messages", "verdict")
KNOWN = 3  # columns that are known before anything is trained
REST = (7, 7, 7, 9, 7)  # columns of the others
LEFT = (0, 1, 6, 7)  # columns that are set to the left
NAMED = 4  # names of a list that are told in full


class Table:
    """The rows of a proof, each made when it is known; all are as wide."""

    def __init__(self, proof: Proof, look: Look) -> None:
        known = [COLUMNS[:KNOWN], *(_known(each) for each in proof.trials)]
        self._widths = (*(max(map(len, column)) for column in zip(*known, strict=True)), *REST)
        longest = max(len(each.layout.word) for each in proof.trials)
        room = width() - sum(self._widths)
        self._gap = "  " if longest <= room - 2 * len(self._widths) else " "
        self._wide = max(len("layout"), min(longest, room - len(self._gap) * len(self._widths)))
        self._look = look

    def head(self) -> str:
        return self._look.paint(self._line("layout", COLUMNS), "bold")

    def row(self, outcome: Outcome) -> str:
        """A layout's line; a name that is too long has one of its own."""
        word = outcome.trial.layout.word
        line = self._line("" if len(word) > self._wide else word, _cells(outcome))
        line = self._look.paint(line, "green" if outcome.verdict == "same" else "red")
        return f"{word}\n{line}" if len(word) > self._wide else line

    def _line(self, first: str, cells: Sequence[str]) -> str:
        rows = zip(cells, self._widths, strict=True)
        set_ = [cell.ljust(wide) if at in LEFT else cell.rjust(wide) for at, (cell, wide) in enumerate(rows)]
        return self._gap.join([first.ljust(self._wide), *set_]).rstrip()


def _cells(outcome: Outcome) -> list[str]:
    return [
        *_known(outcome.trial),
        *(_figure(each) for each in (outcome.loss, outcome.norm, outcome.weights)),
        (outcome.messages or {}).get("verdict", "-"),
        outcome.verdict,
    ]


def _known(trial: Trial) -> tuple[str, str, str]:
    """Its engine, schedule and micro-batches: so many, of so many sequences."""
    plan, run = trial.plan, trial.run
    return plan.engine or "-", plan.schedule if run.parallel.pp > 1 else "-", f"{plan.microbatches or 0} x {run.train.microbatch}"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def opening(proof: Proof) -> str:
    """What is about to be trained, and what the words of the table mean."""
    run = proof.alone.run
    of = f" of its {proof.whole.train.steps:,}" if (proof.whole.train.steps or 0) > proof.steps else ""
    most = max(each.layout.ranks for each in proof.trials)
    where = f"up to {most} {'CPU processes' if run.cluster.device.kind == 'cpu' else 'GPUs'}, {run.train.precision}"
    says = f"{proof.whole.name}, {many(proof.steps, 'step')}{of}: in one process, then in {many(len(proof.trials), 'layout')} on {where}"
    return "\n".join([*wrapped(says, hang="  "), *(f"  {line}" for line in _meanings(proof)), f"run folders in {near(proof.folder)}"])


def _meanings(proof: Proof) -> list[str]:
    layouts = [each.layout for each in proof.trials]
    used = {
        "dp": any(each.dp > 1 for each in layouts),
        "zero": any(each.zero for each in layouts),
        "tp": any(each.tp > 1 for each in layouts),
        "sequence": any(each.sequence for each in layouts),
        "cp": any(each.cp > 1 for each in layouts),
        "ep": any(each.ep > 1 for each in layouts),
        "pp": any(each.pp > 1 for each in layouts),
    }
    lines: list[str] = []
    for key, words in MEANS.items():
        if used[key]:
            joined = f"{lines[-1]}; {words}" if lines else words
            if lines and len(joined) + 2 <= width():
                lines[-1] = joined
            else:
                lines += wrapped(words, width() - 2, hang="  ")
    return lines


def alone_line(outcome: Outcome) -> str:
    """What one process did, which every row below is held against."""
    losses = outcome.curve.losses if outcome.curve else ()
    curve = f": loss {losses[0]:.4f} -> {losses[-1]:.4f}" if losses else ""
    says = f"one process{curve}, in {seconds(outcome.seconds)}; of each layout the largest difference from it:"
    return "\n".join(wrapped(says, hang="  "))


def closing(proof: Proof, done: Proved, *, reasons: bool) -> str:
    """What the table does not show, and the verdict in one sentence."""
    lines = [*wrapped(_same(done), hang="  "), *_control(done)]
    lines += [line for each in done.others for line in _wrong(each)]
    lines += _not_compared(done) + _lowered(proof) + _rest(proof, reasons=reasons)
    return "\n".join(["", *lines, "", *wrapped(sentence(proof, done), hang="  ")])


def _same(done: Proved) -> str:
    """What counts as the same."""
    close, way = done.close, moved(done.alone)
    share = f", {close.weights / way:.0%} of the way that Adam can take one" if way else ""
    weights = f"weights within {close.weights:.1e}{share}" if isfinite(close.weights) else "weights not judged in half precision"
    return f"same: loss within {close.loss:.1e} nats a token, gradient norm within {close.norm:.1e} of itself, {weights}"


def _control(done: Proved) -> list[str]:
    if not done.control:
        return []
    again = done.control
    figures = f"loss {_figure(again.loss)}, norm {_figure(again.norm)}, weights {_figure(again.weights)}"
    micros = _known(again.trial)[-1]
    says = f"rounding grows in this recipe: one process that adds its batch up as {micros} is as far from itself ({figures})"
    return wrapped(f"{says}; a layout may be {AMONG:g} times as far", hang="  ")


def _wrong(outcome: Outcome) -> list[str]:
    told = [outcome.says, outcome.departure, str((outcome.messages or {}).get("says", ""))]
    return [line for each in told if each for line in wrapped(f"{outcome.trial.layout.word}: {each}", hang="  ")]


def _left_out(done: Proved) -> list[str]:
    return list(dict.fromkeys(name for each in done.others for name in each.left_out))


def _not_compared(done: Proved) -> list[str]:
    names = _left_out(done)
    if not names:
        return []
    shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return wrapped(f"not compared: {shown}, whose gradient is zero but for rounding", hang="  ")


def _lowered(proof: Proof) -> list[str]:
    whole = proof.alone.run.train.microbatch
    lower = [each.layout.word for each in proof.trials if each.run.train.microbatch < whole]
    says = f"micro-batch lowered from {whole}, so that replicas divide the batch and stages have work: {_some(lower)}"
    return wrapped(says, hang="  ") if lower else []


def _rest(proof: Proof, *, reasons: bool) -> list[str]:
    """Layouts that were not tried, and why."""
    lines = [f"{many(proof.more, 'more layout')} would run too: layouts=all"] if proof.more else []
    if not proof.left_out:
        return lines
    if not reasons:
        return [*lines, f"left out: {many(len(proof.left_out), 'layout')} that can't run here; --reasons lists them"]
    by: dict[str, list[Layout]] = {}
    for layout, problem in proof.left_out:
        by.setdefault(problem.says, []).append(layout)
    told = [f"{says}: {_some([each.word for each in layouts])}" for says, layouts in by.items()]
    return [*lines, "left out:", *(line for each in told for line in wrapped(each, indent="  "))]


def _some(words: Sequence[str]) -> str:
    rest = len(words) - NAMED
    return ", ".join(words) if rest <= 1 else f"{', '.join(words[:NAMED])} and {rest} more"


def sentence(proof: Proof, done: Proved) -> str:
    """The verdict: `7 layouts train the same curve: losses within 2.4e-07 over 8 steps`."""
    count, wrong = many(len(done.others), "layout"), [each for each in done.others if each.verdict != "same"]
    if done.alone.verdict != "same":
        return f"one process did not train: {done.alone.says}"
    if wrong:
        words = _some([each.trial.layout.word for each in wrong])
        return f"{len(wrong)} of {count} {'does' if len(wrong) == 1 else 'do'} not train the same curve: {words}"
    far = furthest([each.loss or 0.0 for each in done.others])
    verb, losses = "trains" if len(done.others) == 1 else "train", f"within {far:.1e}" if far else "equal to the last bit"
    return f"{count} {verb} the same curve: losses {losses} over {many(proof.steps, 'step')}"


def near(path: Path) -> str:
    """A path as it is typed from here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def document(proof: Proof, done: Proved) -> dict[str, Any]:
    """All of it as plain data, SI; what is not known is null."""
    plain: dict[str, Any] = {
        "version": 1,
        "name": proof.whole.name,
        "ok": done.ok,
        "steps": proof.steps,
        "precision": proof.alone.run.train.precision,
        "folder": str(proof.folder),
        "says": sentence(proof, done),
        "tolerance": {"loss": done.close.loss, "grad_norm": done.close.norm, "weights": done.close.weights},
        "alone": _row(done.alone),
        "control": _row(done.control) if done.control else None,
        "layouts": [_row(each) for each in done.others],
        "not_compared": _left_out(done),
        "more": proof.more,
        "left_out": [{"layout": layout.word, "says": problem.says} for layout, problem in proof.left_out],
    }
    finite: dict[str, Any] = _finite(plain)
    return finite


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        **_named(outcome.trial),
        "verdict": outcome.verdict,
        "says": outcome.says,
        "departure": outcome.departure,
        "seconds": outcome.seconds,
        "losses": list(outcome.curve.losses) if outcome.curve else [],
        "grad_norms": list(outcome.curve.norms) if outcome.curve else [],
        "apart": {"loss": outcome.loss, "grad_norm": outcome.norm, "weights": outcome.weights, "weight": outcome.weight or None},
        "messages": outcome.messages,
    }


def _named(trial: Trial) -> dict[str, Any]:
    parallel = trial.run.parallel
    return {
        "layout": trial.layout.word,
        "ranks": trial.plan.world,
        "mesh": trial.plan.mesh,
        "engine": trial.plan.engine,
        "schedule": parallel.schedule if parallel.pp > 1 else None,
        "zero": parallel.zero,
        "sequence": parallel.sequence,
        "recompute": parallel.recompute,
        "microbatch": trial.run.train.microbatch,
        "microbatches": trial.plan.microbatches,
        "folder": str(trial.folder),
    }


def _finite(value: Any) -> Any:
    """Plain data with null for every number that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
