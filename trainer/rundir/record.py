"""The run that a checkpoint's manifest names: how it is written there and read back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..models.families import is_made_by_transformers
from ..spec.plain_file import read_plain
from ..spec.run import Run

RUN, CONFIG = "run", "config"  # keys of a manifest's `extra`


def record(run: Run) -> dict[str, Any]:
    """Return what a checkpoint keeps of the run that saves it, as JSON values.

    `run` is all of it. Of a model that transformers makes, `config` is the text of its config.json, which says what no key of ours does.
    """
    kept = {RUN: msgspec.to_builtins(run)}
    if is_made_by_transformers(run.model):
        kept[CONFIG] = read_config(run)
    return kept


def recorded_run(extra: Mapping[str, Any]) -> Run | None:
    """Return the run that saved a checkpoint; None where its manifest does not say, as those of earlier versions."""
    with suppress(KeyError, msgspec.ValidationError, RecursionError):
        return msgspec.convert(extra[RUN], Run)
    return None


def read_run_file(file: Path) -> Run | None:
    """Read RUN_DIR/run.json; None where there is none that can be read."""
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(read_plain(file), type=Run)
    return None


def read_config(run: Run) -> dict[str, Any]:
    """Read the config.json that `model.hf` names; {} where it can't be read."""
    path = Path(run.model.hf or "")
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads(read_plain(path / "config.json" if os.path.isdir(path) else path))
        return config if isinstance(config, dict) else {}
    return {}
