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

from ...trainer.launch.commands.deepspeed import RUNNERS
from ...trainer.launch.hosts.slurm_nodes import job
from ...trainer.machine import facts as machine
from ...trainer.plan.engines import engine_for, unbuilt
from ...trainer.plan.mends import limits
from ...trainer.plan.result import Plan
from ...trainer.plan.unused_keys import RULE as IDLE_RULE
from ...trainer.spec.plain_file import expanded
from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.spec.run import Run

FINE, CANNOT = 0, 1
PER_CORE = 8  # CPU processes that a core can serve, slowly


def refused(run: Run, plan: Plan) -> tuple[Problem, ...]:
    """Why a run can't be started: the plan's problems, and what no engine here can do."""
    engine, cannot = engine_for(run, run.parallel)
    found = [*plan.problems, *limits(run)]
    if engine is not None and not cannot:
        found += unbuilt(engine, run.parallel)
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
    from ...trainer.launch.resolve import hosts

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
        facts = machine.found()
        cards = facts["cuda"] if facts else []
        if plan.world > len(cards):
            says = f"{plan.world} ranks on {run.cluster.device.name} want as many GPUs, and this machine has {len(cards) or 'none'}"
            mend = f"set cluster=1x{len(cards)} parallel.dp=auto" if cards else "set cluster=local"
            yield Problem(rule="launch", says=says, mend=mend)
    elif plan.world > PER_CORE * machine.cores():
        says = f"{plan.world} ranks are more than this machine's {machine.cores()} cores can serve"
        yield Problem(rule="launch", says=says, mend=f"set cluster=1x{machine.cores()} parallel.dp=auto")


def folder_of(run: Run) -> Path:
    """RUN_DIR: one folder a run, under log.dir by its name."""
    return expanded(run.log.dir).absolute() / run.name


def from_here(folder: Path) -> str:
    """A folder as it is typed in this one."""
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def after(run: Run) -> str:
    """What a run that has trained is told at its end: the plan beside what was measured, and what to try next."""
    from ...trainer.rundir.measured import ran
    from ..pages.format import look, wrapped
    from ..pages.report_page import beside, incidents

    folder = folder_of(run)
    name = from_here(folder)
    following = (
        f"report {quote(name)}",
        *([f"generate {quote(name)} --prompt 'def '"] if run.model.family != "hf" else []),
        "plan conf=megatron_1t_6x8x64",
    )
    done = ran(folder)
    first = [line for each in incidents(done) for line in wrapped(each)]
    return "\n".join(
        ["", *first, *([""] if first else []), *beside(done, look()), "", "Next:", *(f"  {typed()} {each}" for each in following)]
    )


def typed() -> str:
    """What a user types to get this command again."""
    if shutil.which("distrain"):
        return "distrain"
    called = Path(sys.argv[0])
    return quote(os.path.relpath(called)) if called.name == "distrain" else "python -m distrain"


def fit(conf: str, overrides: Sequence[str], config_dir: Path | None) -> int:
    """Train a recipe; the exit status of the command."""
    from ..config.load import load

    return fit_run(lambda: load(conf, overrides, config_dir), [])


def fit_run(read: Callable[[], Run], stops: list[int]) -> int:
    """Train the run that `read` returns: refuse what can't run before anything is written or started; the exit status of the command.

    `stops` grows by the signals that asked the run to stop, also where it came to its end all the same.
    """
    from ...trainer.launch.admission import FileChecks, epoch_warnings, prepare_files
    from ...trainer.launch.resolve import hosts
    from ...trainer.plan.plan import make_plan
    from ...trainer.system.open_files import allowed, held
    from ..pages.console import live, show, tell, tell_problems
    from ..pages.format import one_line
    from ..pages.hosts_page import looked
    from ..pages.plan_page import verdict

    checks = FileChecks()
    for settled in (machine.known(), True):  # what can't run at all is refused before this machine is measured
        run = read()
        plan = make_plan(run)
        if problems := (*refused(run, plan), *checks.look(run).problems):
            tell_problems(problems)
            return CANNOT
        if settled:
            break
        if unmeasured := machine.measure(show):
            tell_problems([unmeasured])
    show(verdict(plan))
    files = prepare_files(run, live)
    warnings = (*remarks(run, plan), *epoch_warnings(run, plan, files.data))
    for line in (*files.remarks, *(f"warning: {each}" for each in warnings)):
        show(one_line(line))
    found_hosts = hosts(run)
    few = allowed(held(plan.world, len(found_hosts)))
    problems = files.problems or ((few,) if few else ())
    if not problems and run.launch.preflight and found_hosts:
        problems = looked(found_hosts, run, plan, show)
    if problems:
        tell_problems(problems)
        return CANNOT
    status, wrong = train(run, plan, show, live, stops)
    for each in wrong:
        tell(f"distrain: {each}")
    if status == FINE:
        show(after(run))
    return status


def train(
    run: Run, plan: Plan, show: Callable[[str], None], live: Callable[[str], None], stops: list[int] | None = None
) -> tuple[int, Sequence[str]]:
    """Write the run's folder, start its ranks, and wait: (exit status, what went wrong, a line each).

    `stops` grows by the signals that asked the run to stop, also where it came to its end all the same.
    """
    from ...trainer.launch.restart import started
    from ...trainer.launch.single_host import signals
    from ...trainer.rundir.checkpoints import newest_saved
    from ...trainer.rundir.files import put_back, read, remove_end, write, write_end
    from ...trainer.rundir.lock import Taken, held

    folder = folder_of(run)
    checkpoints = folder / "checkpoints"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            warning = stack.enter_context(held(folder))
            before, (saved, _) = read(folder), newest_saved(checkpoints)
            write(run, plan, folder)
        except Taken as error:
            return 1, [str(error)]
        except OSError as error:
            return 1, [f"{folder} can't be written ({(error.strerror or str(error)).lower()}): make room there, or set log.dir to another"]
        if warning:
            show(f"warning: {warning}")
        show(f"run folder {folder}")
        remove_end(folder)
        with signals() as asked:
            ended = started(run, plan, folder, show, live, noted=asked)
        if stops is not None:
            stops += [number for number, _ in asked]
        # With nothing to train, the words made nothing of what is there. After a restart, the last start's ranks do not know of all steps.
        untrained = ended.status == 0 and all(each.step is None for each in ended.ranks) and newest_saved(checkpoints)[0] == saved
        if ended.refused or (untrained and "run.json" in before):
            put_back(before, folder)
        if not ended.refused:
            write_end(folder, ended.status, ended.says)
    return ended.status, [ended.says] if ended.says else []
