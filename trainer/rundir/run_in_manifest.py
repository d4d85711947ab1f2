"""The run in a checkpoint's manifest: how it is written there and read back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..models.families import is_made_by_transformers
from ..spec.run import Run
from ..system.regular_file import read_plain

RUN_KEY, CONFIG_KEY = "run", "config"  # keys of a manifest's `extra`


def run_record(run: Run) -> dict[str, Any]:
    """Return the run as JSON values for a checkpoint's manifest.

    `run` is the whole run. For a model that transformers makes, `config` is its config.json, which holds more than our keys do.
    """
    kept = {RUN_KEY: msgspec.to_builtins(run)}
    if is_made_by_transformers(run.model):
        kept[CONFIG_KEY] = read_hf_config(run)
    return kept


def run_from_record(extra: Mapping[str, Any]) -> Run | None:
    """Return the run that saved a checkpoint; None where its manifest, of an earlier version, does not say."""
    with suppress(KeyError, msgspec.ValidationError, RecursionError):
        return msgspec.convert(extra[RUN_KEY], Run)
    return None


def read_run_file(file: Path) -> Run | None:
    """Read RUN_DIR/run.json; None where it can't be read."""
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(read_plain(file), type=Run)
    return None


def read_hf_config(run: Run) -> dict[str, Any]:
    """Read the config.json that `model.hf` names; {} where it can't be read."""
    path = Path(run.model.hf or "")
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads(read_plain(path / "config.json" if os.path.isdir(path) else path))
        return config if isinstance(config, dict) else {}
    return {}
