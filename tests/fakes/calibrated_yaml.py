"""The values of a file that `distrain calibrate` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def calibrated_values(file: Path) -> dict[str, Any]:
    """Return what the file sets, without its defaults."""
    return {key: _as_number(value) for key, value in yaml.safe_load(file.read_text()).items() if key != "defaults"}


def _as_number(value: Any) -> Any:
    """YAML 1.1 of the yaml package reads 1.5e9 as text."""
    if isinstance(value, dict):
        return {key: _as_number(each) for key, each in value.items()}
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
