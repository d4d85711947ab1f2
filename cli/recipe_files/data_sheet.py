"""What is known of a device before it is measured: a GPU's option of conf/device, or the CPU's cached rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...trainer.machine.measure_machine import DEVICE_OPTIONS, cached_facts
from ...trainer.machine.measurement import DeviceMeasurement
from ..config.composition import to_plain
from ..config.yaml_file import read_config
from ..keys import config_files


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """An option of conf/device that describes the GPU that was measured: its name and its keys."""

    option: str
    device: Mapping[str, Any]


def data_sheet(option: str, config_dir: Path | None) -> DataSheet:
    """Return an option of group device; raises Unreadable if it can't be read."""
    return DataSheet(option=option, device=to_plain(read_config(config_files.options("device", config_dir)[option]), []))


def sheet_of_gpu(gpu: str, config_dir: Path | None) -> DataSheet | None:
    """Return the option of conf/device that describes a GPU by its name; None where there is none."""
    return data_sheet(DEVICE_OPTIONS[gpu], config_dir) if gpu in DEVICE_OPTIONS else None


def known_figures(measured: DeviceMeasurement, sheet: DataSheet | None) -> tuple[str, dict[str, float]]:
    """Return where a plan's figures come from without this measurement, and the figures: a GPU's data sheet, or the CPU's cached rates."""
    if measured.kind == "cuda":
        figures = {**sheet.device, **{f"peak.{key}": each for key, each in sheet.device.get("peak", {}).items()}} if sheet else {}
        return (f"device={sheet.option}" if sheet else ""), {
            key: float(each) for key, each in figures.items() if isinstance(each, int | float)
        }
    facts = cached_facts() if measured.hosts == 1 else None  # of this machine, which may be none of several hosts
    cpu = facts["cpu"] if facts else None
    if cpu is None:
        return "", {}
    share = cpu["cores"] / measured.devices
    rates = {f"peak.{key}": rate * share for key, rate in cpu["flops"].items()}
    link = {f"inside.{key}": float(each) for key, each in cpu["link"].items()}  # type: ignore[arg-type]
    return "device=cpu", {**rates, "bandwidth": cpu["bandwidth"] * share, **link}


def figures_to_type(measured: DeviceMeasurement, sheet: DataSheet | None) -> tuple[str, ...]:
    """Return what remains to be typed into the files."""
    if measured.kind == "cpu":
        return ()
    between = ("cluster.between, if there are more machines",) if measured.hosts == 1 else ()
    if sheet:
        return between
    peaks = "the dense peak of each precision from the data sheet, then calibrate again with device=NAME and this folder as --config-dir"
    return (f"{measured.name} has no file in conf/device, so its peaks are estimates: type {peaks}", *between)
