"""Checks of one run for `distrain doctor`: its plan, engine, devices, files and room, and what `fit` would refuse."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..machine import measure_machine as machine
from ..machine.doctor_checks import MachineCheck, compiler_check
from ..plan.plan_data import Plan
from ..rundir.absolute_paths import relative_folder
from ..rundir.files import is_run_folder, run_folder
from ..rundir.run_summary import run_summary
from ..spec.numbers.as_text import count_text, plural, size_text
from ..spec.problem import Problem
from ..spec.run import Run
from ..system.cpu import cpu_count
from ..system.memory import free_memory
from .admission import check_start
from .data_survey import DataFacts
from .file_checks import FileCheck, FileChecks, epoch_warnings

PROCESS = 350e6  # bytes of a rank that has imported torch and DeepSpeed, beyond its plan
USABLE = 0.97  # share of the stated memory that a card of the same kind has at least, depending on its driver
# The subject of a rule of the plan or of the launch, where it has another name than the rule.
SUBJECTS = {"launch": "devices", "hostfile": "hosts", "slots": "hosts", "resume": "run folder", "accept": "run folder"}
BY_HAND = ("torchrun", "slurm")  # launches that `fit` refuses but a user can start, for which that is a warning


def checks_of_run(run: Run, plan: Plan, verdict: str, *, hosted: bool) -> Iterator[MachineCheck]:
    """Check everything that a run needs. `verdict` is its plan's; `hosted`: the preflight has checked the disks of its hosts."""
    files = FileChecks().check_run(run)
    refusals = [*_refusals(run, plan, files)]
    yield from _plan_checks(run, plan, files, verdict)
    yield from refusals
    refused = {each.name for each in refusals}
    if "engine" not in refused and plan.engine:
        yield MachineCheck("engine", "ok", f"{plan.engine} runs it")
    if run.train.compile or (run.parallel.offload.optimizer and plan.engine == "zero"):  # DeepSpeed compiles its Adam
        yield compiler_check(os.environ)
    if run.launch.name == "local" and plan.memory is not None and "devices" not in refused:
        yield from _device_checks(run, plan)
        yield from _memory_checks(run, plan.world, plan.memory.peak)
    if not refused & {"data", "tokenizer"}:
        yield _data_check(run, files.data)
        tokenizer = "none is needed: the data are tokens" if run.data.name in ("tokens", "synthetic") else run.data.tokenizer
        yield MachineCheck("tokenizer", "ok", tokenizer)
    if "weights" not in refused:
        yield _weights_check(run)
    if not hosted:
        yield from _disk_checks(run, plan)
    if "run folder" not in refused:
        yield _folder_check(run)
    yield from (MachineCheck("run folder", "ok", remark) for remark in files.remarks)


def _refusals(run: Run, plan: Plan, files: FileCheck) -> Iterator[MachineCheck]:
    """Why `fit` would not start the run, without the plan's own problems."""
    for problem in (*check_start(run, plan).problems, *files.problems):
        if problem not in plan.problems:
            by_hand = problem.rule == "launch" and run.launch.name in BY_HAND
            yield MachineCheck(_subject(problem), "warning" if by_hand else "problem", problem.says, problem.mend)


def _subject(problem: Problem) -> str:
    if problem.rule == "data" and problem.says.startswith("data.tokenizer"):
        return "tokenizer"
    return SUBJECTS.get(problem.rule, problem.rule)


def _plan_checks(run: Run, plan: Plan, files: FileCheck, verdict: str) -> Iterator[MachineCheck]:
    for problem in plan.problems:
        yield MachineCheck("plan", "problem", problem.says, problem.mend)
    if not plan.problems:
        yield MachineCheck("plan", "ok", verdict)
    for warning in (*plan.warnings, *epoch_warnings(run, plan, files.data)):
        yield MachineCheck("plan", "warning", warning.says, warning.mend)


def _device_checks(run: Run, plan: Plan) -> Iterator[MachineCheck]:
    """Compare this machine's devices with the recipe's."""
    device = run.cluster.device
    if device.kind == "cpu":
        processes = "1 process" if plan.world == 1 else f"{plan.world} processes"
        yield MachineCheck("devices", "ok", f"{processes} on {plural(cpu_count(), 'core')}")
        return
    facts = machine.cached_facts()
    cards = facts["cuda"] if facts else []
    for card in cards[: plan.world]:
        says = f"{card['name']}, {size_text(card['memory'])}"
        if isinstance(device.memory, int | float) and card["memory"] < USABLE * device.memory:
            known = machine.DEVICE_OPTIONS.get(card["name"])
            mend = f"plan with it: device={known}" if known else "set cluster.device.memory to its memory"
            yield MachineCheck("devices", "warning", f"{says}; the recipe plans with {size_text(device.memory)} ({device.name})", mend)
        else:
            yield MachineCheck("devices", "ok", says)


