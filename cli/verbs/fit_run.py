"""One run of `distrain fit`: check that it can start, prepare its files, train it, and print its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...trainer.launch import train_run
from ...trainer.launch.admission import StartCheck, check_start, start_warnings
from ...trainer.launch.file_checks import FileChecks, epoch_warnings, prepare_files
from ...trainer.launch.hosts.ssh import SshInterrupted
from ...trainer.launch.hosts_and_commands import for_first_host
from ...trainer.launch.rank.channel import STOPPED
from ...trainer.launch.train_run import TrainingResult
from ...trainer.machine import measure_machine as machine
from ...trainer.plan.plan import make_plan
from ...trainer.plan.plan_data import Plan
from ...trainer.rundir.absolute_paths import relative_folder
from ...trainer.rundir.files import run_folder
from ...trainer.spec.problem import one_line
from ...trainer.spec.run import Run
from ...trainer.system.open_files import needed_files, raise_limit
from ..arguments.command_name import command_name
from ..pages.background_printing import STOP_PATIENCE, is_printing_blocked, print_in_background
from ..pages.hosts_page import run_preflight_and_show
from ..pages.next_steps import next_commands
from ..pages.plan_facts import verdict
from ..pages.printing import print_error, print_line, print_live_line, print_problems
from .exit_status import FAILED, OK

NOT_STARTED = TrainingResult(status=FAILED)


def fit_run(read: Callable[[], Run]) -> TrainingResult:
    """Train the run that `read` returns. What can't run is refused before anything is written or started."""
    ready = _check(read)
    if ready is None:
        return NOT_STARTED
    run, plan, start = ready
    hosts = start.hosts
    print_line(verdict(plan))
    files = prepare_files(run, print_live_line)
    warnings = (*start_warnings(run, plan), *epoch_warnings(run, plan, files.data))
    for line in (*files.remarks, *(f"warning: {each}" for each in warnings)):
        print_line(one_line(line))
    too_few_files = raise_limit(needed_files(plan.world, len(hosts) + len(start.spares)))
    problems = files.problems or ((too_few_files,) if too_few_files else ())
    if not problems and run.launch.preflight and hosts:
        try:
            report = run_preflight_and_show(hosts, start.spares, run, plan, print_line)
        except SshInterrupted as stop:
            print_error(f"distrain: {stop} while the hosts were asked")
            return TrainingResult(status=128 + stop.number)
        problems, hosts = report.problems, report.hosts
        if run.launch.address and hosts[0] != start.hosts[0]:
            print_line(f"launch.address={run.launch.address} is not used: it belongs to {start.hosts[0].name}")
            run = for_first_host(run, start.hosts[0], hosts[0])
    if problems:
        print_problems(problems)
        return NOT_STARTED
    with print_in_background() as printer:
        result = train_run.train_run(run, plan, hosts, printer.show, printer.live)
        if result.status == STOPPED or result.status > 128:
            printer.patience = STOP_PATIENCE
    if result.says and not is_printing_blocked():
        print_error(f"distrain: {result.says}")
    if result.status == OK:
        print_line(closing_text(run))
    return result


def _check(read: Callable[[], Run]) -> tuple[Run, Plan, StartCheck] | None:
    """Return the run, its plan and, with its hosts, the check of its start; None where problems prevent it, which are printed.

    What can't run at all is refused before this machine is measured; then the run is read again, with the measured rates.
    """
    checks = FileChecks()
    for last in (False, True):
        run = read()
        plan = make_plan(run)
        start = check_start(run, plan)
        if problems := (*start.problems, *checks.check_run(run).problems):
            print_problems(problems)
            return None
        if last or machine.is_measured(run.cluster.device.kind):
            break
        if unmeasured := machine.measure_once(lambda: read().cluster.device.kind, print_line):
            print_problems([unmeasured])
    return run, plan, start


def closing_text(run: Run) -> str:
    """The text at the end of a run that has trained: incidents, planned against measured figures, and what to try next."""
    from ...trainer.rundir.measured_run import read_measured_run
    from ...trainer.rundir.run_summary import newest_checkpoint
    from ..pages.report_page import incident_lines, planned_measured_table
    from ..pages.text_layout import stdout_style, wrap

    folder = run_folder(run)
    saved, _ = newest_checkpoint(folder)
    commands = next_commands(run, relative_folder(folder), has_checkpoint=saved is not None)
    trained = replace(read_measured_run(folder), saving=())  # each save has had its line
    incidents = [line for each in incident_lines(trained) for line in wrap(each)]
    return "\n".join(
        [
            "",
            *incidents,
            *([""] if incidents else []),
            *planned_measured_table(trained, stdout_style()),
            "",
            "Next:",
            *(f"  {command_name()} {each}" for each in commands),
        ]
    )
