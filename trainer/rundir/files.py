"""RUN_DIR, and the files that `fit` writes there atomically: run.json, plan.json, ended.json."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from ..plan.plan_data import Plan
from ..spec.problem import Problem, Unreadable
from ..spec.run import Run
from ..system import atomic_file
from ..system.regular_file import expand_home
from .absolute_paths import with_absolute_paths
from .checkpoints import has_checkpoints

LAUNCH_FILES = ("run.json", "plan.json")
OUTCOME_FILE = "ended.json"
LAUNCH_FOLDER = "launch"  # in RUN_DIR: what launchers read
METRICS_FILE = "metrics.jsonl"
LOGGED_KEY = "logged_bytes"  # of ended.json
REFERENCE_FILE = "reference.safetensors"  # of preferences: the log probabilities of answers under the start weights


def write_json(file: Path, what: object) -> None:
    """Write JSON atomically; raises OSError, and then the file is as it was."""
    atomic_file.write_atomically(file, _json_text(what))


def write_launch_files(run: Run, plan: Plan, folder: Path) -> None:
    """Write RUN_DIR/run.json, which the ranks read, with absolute paths, and plan.json, their plan; raises OSError, and on a full disk then
    both are as they were."""
    contents = zip(LAUNCH_FILES, (with_absolute_paths(run), plan), strict=True)
    atomic_file.write_together({folder / name: _json_text(what) for name, what in contents})


def start_file(run: Run) -> tuple[Path, str]:
    """Return the file from which ranks that no `fit` starts read their run, and its content, a line: RUN_DIR/launch/run-DIGEST.json.
    Another run may train in the folder, so RUN_DIR/run.json is written by rank 0, once it holds the folder's lock."""
    from msgspec import json

    text = json.encode(with_absolute_paths(run))
    return run_folder(run) / LAUNCH_FOLDER / f"run-{hashlib.sha256(text).hexdigest()[:12]}.json", text.decode()


def _json_text(what: object) -> bytes:
    from msgspec import json

    return json.format(json.encode(what))


def write_outcome(folder: Path, status: int, says: str) -> None:
    """Write RUN_DIR/ended.json: exit status and message of the last `fit`, and the bytes of metrics.jsonl at its end; nothing is written
    where the disk is full."""
    with suppress(OSError):
        write_json(folder / OUTCOME_FILE, {"status": status, "says": says, LOGGED_KEY: logged_bytes(folder)})


def logged_bytes(folder: Path) -> int:
    """Return the bytes of RUN_DIR/metrics.jsonl; 0 where there is none."""
    with suppress(OSError):
        return (folder / METRICS_FILE).stat().st_size
    return 0


def remove_outcome(folder: Path) -> None:
    """Remove RUN_DIR/ended.json: another `fit` begins."""
    with suppress(OSError):
        (folder / OUTCOME_FILE).unlink()


def read_launch_files(folder: Path) -> dict[str, bytes]:
    """Return the present content of the files that `fit` writes, without those that do not exist."""
    found = {}
    for name in (*LAUNCH_FILES, OUTCOME_FILE):
        with suppress(OSError):
            found[name] = (folder / name).read_bytes()
    return found


def restore_launch_files(before: Mapping[str, bytes], folder: Path) -> None:
    """Restore the files that `fit` writes to their content `before`: a refused run changes nothing."""
    for name in (*LAUNCH_FILES, OUTCOME_FILE):
        with suppress(OSError):  # the disk is full; each checkpoint holds its own run.json too
            if name in before:
                atomic_file.write_atomically(folder / name, before[name])
            else:
                (folder / name).unlink(missing_ok=True)


def find_run_folder(folder: Path) -> Path:
    """Return RUN_DIR as an absolute path; raises Unreadable where it is not the folder of a run whose config can be read."""
    path = expand_home(folder).absolute()
    if _holds_config(path):
        return path
    says = f"{folder} holds no run.json" if os.path.isdir(path) else f"{folder} is not a folder"
    if os.path.lexists(path / "run.json"):
        says = f"{folder / 'run.json'} is not a plain file"
    elif not os.path.lexists(path):
        says = f"{folder} does not exist"
    raise Unreadable([Problem(rule="folder", says=says, mend=_suggest_run_folder(folder, path))])


def _suggest_run_folder(folder: Path, path: Path) -> str:
    """Return the fix of a word that is not a run's folder: the newest run in it, the run whose file it is, or a run of a similar name."""
    inside = _run_folders(path)
    if inside:
        return f"did you mean {folder / inside[-1]}?"
    if not os.path.isdir(path) and _holds_config(path.parent):
        return f"did you mean {folder.parent}?"
    beside = [] if os.path.isdir(path) else _run_folders(path.parent)
    if close := get_close_matches(path.name, beside, n=1):
        return f"did you mean {folder.parent / close[0]}?"
    return f"`distrain ls runs {folder.parent}` lists the runs there" if beside else "give the folder of a run, such as runs/quickstart"


def _run_folders(path: Path) -> list[str]:
    """Return the names of the folders in `path` that are those of runs, the newest last."""
    runs = [name for name in _entries(path) if os.path.isfile(path / name / "run.json")] if os.path.isdir(path) else []
    return sorted(runs, key=lambda name: os.path.getmtime(path / name / "run.json"))


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is a run's, whole or damaged: without its config, plans or logged steps show that it was one."""
    return _holds_config(folder) or any(os.path.isfile(folder / name) for name in ("plan.json", "metrics.jsonl"))


def _holds_config(folder: Path) -> bool:
    """Whether a folder holds run.json, or a checkpoint, which records its run."""
    with suppress(OSError):
        return os.path.isfile(folder / "run.json") or has_checkpoints(folder)
    return False


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def run_folder(run: Run) -> Path:
    """Return RUN_DIR, the folder of the run's name in log.dir."""
    return expand_home(run.log.dir).absolute() / run.name