def _memory_checks(run: Run, ranks: int, peak: int) -> Iterator[MachineCheck]:
    """Compare free memory with what the ranks need of it: on a CPU the plan's `peak` bytes too."""
    free, need = free_memory(), ranks * (PROCESS + (peak if run.cluster.device.kind == "cpu" else 0))
    says = f"{size_text(free)} free, and {plural(ranks, 'rank')} take about {size_text(need)}"
    if free >= need:
        yield MachineCheck("memory", "ok", says)
    elif free:  # 0 where the system does not report it
        yield MachineCheck("memory", "warning", says, "end other programs, or use fewer ranks or a smaller train.microbatch")


def _data_check(run: Run, facts: DataFacts | None) -> MachineCheck:
    """The size of the data, as far as it is known without reading them."""
    if facts is None:
        sources = {"stdlib": "the Python standard library's source", "synthetic": "synthetic tokens"}
        return MachineCheck("data", "ok", sources.get(run.data.name, "not checked here: the files are on the run's hosts"))
    about = "" if facts.exact else "about "
    counts = ((facts.train_tokens, "tokens"), (facts.documents, "documents"))
    return MachineCheck("data", "ok", ", ".join(f"{about}{count_text(number)} {noun}" for number, noun in counts if number) or "found")


def _weights_check(run: Run) -> MachineCheck:
    if run.model.weights is None:
        return MachineCheck("weights", "ok", f"random, from train.seed={run.train.seed}")
    files = [*Path(run.model.weights).glob("*.safetensors")]
    if not files:
        return MachineCheck("weights", "ok", f"{run.model.weights} is missing but not needed: the run goes on from a checkpoint")
    held = sum(file.stat().st_size for file in files)
    return MachineCheck("weights", "ok", f"{run.model.weights}: {plural(len(files), 'file')}, {size_text(held)}")


def _disk_checks(run: Run, plan: Plan) -> Iterator[MachineCheck]:
    """Check the room for all checkpoints that exist at once: those that are kept, and one that is being saved."""
    folder = run_folder(run)
    existing = next(each for each in (folder, *folder.parents) if each.is_dir())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield MachineCheck("disk", "problem", f"{existing} can't be written to", "set log.dir to another folder")
        return
    if plan.run is None:
        return
    one, every, keep = plan.run.checkpoint_bytes, run.checkpoint.every, run.checkpoint.keep
    saves = -(-plan.run.steps // every) if every else int(run.checkpoint.final)
    count = min(saves, keep + 1)
    held = sum(file.stat().st_size for file in folder.glob("checkpoints/step_*/*"))
    free = shutil.disk_usage(existing).free
    says = f"{size_text(free)} free in {existing}, and checkpoints take {size_text(one * count)}: {count} of {size_text(one)}"
    if not count:
        says = f"{size_text(free)} free in {existing}, and nothing is saved unless the run is stopped: a checkpoint takes {size_text(one)}"
    says += f", of which {size_text(held)} are saved already" if held else ""
    if free + held >= one * count:
        yield MachineCheck("disk", "ok", says)
    elif free + held < one:
        yield MachineCheck("disk", "problem", says, "make room, or set log.dir to another disk")
    else:
        yield MachineCheck("disk", "warning", says, f"make room, set log.dir to another disk, or checkpoint.keep below {keep}")


def _folder_check(run: Run) -> MachineCheck:
    """What the run's folder holds already, and at which step `fit` would begin in it."""
    folder = run_folder(run)
    name = relative_folder(folder)
    if not is_run_folder(folder):
        return MachineCheck("run folder", "ok", f"{name} is new")
    summary = run_summary(folder)
    if summary.state == "running":
        return MachineCheck("run folder", "problem", f"another process trains in {name}", "stop it, or set name= to train another run")
    follows = "begins at step 0" if summary.checkpoint is None else f"goes on from step {summary.checkpoint}"
    return MachineCheck("run folder", "ok", f"{name} exists ({summary.state}); `fit` {follows}")
