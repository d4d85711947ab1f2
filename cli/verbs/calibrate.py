"""`distrain calibrate`: measures this machine, or several hosts, and writes it as options of groups device and cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..pages.printing import print_error, print_json, print_live_line, print_output, print_problems, print_unwritten
from .common_options import ConfigDir
from .exit_status import FAILED

if TYPE_CHECKING:
    from ...trainer.launch.hosts.hostfile import Host
    from ...trainer.machine.cluster_measurement import ClusterMeasurement
    from ...trainer.machine.measurement import DeviceMeasurement, Kind
    from ...trainer.spec.problem import Problem
    from ..recipe_files.calibrated_files import CalibratedFiles
    from ..recipe_files.data_sheet import DataSheet

FOLDER, NAME = "calibrated", "measured"
HOST_ARGUMENTS = ("launch", "launch.hostfile", "launch.include", "launch.exclude")
USAGE = "distrain calibrate [device=OPTION] [launch=deepspeed launch.hostfile=FILE] [-o DIR] [--name NAME]"
TRIAL_RECIPE = "quickstart"  # a recipe that composes with every option of every group
MOST_DEVICES = 64  # of a machine: of a CPU, processes that start at once


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """What is to be measured: the device's option, if one was named, and the hosts, if they are not this machine alone."""

    sheet: DataSheet | None
    hosts: tuple[Host, ...]
    devices: int | None

    @property
    def kind(self) -> Kind | None:
        """The kind of device; None leaves it to the machine."""
        return self.sheet.device.get("kind", "cuda") if self.sheet else None


def calibrate(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[device=OPTION] [launch=deepspeed launch.hostfile=FILE]", show_default=False)
    ] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="DIR", help="Folder of the two files; created where its parent exists.")
    ] = FOLDER,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of both options.")] = NAME,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            metavar="N",
            min=1,
            max=MOST_DEVICES,
            show_default=False,
            help="GPUs (default: all), or processes of a CPU (default: 2); with hosts, of each (default: its slots).",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Measure this machine for about ten seconds, and write DIR/device/NAME.yaml and DIR/cluster/NAME.yaml, which plans read.

    Measured: matrix products, a copy, launches, memory, an all-reduce between all devices. The peak of a GPU is that of its data sheet
    in conf/device, found by the GPU's name; device=OPTION names another, or cpu. End other programs first.

    With launch=deepspeed: measure all hosts of launch.hostfile (or of the Slurm job) at once over ssh, as fit reaches them, and the links
    between them; launch.include and launch.exclude choose hosts. Slow hosts are named. On one machine cluster.between is left to you.

    Exit status: 0; 1 measuring or writing failed; 2 the command line is wrong.

    \b
    distrain calibrate
    distrain calibrate -o mine --name lab_a100
    distrain calibrate device=cpu --devices 4 --force
    distrain calibrate launch=deepspeed launch.hostfile=hosts
    distrain plan conf=quickstart cluster=measured --config-dir calibrated
    """
    from ...trainer.launch.hosts.ssh import SshInterrupted
    from ..recipe_files.calibrated_files import calibrated_files

    request = _read_arguments(arguments or (), devices, config_dir)
    files = calibrated_files(output, name, force=force)
    try:
        found = _measure(request)
    except SshInterrupted as stop:
        print_error(f"distrain: {stop} while the hosts were measured")
        return 128 + stop.number
    return _write_result(found, request.sheet, files, config_dir, as_json=as_json)


def _write_result(
    found: DeviceMeasurement | ClusterMeasurement | Sequence[Problem],
    sheet: DataSheet | None,
    files: CalibratedFiles,
    config_dir: Path | None,
    *,
    as_json: bool,
) -> int:
    """Write the two files and print the result, or print the problems. Return the exit status."""
    from ...trainer.machine.cluster_measurement import ClusterMeasurement
    from ...trainer.machine.measurement import DeviceMeasurement
    from ..recipe_files.calibrated_figures import cluster_figures, device_figures, figure_values
    from ..recipe_files.calibrated_files import write_files
    from ..recipe_files.data_sheet import sheet_of_gpu

    if not isinstance(found, DeviceMeasurement | ClusterMeasurement):
        print_problems(found)
        return FAILED
    hosts = found if isinstance(found, ClusterMeasurement) else None
    measured = found.slowest if isinstance(found, ClusterMeasurement) else found
    sheet = sheet_of_gpu(measured.name, config_dir) if measured.kind == "cuda" and sheet is None else sheet
    device, cluster = device_figures(measured, sheet), cluster_figures(measured, hosts)
    try:
        write_files(files, measured, device, cluster, hosts.slow_hosts if hosts else ())
    except OSError as error:
        return print_unwritten(str(error.filename or files.folder), error)
    written = {"device": (files.device, figure_values(device)), "cluster": (files.cluster, figure_values(cluster))}
    return _print_result(measured, hosts, sheet, written, _plan_words(measured, files.name, str(files.folder)), as_json=as_json)


def _plan_words(measured: DeviceMeasurement, name: str, output: str) -> str:
    """Return the words with which TRIAL_RECIPE is planned on what was measured; its batch of 16 holds two ranks' micro-batches of 8."""
    batch = f" train.batch={8 * measured.all_devices}" if measured.all_devices > 2 else ""
    return f"cluster={name}{batch} --config-dir {quote(output)}"


