"""The part of `distrain doctor` that is about one run: whether what its recipe names is there, and whether it has room."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...trainer.launch.admission import FileCheck, FileChecks, epoch_warnings
from ...trainer.launch.data_survey import DataFacts
from ...trainer.machine import facts as machine
from ...trainer.plan.result import Plan
from ...trainer.spec.problem import Problem
from ...trainer.spec.run import Run
from ..pages.format import count, many, size
from ..pages.plan_page import verdict
from ..pages.runs_page import is_run, listed_run
from .doctor import Finding, compiler, memory_free
from .fit import folder_of, from_here, refused

PROCESS = 350e6  # bytes of a rank that has imported torch and DeepSpeed, beside what its plan counts
LESS = 0.97  # of the memory that a recipe states for a device, what a card of the same kind may have by its driver
# What a rule of the plan or of the launch is about, where that is not its own name.
SUBJECTS = {"launch": "devices", "hostfile": "hosts", "slots": "hosts", "resume": "run folder", "accept": "run folder"}
BY_HAND = ("torchrun", "slurm")  # launches that `fit` does not start, for which this is said as a warning


def run_findings(run: Run, plan: Plan, *, hosted: bool) -> Iterator[Finding]:
    """A line for each thing that the run needs; of a run over hosts, what they were not asked already."""
    files = FileChecks().look(run)
    stops = [*_refusals(run, plan, files)]
    yield from _plan_findings(plan, files, run)
    yield from stops
    told = {each.name for each in stops}
    if "engine" not in told and plan.engine:
        yield Finding("engine", "ok", f"{plan.engine} runs it")
    if run.train.compile or run.parallel.offload.optimizer:
        yield compiler(os.environ)
    if run.launch.name == "local" and plan.memory is not None and "devices" not in told:
        yield from _device_findings(run, plan)
        yield from _memory_findings(run, plan.world, plan.memory.peak)
    if not told & {"data", "tokenizer"}:
        yield _data_finding(run, files.data)
        made = "none is needed: the data are tokens" if run.data.name in ("tokens", "synthetic") else run.data.tokenizer
        yield Finding("tokenizer", "ok", made)
    if "weights" not in told:
        yield _weights_finding(run)
    if not hosted:
        yield from _disk_findings(run, plan)
    if "run folder" not in told:
        yield _folder_finding(run)
    yield from (Finding("run folder", "ok", remark) for remark in files.remarks)


def _refusals(run: Run, plan: Plan, files: FileCheck) -> Iterator[Finding]:
    """Why `fit` would not start, but for what the plan says itself."""
    for problem in (*refused(run, plan), *files.problems):
        if problem not in plan.problems:
            by_hand = problem.rule == "launch" and run.launch.name in BY_HAND
            yield Finding(_subject(problem), "warning" if by_hand else "problem", problem.says, problem.mend)


def _subject(problem: Problem) -> str:
    """What a problem is about, in the doctor's words."""
    if problem.rule == "data" and problem.says.startswith("data.tokenizer"):
        return "tokenizer"
    return SUBJECTS.get(problem.rule, problem.rule)


def _plan_findings(plan: Plan, files: FileCheck, run: Run) -> Iterator[Finding]:
    for problem in plan.problems:
        yield Finding("plan", "problem", problem.says, problem.mend)
    if not plan.problems:
        yield Finding("plan", "ok", verdict(plan).removeprefix(f"{plan.name} "))
    for warning in (*plan.warnings, *epoch_warnings(run, plan, files.data)):
        yield Finding("plan", "warning", warning.says, warning.mend)


def _device_findings(run: Run, plan: Plan) -> Iterator[Finding]:
    """This machine's devices beside those that the recipe plans with."""
    device = run.cluster.device
    if device.kind == "cpu":
        processes = "1 process" if plan.world == 1 else f"{plan.world} processes"
        yield Finding("devices", "ok", f"{processes} on {many(machine.cores(), 'core')}")
        return
    facts = machine.found()
    cards = facts["cuda"] if facts else []
    for card in cards[: plan.world]:
        says = f"{card['name']}, {size(card['memory'])}"
        if isinstance(device.memory, int | float) and card["memory"] < LESS * device.memory:
            known = machine.DEVICES.get(card["name"])
            mend = f"plan with it: device={known}" if known else "set cluster.device.memory to what it has"
            yield Finding("devices", "warning", f"{says}; the recipe plans with {size(device.memory)} ({device.name})", mend)
        else:
            yield Finding("devices", "ok", says)


