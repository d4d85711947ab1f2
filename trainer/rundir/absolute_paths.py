"""Makes the paths of a run absolute, so that they mean the same in every folder and on every host where a rank starts."""

from __future__ import annotations

import os
from glob import escape, has_magic
from operator import attrgetter
from pathlib import Path

from ..spec.changed_run import with_changes
from ..spec.run import Run

PATH_KEYS = ("model.hf", "model.weights", "model.lora.weights", "data.cache", "log.dir", "launch.hostfile")  # and those of data


def relative_folder(folder: Path) -> str:
    """A folder as a user types it here: relative where it is below the current folder."""
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def with_absolute_paths(run: Run) -> Run:
    """Return the run with every path absolute, so that it means the same in any working folder. `show` prints them as they were written."""
    paths = {key: attrgetter(key)(run) for key in PATH_KEYS}
    found: dict[str, object] = {key: _absolute_path(value) for key, value in paths.items() if value}
    if run.data.path:
        found["data.path"] = _absolute_patterns(run.data.path)
    if run.data.validate:
        found["data.validate"] = {name: _absolute_patterns(paths) for name, paths in run.data.validate.items()}
    if run.data.tokenizer != "bytes":
        found["data.tokenizer"] = _absolute_path(run.data.tokenizer)
    return with_changes(run, found.items())


def _absolute_path(path: str) -> str:
    """Return the absolute path; an empty one stays empty."""
    return str(Path(os.path.expanduser(path)).absolute()) if path else path


def _absolute_patterns(words: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return _absolute_pattern(words) if isinstance(words, str) else tuple(map(_absolute_pattern, words))


def _absolute_pattern(word: str) -> str:
    """Return the absolute path or pattern; special characters in the working folder's own name are escaped."""
    expanded = os.path.expanduser(word)
    if not has_magic(expanded) or os.path.isabs(expanded) or os.path.lexists(expanded):
        return _absolute_path(word)
    return str(Path(escape(os.getcwd())) / expanded)
