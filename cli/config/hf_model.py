"""Models that only transformers has: what `model.hf` names is asked of it in a child process, once, and kept."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...trainer.machine.cache import folder
from ...trainer.spec.plain_file import read_plain
from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.system.atomic_file import put
from ...trainer.system.torch_child import ask_child

PATIENCE = 300.0  # seconds that making a model of no memory may take
FREE = ("family", "hf", "weights", "dropout")  # keys of `model` that may be said beside; the rest is as the config.json says
FORM = 1  # of what is kept


def sizes(path: Path) -> dict[str, object]:
    """The keys of `model` of a config.json whose architecture is none of ours; raises Unreadable."""
    return {"family": "hf", **_found(path)["sizes"]}


def parameters(model: dict[str, Any]) -> list[Problem]:
    """Put every parameter's shape into the words of a model of family hf; what is said of it that its config.json does not say."""
    if model.get("family") != "hf" or not isinstance(model.get("hf"), str):
        return []
    found = _found(Path(model["hf"]))
    model["parameters"] = found["parameters"]
    return [
        Problem(rule="hf", says=f"model.{key}={value} is not what {model['hf']} says", mend="change it there, and leave it out here")
        for key, value in model.items()
        if key not in (*FREE, "parameters") and found["sizes"].get(key) != value
    ]


def _found(path: Path) -> dict[str, Any]:
    """What transformers makes of a config.json or of the folder that holds it; raises Unreadable."""
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        release, text = version("transformers"), read_plain(file)
    except PackageNotFoundError:
        says = f"model.hf={path}: transformers, which has this model, is not installed"
        raise Unreadable([Problem(rule="hf", says=says, mend="pip install 'distrain[hf]'")]) from None
    except OSError as error:
        raise Unreadable([Problem(rule="hf", says=f"model.hf={file}: {error.strerror}")]) from None
    kept = folder() / "models" / f"{sha256(f'{FORM} {release} '.encode() + text).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        known = json.loads(kept.read_text(encoding="utf-8"))
        if isinstance(known, dict) and known.keys() >= {"sizes", "parameters"}:
            return known
    found = _asked(file)
    with suppress(OSError):  # it is asked again then
        kept.parent.mkdir(parents=True, exist_ok=True)
        put(kept, json.dumps(found).encode())
    return found


def _asked(file: Path) -> dict[str, Any]:
    """The child's answer; raises Unreadable."""
    try:
        done = ask_child("distrain.trainer.models.auto.meta", [str(file)], seconds=PATIENCE)
        said: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        mend = f"python -m distrain.trainer.models.auto.meta {file} says why"
        raise Unreadable([Problem(rule="hf", says=f"model.hf={file}: transformers makes no model of it", mend=mend)]) from None
    if "problem" in said:
        raise Unreadable([Problem(rule="hf", says=f"model.hf={file}: {said['problem']}")])
    return said
