"""The config of a run as YAML that `conf=` reads back: composed from a recipe, or as a run folder holds it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import to_builtins

from ...trainer.rundir.read_files import read_mapping
from ..config.composition import config_yaml
from ..config.load import checked_run, compose_config
from ..keys import key_help
from . import yaml_edit


def config_text(conf: str, overrides: Sequence[str], config_dir: Path | None, *, comments: bool) -> str:
    """Return the composed config with every default filled in, without the keys that are not set; `comments` explain each key."""
    composed = to_builtins(checked_run(compose_config(conf, overrides, config_dir)))
    text = config_yaml({key: value for key, value in composed.items() if value is not None})
    return (yaml_edit.add_comments(text, key_help.key_comments()) if comments else text).rstrip()


def run_config_text(folder: Path) -> str:
    """Return the config in RUN_DIR/run.json, without the keys that are not set; "" where it can't be read."""
    with suppress(FileNotFoundError):
        read = read_mapping(folder / "run.json") or {}
        return yaml_edit.to_yaml({key: value for key, value in read.items() if value is not None}).rstrip() if read else ""
    return ""