def _measure(request: CalibrationRequest) -> DeviceMeasurement | ClusterMeasurement | Sequence[Problem]:
    """Measure this machine or the hosts; return the problems where that fails. Raises SshInterrupted once a stop is requested."""
    from ...trainer.launch.measure_hosts import measure_hosts
    from ...trainer.machine.measurement import measure_devices
    from ...trainer.spec.problem import Problem

    def show(text: str) -> None:
        print_live_line(f"measuring {text} ...")

    show("this machine" if not request.hosts else "the hosts")
    try:
        if request.hosts:
            return measure_hosts(request.hosts, request.kind, show)
        found = measure_devices(request.kind, request.devices, show)
        return [found] if isinstance(found, Problem) else found
    finally:
        print_live_line("")


def _read_arguments(arguments: Sequence[str], devices: int | None, config_dir: Path | None) -> CalibrationRequest:
    """Read device=OPTION and the words that name hosts; raises Unreadable for an option that does not exist, for hosts that can't be
    measured together, and for any other argument."""
    from ...trainer.launch.hosts_and_commands import hosts_to_measure
    from ...trainer.spec.problem import Problem, Unreadable
    from ..config.load import load_recipe
    from ..keys import config_files
    from ..recipe_files.data_sheet import data_sheet

    given: dict[str, str] = {}
    for each in arguments:
        key, equals, value = each.partition("=")
        if not equals or key not in ("device", *HOST_ARGUMENTS):
            raise Unreadable([Problem(rule="argument", says=f"calibrate takes no {each}", mend=USAGE)])
        if key in given:
            raise Unreadable([Problem(rule="argument", says=f"calibrate takes one {key}=", mend=USAGE)])
        given[key] = value
    option, known = given.get("device"), config_files.options("device", config_dir)
    if option is not None and option not in known:
        raise Unreadable([Problem(rule="option", says=f"no device {option}", mend=config_files.suggest_option(option, known))])
    if not given:
        return CalibrationRequest(sheet=None, hosts=(), devices=devices)
    run = load_recipe(TRIAL_RECIPE, arguments, config_dir)  # raises for figures that no plan would read, too
    sheet = data_sheet(option, config_dir) if option is not None else None
    automatic = sheet is not None and sheet.device.get("kind") == "auto"
    return CalibrationRequest(sheet=None if automatic else sheet, hosts=hosts_to_measure(run, devices), devices=devices)


def _print_result(
    measured: DeviceMeasurement,
    hosts: ClusterMeasurement | None,
    sheet: DataSheet | None,
    written: Mapping[str, tuple[Path, dict[str, Any]]],
    words: str,
    *,
    as_json: bool,
) -> int:
    """Print the table or the JSON document, what was written, and the next command."""
    from ..arguments.command_name import command_name
    from ..pages.calibrate_page import between_rows, calibrate_text, measured_rows, spread_text
    from ..pages.text_layout import stdout_style, wrap
    from ..recipe_files.data_sheet import figures_to_type, known_figures

    source, known = known_figures(measured, sheet)
    rows = (*measured_rows(measured, known), *(between_rows(hosts) if hosts else ()))
    command = f"{command_name()} plan conf={TRIAL_RECIPE} {words}"
    left = figures_to_type(measured, sheet)
    if as_json:
        files = {group: {"file": str(file), "values": values} for group, (file, values) in written.items()}
        several = (
            {"hosts": hosts.hosts, "between": {"alone": hosts.alone, "together": hosts.together}, "slow": hosts.slow_hosts} if hosts else {}
        )
        known_rows = {"source": source, "rows": rows}
        return print_json({"measured": measured, **several, "known": known_rows, **files, "to_type": left, "next": command})
    print_output(calibrate_text(measured, rows, source, stdout_style()))
    if hosts and hosts.spreads:
        print_output(f"\n{spread_text(hosts, stdout_style())}")
    print_output("\n".join(["", *(f"wrote {file}" for file, _ in written.values())]))
    for each in left:
        print_output("\n".join(wrap(f"to type: {each}", hang="  ")))
    return print_output(f"next: {command}")
