"""`distrain doctor`: what this machine has and lacks for `distrain fit`, a line for each check."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from ..pages.printing import print_error, print_output
from .common_options import ConfigDir, recipe_and_overrides
from .exit_status import FAILED, OK

if TYPE_CHECKING:
    from ...trainer.launch.hosts_and_commands import RunHosts
    from ...trainer.machine.doctor_checks import MachineCheck
    from ...trainer.spec.run import Run

# The run that is trained on two ranks and in one process, as overrides of the quickstart.
TWO_RANKS = (
    "model=tiny",
    "model.layers=2",
    "cluster=local",
    "device=cpu",
    "cluster.gpus=2",
    "data=synthetic",
    "parallel.zero=2",
    "train.batch=8",
    "train.microbatch=2",
    "train.seq=32",
    "train.steps=3",
    "train.precision=fp32",
    "train.evaluate.every=0",
    "optim.warmup=1",
    "log.every=1",
    "log.sinks=[jsonl]",
    "name=doctor",
)


def doctor(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[conf=NAME KEY=VALUE ...]", show_default=False)] = None,
    config_dir: ConfigDir = None,
) -> int:
    """Check that this machine can run `distrain fit`: versions, room, and three steps on two ranks against one process.

    With a recipe: check what its run needs here: data, tokenizer, weights, devices, memory, disk. With hosts too: ask each of
    them first, as fit does before it starts anything there.

    Exit status: 0 a run can start; 1 something would stop it; 2 the command line is wrong.

    \b
    distrain doctor
    distrain doctor conf=mine.yaml data.path=corpus
    distrain doctor conf=llama3_8b launch=deepspeed launch.hostfile=FILE
    """
    from ...trainer.launch.hosts.ssh import SshInterrupted
    from ...trainer.system.stop_requests import StopSignal, raise_on_stop_signals

    try:
        with raise_on_stop_signals():  # a process that SIGTERM ends at once leaves its folder
            problem = _check_run(arguments, config_dir) if arguments else _print_checks(_machine_checks())
    except SshInterrupted as stop:
        print_error(f"distrain: {stop} while the hosts were asked")
        return 128 + stop.number
    except StopSignal as stop:
        return 128 + stop.number
    return FAILED if problem else OK


def _machine_checks() -> Iterator[MachineCheck]:
    """Check this machine for any run, the quick checks first; engines only where the packages are installed."""
    from ...trainer.launch.doctor_smoke_test import engine_checks
    from ...trainer.machine.doctor_checks import compiler_check, space_checks, version_checks
    from ..config.load import load_recipe
    from ..keys.config_files import distrain_version

    versions = [*version_checks(distrain_version())]
    yield from versions
    yield compiler_check(os.environ)
    yield from space_checks(Path.cwd())
    if not any(each.state == "problem" for each in versions):
        with TemporaryDirectory(prefix="distrain-doctor-") as folder:
            yield from engine_checks(load_recipe("quickstart", (*TWO_RANKS, f"log.dir={folder}")))


def _check_run(arguments: Sequence[str], config_dir: Path | None) -> bool:
    """Print the checks of a recipe's run, of its hosts first; return whether a problem would stop it. Raises Unreadable."""
    from ...trainer.launch.doctor_run_checks import checks_of_run
    from ...trainer.launch.hosts_and_commands import resolve_hosts
    from ...trainer.machine.doctor_checks import version_checks
    from ...trainer.machine.measure_machine import measure_once
    from ...trainer.plan.plan import make_plan
    from ..config.load import load_recipe
    from ..keys.config_files import distrain_version
    from ..pages.plan_facts import verdict

    conf, overrides = recipe_and_overrides(arguments, "doctor", config_dir)
    run = load_recipe(conf, overrides, config_dir)
    found = resolve_hosts(run)
    problem = bool(found.hosts) and _print_preflight(found, run)
    if not found.hosts and measure_once(lambda: load_recipe(conf, overrides, config_dir).cluster.device.kind, print_error) is None:
        run = load_recipe(conf, overrides, config_dir)  # with the rates that were measured
    plan = make_plan(run)
    problem |= _print_checks(version_checks(distrain_version()))
    problem |= _print_checks(checks_of_run(run, plan, verdict(plan).removeprefix(f"{plan.name} "), hosted=bool(found.hosts)))
    return problem


def _print_preflight(found: RunHosts, run: Run) -> bool:
    """Ask the run's hosts and spares and print their answers; return whether a problem would stop it. Raises SshInterrupted."""
    from ...trainer.plan.plan import make_plan
    from ..pages.hosts_page import run_preflight_and_show

    problems = run_preflight_and_show(found.hosts, found.spares, run, make_plan(run), print_output).problems
    for problem in problems:
        _print_wrapped(f"problem: {problem}")
    return bool(problems)


def _print_checks(checks: Iterable[MachineCheck]) -> bool:
    """Print each check as soon as it is done; return whether any of them is a problem."""
    problem = False
    for check in checks:
        _print_wrapped(str(check))
        problem |= check.state == "problem"
    return problem


def _print_wrapped(text: str) -> None:
    from ...trainer.spec.problem import one_line
    from ..pages.text_layout import wrap

    print_output("\n".join(wrap(one_line(text), hang=" " * 9)))
