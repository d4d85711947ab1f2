"""Writes what `distrain calibrate` measured as an option of group device and one of group cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...trainer.machine.cluster_measurement import SlowHost
from ...trainer.machine.measurement import DeviceMeasurement
from ...trainer.spec.numbers.as_text import plural, seconds_text
from ...trainer.spec.problem import Problem, Unreadable, one_line
from ...trainer.system.atomic_file import write_atomically
from ...trainer.system.regular_file import expand_home
from ..keys.config_files import distrain_version
from . import yaml_edit
from .calibrated_figures import Figure, si_number, slow_host_text

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")  # no shape, as 4x8 is one; no path; nothing that Hydra's grammar reads otherwise
DEVICE_ENTRY = "/device@device"  # of a cluster's defaults


class CalibratedFiles(NamedTuple):
    """The two files of one name."""

    folder: Path
    name: str

    @property
    def device(self) -> Path:
        """The option of group device."""
        return self.folder / "device" / f"{self.name}.yaml"

    @property
    def cluster(self) -> Path:
        """The option of group cluster."""
        return self.folder / "cluster" / f"{self.name}.yaml"


def calibrated_files(output: str, name: str, *, force: bool) -> CalibratedFiles:
    """Return the files to write; raises Unreadable with all that prevents it, before anything is measured."""
    problems = list(_name_problems(name))
    folder = expand_home(output)
    if output.strip() in ("", "-"):
        problems.append(Problem(rule="file", says=f"-o '{output}' is not the name of a folder", mend="name one, as -o calibrated"))
    elif not problems:
        problems += _file_problems(CalibratedFiles(folder, name), force=force)
    if problems:
        raise Unreadable(problems)
    return CalibratedFiles(folder, name)


def _name_problems(name: str) -> Iterator[Problem]:
    if not NAME.fullmatch(name):
        says = f"--name={name} is not the name of an option"
        yield Problem(rule="name", says=says, mend="a letter first, then letters, digits, _ and -, as in --name=lab_a100")
    elif yaml_edit.scalar(name) != name:
        yield Problem(rule="name", says=f"--name={name} is no text to YAML", mend=f"choose another, as --name={name}_device")


def _file_problems(files: CalibratedFiles, *, force: bool) -> Iterator[Problem]:
    """Yield what prevents the files: a parent that does not exist, one that is no folder or can't be written to, a file that exists."""
    folder = files.folder
    if not folder.is_dir() and not folder.absolute().parent.is_dir():
        says = f"-o {folder}: there is no folder {folder.absolute().parent}"
        yield Problem(rule="file", says=says, mend="create it first")
        return
    for each in (folder, files.device.parent, files.cluster.parent):
        if os.path.lexists(each) and not each.is_dir():
            yield Problem(rule="file", says=f"{each} is not a folder", mend="choose another with -o")
            return
        made = each if each.is_dir() else each.absolute().parent
        if made.is_dir() and not os.access(made, os.W_OK | os.X_OK):
            yield Problem(rule="file", says=f"no file can be created in {made}", mend="choose another folder with -o")
            return
    for file in (files.device, files.cluster):
        if os.path.lexists(file) and not file.is_file():
            yield Problem(rule="file", says=f"{file} is not a plain file", mend="choose another --name")
        elif os.path.lexists(file) and not force:
            yield Problem(rule="file", says=f"{file} already exists", mend="--force replaces it, or choose another --name")


def write_files(
    files: CalibratedFiles, measured: DeviceMeasurement, device: Sequence[Figure], cluster: Sequence[Figure], slow: Sequence[SlowHost] = ()
) -> None:
    """Write both files and the folders that they need, with a comment for each slow host; raises OSError."""
    head = _head(measured) + "".join(one_line(f"# {slow_host_text(each)}") + "\n" for each in slow)
    where = "this machine" if measured.hosts == 1 else f"{plural(measured.hosts, 'host')}, each"
    texts = {
        files.device: f"# {_what(measured)}\n{head}{yaml_text(device)}",
        files.cluster: (
            f"# {where}: {plural(measured.devices, 'device')}, {_what(measured)}\n{head}"
            f"defaults:\n  - {DEVICE_ENTRY}: {files.name}\n  - _self_\n{yaml_text(cluster)}"
        ),
    }
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.encode())


def _what(measured: DeviceMeasurement) -> str:
    threads = f", a process of {plural(measured.threads, 'thread')}" if measured.kind == "cpu" else ""
    return one_line(f"{measured.name}{threads}: measured by distrain calibrate on {measured.date}")


def _head(measured: DeviceMeasurement) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in {"distrain": distrain_version(), **measured.versions}.items())
    how = "the best of their rates" if measured.kind == "cpu" else "the slowest of their rates"
    what = plural(measured.devices, "device")
    if measured.hosts > 1:
        what, how = f"{what} of each of {plural(measured.hosts, 'host')}", f"{how} on the slowest host"
    took = f"{what} at once, {how}, {seconds_text(measured.seconds)}"
    return one_line(f"# {versions}; {took}; {measured.load:.2f} processes per core ran in the minute before") + "\n"


def yaml_text(figures: Sequence[Figure]) -> str:
    """Return figures as YAML, a comment at the end of each line."""
    lines = []
    for key, value, comment in figures:
        indent, _, name = key.rpartition(".")
        text = f"{'  ' if indent else ''}{name}:" + ("" if isinstance(value, dict) else f" {_scalar(value)}")
        lines.append(one_line(f"{text}  # {comment}" if comment else text))
    # The first of a section's figures begins it, where no line of its own does.
    for at, (key, _, _) in reversed(list(enumerate(figures))):
        section = key.rpartition(".")[0]
        if section and not any(other == section or other.startswith(f"{section}.") for other, _, _ in figures[:at]):
            lines.insert(at, f"{section}:")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return si_number(value)
    return str(value) if isinstance(value, int) else yaml_edit.scalar(str(value))
