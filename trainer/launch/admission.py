"""Whether a run can be started here: its hosts, and the problems that prevent it. file_checks.py checks its files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

from ..machine import measure_machine as machine
from ..machine.measure_machine import CPU_RANKS_PER_CORE
from ..plan.costs.roofline import HOPPER_FP8
from ..plan.engines import ENGINES
from ..plan.fixes import engine_problems
from ..plan.plan_data import Plan
from ..plan.rules.hybrid_rule import computes_by_fla
from ..plan.rules.unused_keys import RULE as UNUSED_KEY_RULE
from ..spec.numbers.as_text import plural
from ..spec.problem import Problem, Unreadable
from ..spec.run import Device, Run
from ..system.cpu import cpu_count
from .commands.deepspeed import RUNNER_PROGRAMS
from .hosts.hostfile import Host
from .hosts.needed_packages import FLA_PACKAGES
from .hosts.slurm_nodes import slurm_job
from .hosts_and_commands import RunHosts, nodes_problem, resolve_hosts

SINK_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}  # log sink -> the package that it needs
DUALPIPEV_RELEASE = (0, 19, 8)  # the first release of DeepSpeed with DualPipeV

BAD_TRITON = ((3, 4), (3, 7, 1))  # fla-core 0.6.0, chunk_bwd_dqkwg in fla/ops/common/chunk_o.py: from the first, before the second


@dataclass(frozen=True, kw_only=True)
class StartCheck:
    """The problems that prevent a start, and the run's hosts and spares (none for launch=local, or where they are a problem)."""

    problems: tuple[Problem, ...]
    hosts: tuple[Host, ...] = ()
    spares: tuple[Host, ...] = ()


def check_start(run: Run, plan: Plan) -> StartCheck:
    """Resolve the run's hosts, and find what prevents a start: in the plan, the engine, the launcher, this machine."""
    problems = [*plan.problems, *engine_problems(run)]
    found = RunHosts()
    by_hand = [*_by_hand_problems(run)]
    try:
        found = resolve_hosts(run)
    except Unreadable as error:
        problems += [each for each in error.problems if not by_hand or each.rule != "hostfile"]
    problems += by_hand or _launcher_problems(run)
    row = ENGINES.get(plan.engine or "")
    if run.cluster.device.kind == "cpu" and run.train.precision == "fp16" and not (row and row.fp16_on_cpu):
        says = "train.precision=fp16 does not run on a CPU: DeepSpeed accepts it only on the few that multiply in fp16"
        problems.append(Problem(rule="precision", says=says, mend="set train.precision to fp32 or bf16, or engine=native"))
    if missing := schedule_problem(run, plan.engine, machine.package_version("deepspeed")):
        problems.append(missing)
    if computes_by_fla(run) and (lack := fla_problem(run.cluster.device)):
        problems.append(lack)
    problems += _machine_problems(run, plan)
    return StartCheck(problems=tuple(problems), hosts=found.hosts, spares=found.spares)


def schedule_problem(run: Run, engine: str | None, deepspeed: str) -> Problem | None:
    """Return the problem of a schedule that this version of DeepSpeed does not have ("": none is installed); else None."""
    release = tuple(map(int, re.findall(r"\d+", deepspeed)[:3]))
    if engine != "pipe" or run.parallel.schedule != "dualpipev" or not release or release >= DUALPIPEV_RELEASE:
        return None
    needed = ".".join(map(str, DUALPIPEV_RELEASE))
    says = f"parallel.schedule=dualpipev with engine=pipe needs DeepSpeed {needed} or later, and {deepspeed} is installed"
    return Problem(rule="engine", says=says, mend="set engine=native, or install a later DeepSpeed")


def fla_problem(device: Device) -> Problem | None:
    """Return what train.linear_attention=fla lacks on a kind of device: a GPU, packages, or on Hopper a Triton whose results are right."""
    without = "set train.linear_attention=torch"
    if device.kind != "cuda":
        says = "train.linear_attention=fla does not run on a CPU: its kernels are written in Triton, for GPUs"
        return Problem(rule="linear_attention", says=says, mend=without)
    if missing := [package for package, module in FLA_PACKAGES.items() if find_spec(module) is None]:
        says = f"train.linear_attention=fla needs {', '.join(missing)}, not installed here"
        return Problem(rule="linear_attention", says=says, mend=f"pip install {' '.join(missing)}, or {without}")
    version = machine.package_version("triton")
    release = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if device.peak.get("fp8", 0.0) > HOPPER_FP8 and BAD_TRITON[0] <= release < BAD_TRITON[1]:
        says = f"train.linear_attention=fla: its gradients are wrong by Triton {version} on Hopper, where fla refuses it"
        return Problem(rule="linear_attention", says=says, mend=f"install Triton 3.7.1 or later, or {without}")
    return None


