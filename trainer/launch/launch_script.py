"""The launch of a run as a bash script, for people who start its ranks by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shlex import quote

from ..rundir.files import LAUNCH_FOLDER, run_folder, start_file
from ..spec.numbers.as_text import plural
from ..spec.problem import Unreadable, one_line
from ..spec.run import Run
from .commands.command import LaunchCommands
from .file_checks import WOULD_REFUSE
from .hosts_and_commands import launch_commands, resolve_hosts

START_HEADING = "Start the ranks"  # of the lines that people read, after the files that ranks read


def launch_script(run: Run) -> str:
    """Return the script that launches a run; raises Unreadable where it has no layout or its launch section is wrong."""
    from ..plan.plan import make_plan
    from ..plan.save_interval import likely_save_seconds, stop_seconds

    plan = make_plan(run)
    if plan.mesh is None:
        raise Unreadable(plan.problems)
    save = likely_save_seconds(plan.run, plan.saving.seconds if plan.saving else None) if plan.run else None
    notice = stop_seconds(run, plan.time.step if plan.time else None, save)
    found = resolve_hosts(run)
    spares = ", ".join(host.name for host in found.spares)
    remark = (f"spares, which only fit uses: {spares}",) if spares else ()
    launch = launch_commands(run, found.hosts, notice=notice)
    return "\n".join(script_lines(run, replace(launch, remarks=(*launch.remarks, *remark))))


def resume_warnings(run: Run) -> Iterator[str]:
    """Warn of what the ranks would refuse in the run's folder."""
    from ..rundir.resume import check_resume

    for problem in check_resume(run, run_folder(run)).problems:
        yield f"warning: {WOULD_REFUSE}: {problem}"


def script_lines(run: Run, launch: LaunchCommands) -> Iterator[str]:
    """Yield the script's lines: it writes what the ranks read and runs the launch's commands, and can be started in any folder.

    With a command per host, the script is run on each host, with the host's number as its argument.
    """
    folder, cluster = run_folder(run), run.cluster
    yield _comment(f"{run.name}, launch={run.launch.name}: {plural(cluster.nodes, 'node')} x {cluster.gpus}")
    yield "set -euo pipefail"
    yield f"mkdir -p {quote(str(folder / LAUNCH_FOLDER))}"
    if run.launch.name != "deepspeed":  # whose ranks read what fit writes
        yield _comment("what the ranks read, a long line; what starts the ranks follows")
        yield from _write_file(*start_file(run))
    yield ""
    yield _comment(START_HEADING)
    for remark in launch.remarks:
        yield _comment(remark)
    for file in launch.files:
        yield from _write_file(file.path, file.text.rstrip("\n"))
        if file.mode & 0o100:
            yield f"chmod {file.mode:o} {quote(str(file.path))}"
    yield ""
    yield from launch.lines
    if len(launch.commands) > 1:
        yield from _command_of_host(launch)
        return
    for command in launch.commands:
        if command.host:
            yield _comment(f"on {command.host}")
        yield str(command)


def _command_of_host(launch: LaunchCommands) -> Iterator[str]:
    """Yield a case statement that runs the command of the host whose number is the script's argument."""
    usage = f"give the number of this host: {', '.join(f'{number} on {each.host}' for number, each in enumerate(launch.commands))}"
    yield _comment(usage)
    yield "case ${1-} in"
    for number, each in enumerate(launch.commands):
        yield f"{number}) {each} ;;"
    yield f"*) echo {quote(usage)} >&2; exit 2 ;;"
    yield "esac"


def _write_file(path: Path, text: str) -> Iterator[str]:
    """Yield lines that write a file under another name and rename it: the script of another host may have written it, and ranks read it.
    In containers scripts may have one process id, on other hosts."""
    part = f'{quote(f"{path}.")}"$HOSTNAME.$$"'
    yield f"cat > {part} <<'END'"
    yield text
    yield "END"
    yield f"mv {part} {quote(str(path))}"


def _comment(text: str) -> str:
    return f"# {one_line(text)}"