def _memory_findings(run: Run, ranks: int, peak: int) -> Iterator[Finding]:
    """Free memory beside what ranks take of it: on a CPU the `peak` bytes of the plan too."""
    free, need = memory_free(), ranks * (PROCESS + (peak if run.cluster.device.kind == "cpu" else 0))
    says = f"{size(free)} free, and {many(ranks, 'rank')} take about {size(need)}"
    if free >= need:
        yield Finding("memory", "ok", says)
    elif free:  # 0 where this system does not say
        yield Finding("memory", "warning", says, "end something else, or use fewer ranks or a smaller train.microbatch")


def _data_finding(run: Run, facts: DataFacts | None) -> Finding:
    """What the data hold, as far as a look at them tells."""
    data = run.data
    if facts is None:
        says = {"stdlib": "the Python standard library's source", "synthetic": "synthetic tokens"}.get(
            data.name, "not looked at: it lies elsewhere"
        )
        return Finding("data", "ok", says)
    about = "" if facts.exact else "about "
    parts = [
        f"{about}{count(number)} {noun}" for number, noun in ((facts.train_tokens, "tokens"), (facts.documents, "documents")) if number
    ]
    return Finding("data", "ok", ", ".join(parts) or "there")


def _weights_finding(run: Run) -> Finding:
    if run.model.weights is None:
        return Finding("weights", "ok", f"random, from train.seed={run.train.seed}")
    files = [*Path(run.model.weights).glob("*.safetensors")]
    if not files:
        return Finding("weights", "ok", f"{run.model.weights} is not there, and not needed: the run goes on from a checkpoint")
    held = sum(file.stat().st_size for file in files)
    return Finding("weights", "ok", f"{run.model.weights}: {many(len(files), 'file')}, {size(held)}")


def _disk_findings(run: Run, plan: Plan) -> Iterator[Finding]:
    """Room for the checkpoints that are there at once: those that are kept, and one that is being saved."""
    folder = folder_of(run)
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        yield Finding("disk", "problem", f"{there} can't be written to", "set log.dir to a folder that can be")
        return
    if plan.run is None:
        return
    one, every = plan.run.checkpoint_bytes, run.checkpoint.every
    saves = -(-plan.run.steps // every) if every else 1
    need = one * min(saves, run.checkpoint.keep + 1)
    held = sum(file.stat().st_size for file in folder.glob("checkpoints/step_*/*"))
    free = shutil.disk_usage(there).free
    says = f"{size(free)} free in {there}, and checkpoints take {size(need)}: {min(saves, run.checkpoint.keep + 1)} of {size(one)}"
    says += f", of which {size(held)} are there" if held else ""
    if free + held >= need:
        yield Finding("disk", "ok", says)
    elif free + held < one:
        yield Finding("disk", "problem", says, "make room, or set log.dir to another disk")
    else:
        yield Finding("disk", "warning", says, f"make room, set log.dir to another disk, or checkpoint.keep below {run.checkpoint.keep}")


def _folder_finding(run: Run) -> Finding:
    """What is in the run's folder already, and what becomes of it."""
    folder = folder_of(run)
    name = from_here(folder)
    if not is_run(folder):
        return Finding("run folder", "ok", f"{name} is new")
    found = listed_run(folder)
    if found.state == "running":
        return Finding("run folder", "problem", f"{name} is being trained in", "stop that run, or set name= to train another")
    follows = "begins at step 0" if found.checkpoint is None else f"goes on from step {found.checkpoint}"
    return Finding("run folder", "ok", f"{name} is there ({found.state}); a start in it {follows}")
