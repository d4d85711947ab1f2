"""`distrain calibrate`: measures this machine, and writes it as options of groups device and cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..pages.printing import print_json, print_live_line, print_output, print_problems, print_unwritten
from .common_options import ConfigDir
from .exit_status import FAILED

if TYPE_CHECKING:
    from ...trainer.machine.measurement import DeviceMeasurement
    from ..recipe_files.data_sheet import DataSheet

FOLDER, NAME = "calibrated", "measured"
DEVICE = "device="
TRIAL_RECIPE = "quickstart"  # a recipe that composes with every option of every group


def calibrate(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[device=OPTION]", show_default=False)] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="DIR", help="Folder of the two files; created where its parent exists.")
    ] = FOLDER,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of both options.")] = NAME,
    devices: Annotated[
        int | None,
        typer.Option("--devices", metavar="N", min=1, show_default=False, help="GPUs (default: all), or processes of a CPU (default: 2)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Measure this machine for about ten seconds, and write DIR/device/NAME.yaml and DIR/cluster/NAME.yaml, which plans read.

    Measured: matrix products, a copy, launches, memory, an all-reduce between all devices. The peak of a GPU is that of its data sheet
    in conf/device, found by the GPU's name; device=OPTION names another, or cpu. Links between machines are not measured: set
    cluster.between yourself. End other programs first.

    Exit status: 0; 1 measuring or writing failed; 2 the command line is wrong.

    \b
    distrain calibrate
    distrain calibrate -o mine --name lab_a100
    distrain calibrate device=cpu --devices 4 --force
    distrain plan conf=quickstart cluster=measured --config-dir calibrated
    """
    from ...trainer.machine.measurement import measure_devices
    from ...trainer.spec.problem import Problem
    from ..recipe_files.calibrated_figures import cluster_figures, device_figures, figure_values
    from ..recipe_files.calibrated_files import calibrated_files, write_files
    from ..recipe_files.data_sheet import sheet_of_gpu

    sheet = _named_sheet(arguments or (), config_dir)
    files = calibrated_files(output, name, force=force)
    print_live_line("measuring this machine ...")
    kind = sheet.device.get("kind", "cuda") if sheet else None
    try:
        measured = measure_devices(kind, devices, lambda text: print_live_line(f"measuring {text} ..."))
    finally:
        print_live_line("")
    if isinstance(measured, Problem):
        print_problems([measured])
        return FAILED
    if measured.kind == "cuda" and sheet is None:
        sheet = sheet_of_gpu(measured.name, config_dir)
    device, cluster = device_figures(measured, sheet), cluster_figures(measured)
    try:
        write_files(files, measured, device, cluster)
    except OSError as error:
        return print_unwritten(str(error.filename or files.folder), error)
    written = {"device": (files.device, figure_values(device)), "cluster": (files.cluster, figure_values(cluster))}
    return _print_result(measured, sheet, written, f"cluster={name} --config-dir {quote(output)}", as_json=as_json)


def _named_sheet(arguments: Sequence[str], config_dir: Path | None) -> DataSheet | None:
    """Return the option that device=OPTION names, None where it leaves the device to the machine; raises Unreadable for an unknown one,
    and for any other argument."""
    from ...trainer.spec.problem import Problem, Unreadable
    from ..config.load import load_recipe
    from ..keys import library
    from ..recipe_files.data_sheet import data_sheet

    wrong = [each for each in arguments if not each.startswith(DEVICE)]
    if wrong or len(arguments) > 1:
        says = f"calibrate takes no {wrong[0]}" if wrong else "calibrate takes one device="
        raise Unreadable([Problem(rule="argument", says=says, mend="distrain calibrate [device=OPTION] [-o DIR] [--name NAME]")])
    if not arguments:
        return None
    option, known = arguments[0].removeprefix(DEVICE), library.options("device", config_dir)
    if option not in known:
        raise Unreadable([Problem(rule="option", says=f"no device {option}", mend=library.suggest_option(option, known))])
    load_recipe(TRIAL_RECIPE, (f"{DEVICE}{option}",), config_dir)  # raises for figures that no plan would read
    sheet = data_sheet(option, config_dir)
    return None if sheet.device.get("kind") == "auto" else sheet


def _print_result(
    measured: DeviceMeasurement, sheet: DataSheet | None, written: Mapping[str, tuple[Path, dict[str, Any]]], words: str, *, as_json: bool
) -> int:
    """Print the table or the JSON document, what was written, and the next command."""
    from ..arguments.command_name import command_name
    from ..pages.calibrate_page import calibrate_text, measured_rows
    from ..pages.text_layout import stdout_style, wrap
    from ..recipe_files.data_sheet import figures_to_type, known_figures

    source, known = known_figures(measured, sheet)
    rows = measured_rows(measured, known)
    command = f"{command_name()} plan conf=quickstart {words}"
    left = figures_to_type(measured, sheet)
    if as_json:
        files = {group: {"file": str(file), "values": values} for group, (file, values) in written.items()}
        return print_json({"measured": measured, "known": {"source": source, "rows": rows}, **files, "to_type": left, "next": command})
    print_output(calibrate_text(measured, rows, source, stdout_style()))
    print_output("\n".join(["", *(f"wrote {file}" for file, _ in written.values())]))
    for each in left:
        print_output("\n".join(wrap(f"to type: {each}", hang="  ")))
    return print_output(f"next: {command}")
