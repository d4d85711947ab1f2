"""The paths of a run as ranks get them: whole, so that they hold in whatever folder, and on whatever host, a rank starts."""

from __future__ import annotations

import os
from glob import escape, has_magic
from pathlib import Path

from ..plan.changed_run import with_changes
from ..spec.run import Run

PATHS = ("model.hf", "model.weights", "data.cache", "log.dir", "launch.hostfile")  # and data.path, data.tokenizer


def relative_folder(folder: Path) -> str:
    """A folder as a user types it here: relative where it is below the current folder."""
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def whole_paths(run: Run) -> Run:
    """The run with every relative path made absolute from this process's folder; `show` prints them as they were written."""
    held = {key: getattr(getattr(run, part), name) for key in PATHS for part, name in [key.split(".")]}
    found: dict[str, object] = {key: _whole(value) for key, value in held.items() if value}
    if run.data.path:
        found["data.path"] = _pattern(run.data.path) if isinstance(run.data.path, str) else tuple(map(_pattern, run.data.path))
    if run.data.tokenizer != "bytes":
        found["data.tokenizer"] = _whole(run.data.tokenizer)
    return with_changes(run, found.items())


def _whole(path: str) -> str:
    """A path from the root on; an empty one stays."""
    return str(Path(os.path.expanduser(path)).absolute()) if path else path


def _pattern(word: str) -> str:
    """A path or a pattern from the root on: of a pattern, this process's own folder is no part of it."""
    open_ = os.path.expanduser(word)
    if not has_magic(open_) or os.path.isabs(open_) or os.path.lexists(open_):
        return _whole(word)
    return str(Path(escape(os.getcwd())) / open_)
