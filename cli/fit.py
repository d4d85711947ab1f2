"""`distrain fit`: plan, refuse what can't run, launch, and say how it ended."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from ..trainer.launch.allocation import job
from ..trainer.launch.words import RUNNERS
from ..trainer.plan.engines import engine_for, unbuilt
from ..trainer.plan.idle import RULE as IDLE_RULE
from ..trainer.plan.mends import limits
from ..trainer.plan.result import Plan
from ..trainer.spec.plain_file import expanded
from ..trainer.spec.problem import Problem, Unreadable
from ..trainer.spec.run import Run
from . import machine

PER_CORE = 8  # CPU processes that a core can serve, slowly


def refused(run: Run, plan: Plan) -> tuple[Problem, ...]:
    """Why a run can't be started: the plan's problems, and what no engine here can do."""
    engine, cannot = engine_for(run, run.parallel)
    found = [*plan.problems, *limits(run)]
    if engine is not None and not cannot:
        found += unbuilt(engine, run.parallel)
    found += _no_weights(run)
    found += _launch(run)
    if run.cluster.device.kind == "cpu" and run.train.precision == "fp16":
        says = "train.precision=fp16 is not run on a CPU: DeepSpeed takes it on the few that multiply in fp16 only"
        found.append(Problem(rule="precision", says=says, mend="set train.precision to fp32 or bf16"))
    found += _no_room(run, plan)
    return tuple(found)


PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}  # what a log sink needs


def remarks(run: Run, plan: Plan) -> Iterator[Problem]:
    """What of the words a run can be started without: keys that do nothing, log sinks that can't be."""
    yield from (each for each in plan.warnings if each.rule in (IDLE_RULE, "recompute"))
    if run.optim.gradient_copy:
        says = "optim.gradient_copy=true is planned for, and DeepSpeed keeps no such copy"
        yield Problem(rule=IDLE_RULE, says=says, mend="set optim.gradient_copy=false")
    for sink in run.log.sinks:
        if sink in PACKAGES and find_spec(PACKAGES[sink]) is None:
            says = f"log.sinks names {sink}, which is not installed, so that nothing goes there"
            yield Problem(rule="sinks", says=says, mend=f"pip install {PACKAGES[sink]}")


def _launch(run: Run) -> Iterator[Problem]:
    """What is wrong with the hosts, and ways of starting that are others'."""
    from .launching import hosts

    try:
        hosts(run)
    except Unreadable as error:
        yield from error.problems
    launch = run.launch
    if launch.name in ("torchrun", "slurm"):
        within = ", or fit launch=deepspeed launch.runner=slurm in a job" if launch.name == "slurm" else ""
        mend = f"run what `distrain show --launch` prints for it{within}"
        yield Problem(rule="launch", says=f"fit does not start launch={launch.name}", mend=mend)
    elif launch.name == "deepspeed" and (missing := [name for name in RUNNERS[launch.runner] if shutil.which(name) is None]):
        says = f"launch.runner={launch.runner} wants {' and '.join(missing)}, and there is none on PATH here"
        yield Problem(rule="launch", says=says, mend=f"install {launch.runner}")
    elif launch.name == "deepspeed" and launch.runner == "slurm" and not job(os.environ):
        says = "launch.runner=slurm starts ranks on the nodes of a job of Slurm, and this is run in none"
        yield Problem(rule="launch", says=says, mend="run it under salloc or in a file for sbatch")


def _no_room(run: Run, plan: Plan) -> Iterator[Problem]:
    """That this machine can't hold the mesh: one rank a GPU, or so many CPU processes a core."""
    if run.launch.name != "local":
        return
    if run.cluster.device.kind == "cuda":
        cards = (machine.found() or {}).get("cuda") or []
        if plan.world > len(cards):
            says = f"{plan.world} ranks on {run.cluster.device.name} want as many GPUs, and this machine has {len(cards) or 'none'}"
            mend = f"set cluster=1x{len(cards)} parallel.dp=auto" if cards else "set cluster=local"
            yield Problem(rule="launch", says=says, mend=mend)
    elif plan.world > PER_CORE * machine.cores():
        says = f"{plan.world} ranks are more than this machine's {machine.cores()} cores can serve"
        yield Problem(rule="launch", says=says, mend=f"set cluster=1x{machine.cores()} parallel.dp=auto")


def _no_weights(run: Run) -> Iterator[Problem]:
    """That the folder which a run begins from holds none; one that goes on from a checkpoint needs none."""
    if run.model.weights and not any(folder_of(run).glob("checkpoints/step_*")):
        folder = Path(run.model.weights)
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            says = f"model.weights={folder} holds no Hugging Face weights"
            yield Problem(rule="weights", says=says, mend="name a folder with config.json and .safetensors")


def folder_of(run: Run) -> Path:
    """RUN_DIR: one folder a run, under log.dir by its name."""
    return expanded(run.log.dir).absolute() / run.name


def after(run: Run) -> str:
    """What a run that has trained is told at its end: the plan beside what was measured, and what to try next."""
    from .measured import ran
    from .report_text import beside
    from .text import look

    folder = folder_of(run)
    name = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
    following = (
        f"report {quote(name)}",
        *([f"generate {quote(name)} --prompt 'def '"] if run.model.family != "hf" else []),
        "plan conf=megatron_1t_6x8x64",
    )
    return "\n".join(["", *beside(ran(folder), look()), "", "Next:", *(f"  {typed()} {each}" for each in following)])


def typed() -> str:
    """What a user types to get this command again."""
    if shutil.which("distrain"):
        return "distrain"
    called = Path(sys.argv[0])
    return quote(os.path.relpath(called)) if called.name == "distrain" else "python -m distrain"


def fit(run: Run, plan: Plan, show: Callable[[str], None], live: Callable[[str], None]) -> tuple[int, Sequence[str]]:
    """Write the run's folder, start its ranks, and wait: (exit status, what went wrong, a line each)."""
    from .files import write
    from .lock import Taken, held
    from .starts import started

    folder = folder_of(run)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            warning = stack.enter_context(held(folder))
            write(run, plan, folder)
        except Taken as error:
            return 1, [str(error)]
        except OSError as error:
            return 1, [f"{folder} can't be written ({(error.strerror or str(error)).lower()}): make room there, or set log.dir to another"]
        if warning:
            show(f"warning: {warning}")
        show(f"run folder {folder}")
        ended = started(run, plan, folder, show, live)
    return ended.status, [ended.says] if ended.says else []