def start_warnings(run: Run, plan: Plan) -> Iterator[Problem]:
    """Warn of keys that do nothing in this run, of random tokens, of random weights where published ones are meant, and of log sinks whose
    package is missing."""
    yield from (each for each in plan.warnings if each.rule in (UNUSED_KEY_RULE, "recompute"))
    if run.optim.gradient_copy:
        says = "optim.gradient_copy=true is in the plan, but no engine here keeps such a copy"
        yield Problem(rule=UNUSED_KEY_RULE, says=says, mend="set optim.gradient_copy=false")
    if run.data.name == "synthetic":
        yield Problem(rule="data", says="data=synthetic: tokens are drawn at random", mend="choose data=NAME to train on text")
    meant = (
        f"model.lora.rank={run.model.lora.rank}" if run.model.lora.rank else "data=preferences" if run.data.name == "preferences" else ""
    )
    if meant and run.model.weights is None:
        yield Problem(rule="weights", says=f"{meant} begins with weights that are drawn at random", mend="set model.weights to a folder")
    for sink in run.log.sinks:
        if sink in SINK_PACKAGES and find_spec(SINK_PACKAGES[sink]) is None:
            says = f"log.sinks names {sink}, which is not installed: nothing is logged there"
            yield Problem(rule="sinks", says=says, mend=f"pip install {SINK_PACKAGES[sink]}")


def launch_warnings(run: Run) -> Iterator[Problem]:
    """Warn in a plan of a launch section that `fit` would refuse. launch=local is the default, also for clusters that are only planned."""
    yield from _by_hand_problems(run)
    if run.launch.name == "deepspeed" and run.launch.hostfile is None and run.launch.runner != "slurm":
        try:
            resolve_hosts(run)
        except Unreadable as error:
            yield from error.problems


def _by_hand_problems(run: Run) -> Iterator[Problem]:
    """Find launchers that `fit` does not run."""
    name = run.launch.name
    if name in ("torchrun", "slurm"):
        within = ", or fit launch=deepspeed launch.runner=slurm in a job" if name == "slurm" else ""
        mend = f"run what `distrain show --launch` prints for it{within}"
        yield Problem(rule="launch", says=f"fit does not start launch={name}", mend=mend)


def _launcher_problems(run: Run) -> Iterator[Problem]:
    """Find programs that launchers need, and a job."""
    launch = run.launch
    if launch.name == "deepspeed" and (missing := [name for name in RUNNER_PROGRAMS[launch.runner] if shutil.which(name) is None]):
        says = f"launch.runner={launch.runner} needs {' and '.join(missing)}, not found on PATH"
        yield Problem(rule="launch", says=says, mend=f"install {launch.runner}")
    elif launch.name == "deepspeed" and launch.runner == "slurm" and not slurm_job(os.environ):
        says = "launch.runner=slurm starts ranks on the nodes of a Slurm job, and this process runs in none"
        yield Problem(rule="launch", says=says, mend="run it under salloc or in a file for sbatch")


def _machine_problems(run: Run, plan: Plan) -> Iterator[Problem]:
    """Find a local run of more ranks than this machine has GPUs, or than its cores can serve."""
    if run.launch.name != "local":
        return
    if run.cluster.device.kind == "cuda":
        facts = machine.cached_facts()
        gpus = len(facts["cuda"]) if facts else 0
        if problem := nodes_problem(run):
            alone = f", or cluster=1x{gpus} parallel.dp=auto to use this machine only" if gpus else ""
            yield replace(problem, mend=f"{problem.mend}{alone}")
        elif plan.world > gpus:
            needs = "needs a GPU" if plan.world == 1 else "need as many GPUs"
            says = f"{plural(plan.world, 'rank')} on {run.cluster.device.name} {needs}, and this machine has {gpus or 'none'}"
            mend = f"set cluster=1x{gpus} parallel.dp=auto" if gpus else "set cluster=local"
            yield Problem(rule="launch", says=says, mend=mend)
    elif plan.world > CPU_RANKS_PER_CORE * cpu_count():
        says = f"{plan.world} ranks are more than this machine's {cpu_count()} cores can serve"
        yield Problem(rule="launch", says=says, mend=f"set cluster=1x{cpu_count()} parallel.dp=auto")
