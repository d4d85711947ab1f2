"""Rules of single values: names of folders, learning rates, windows of steps, pairs; the largest layouts that a plan can compute."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...spec.read import value_text
from ...spec.run import Parallel, Run
from ..engines import ENGINES, engine_for
from ..layout.mesh import Mesh, ranks_in_node, replica_degrees, replica_size
from ..layout.schedule_of_run import delay_of
from .broken_rule import BrokenRule

MOST_NAME = 200  # bytes of a run's name: file systems allow 255, and folders named after it are longer
MOST_DIR = 2000  # bytes of log.dir
MOST_TIMED = 1000  # steps of a timeline: every rank keeps all their spans until the last is done
MOST_COUNTED = 100_000  # ranks of a mesh whose groups are examined one by one


def folders_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A run's name names one folder in log.dir."""
    if why := _no_name(run.name):
        yield BrokenRule(
            "name", f"name={value_text(run.name)} {why}", fix="write one word, as name=my_run: it names the run's folder in log.dir"
        )
    if why := _no_folder(run.log.dir):
        yield BrokenRule("dir", f"log.dir={value_text(run.log.dir)} {why}", fix="name a folder, as log.dir=runs")


def pairs_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Examples of a prompt and what follows it are always kept apart."""
    if run.data.has_prompts and not run.data.documents:
        says = f"data.documents=false: data={run.data.name} always keeps its examples apart"
        yield BrokenRule("documents", says, ((("data.documents", True),),))


def _no_name(name: str) -> str:
    """Return why a text can't name a run; "" if it can."""
    if not name.strip():
        return "is empty"
    if name in (".", ".."):
        return "is not the name of a folder"
    if "/" in name:
        return "contains /, but names one folder"
    if name[0] in "-~.":
        return f"begins with {name[0]}"
    if name != name.strip():
        return "begins or ends with a space"
    return _unprintable(name) or _too_long(name, MOST_NAME)


def _no_folder(path: str) -> str:
    """Return why a text can't be the path of a folder; "" if it can."""
    if not path.strip():
        return "is empty"
    if path.startswith("-"):
        return f"begins with -, as options do: write ./{path}"
    return _unprintable(path) or _too_long(path, MOST_DIR)


def _unprintable(text: str) -> str:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return "is not valid UTF-8"
    odd = next((letter for letter in text if not letter.isprintable()), "")
    return f"contains {odd!r}" if odd else ""


def _too_long(text: str, most: int) -> str:
    return f"is longer than {most} bytes" if len(os.fsencode(text)) > most else ""


def rates_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """A learning-rate schedule falls from lr to min_lr."""
    optim = run.optim
    if optim.schedule != "constant" and optim.min_lr > optim.lr:
        says = f"optim.min_lr={optim.min_lr:g} is above optim.lr={optim.lr:g}: optim.schedule={optim.schedule} would raise the rate"
        yield BrokenRule("min_lr", says, ((("optim.min_lr", float(f"{optim.lr / 10:.6g}")),),))


def step_windows_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The windows of the profiler and of the timeline contain steps, counted from 1; a timeline's are few."""
    for key, window in (("log.profile", run.log.profile), ("log.timeline", run.log.timeline)):
        if window is None:
            continue
        first, last = window
        rule, given = key.removeprefix("log."), f"{key}=[{first},{last}]"
        if first > last:
            yield BrokenRule(rule, f"{given}: its first step is after its last", (((key, (last, first)),),))
        elif last == 0:
            yield BrokenRule(rule, f"{given}: steps are counted from 1", (((key, (1, 1)),),))
        elif key == "log.timeline" and last - first >= MOST_TIMED:
            fix = (((key, (first, first + MOST_TIMED - 1)),),)
            yield BrokenRule(rule, f"{given} has more than the {MOST_TIMED} steps of a timeline", fix)


def timeline_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """The steps of a timeline end before the next ones begin."""
    if run.log.timeline and delay_of(parallel):
        says = f"log.timeline times steps that end before the next begins, which parallel.schedule={value_text(parallel.schedule)} has not"
        yield BrokenRule("timeline", says, ((("log.timeline", None),),))


def plannable_ranks_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """What can only be found by examining ranks one by one is planned for so many ranks at most."""
    gpus, others = run.cluster.gpus, replica_size(parallel)
    ranks = run.cluster.nodes * gpus
    dp = ranks // others if parallel.dp == "auto" else parallel.dp
    if dp * others != ranks or dp % parallel.ep:
        return
    if parallel.ep > 1 and parallel.cp > 1 and ranks > MOST_COUNTED:
        mesh = Mesh(**replica_degrees(parallel), dp=dp, ep=parallel.ep)
        if ranks_in_node(mesh.strides("expert_copies"), gpus) is None:
            says = f"parallel.ep={parallel.ep} x parallel.cp={parallel.cp} does not align with nodes of {gpus}"
            yield BrokenRule("size", f"{says}: the links of {ranks:,} such ranks are not planned", ((("parallel.cp", 1),),))
    layers, data = -(-run.model.layer_groups // parallel.pp), dp * parallel.cp
    for row in ENGINES.values():
        excess = row.costs.unplanned_size(run, parallel, layers, data)
        if excess and engine_for(run, parallel)[0] is row:
            yield BrokenRule("size", excess.says, (excess.change,), excess.fix)
