"""Models that only transformers implements. A child process reads the config.json of `model.hf` with it; the answer is cached."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...trainer.machine.cache import cache_folder
from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.system.atomic_file import write_atomically
from ...trainer.system.regular_file import read_plain
from ...trainer.system.run_child import capture_child

TIMEOUT = 300.0  # seconds for transformers to build the model on the meta device
ALLOWED = ("family", "hf", "weights", "dropout", "lora")  # keys of `model` that may be set beside `hf`; config.json sets the others
CACHE_VERSION = 3  # of the format of cached answers


def is_hf_family(family: object) -> bool:
    """Return whether transformers builds the models of a family."""
    from ...trainer.models.families import FAMILIES

    return isinstance(family, str) and family in FAMILIES and FAMILIES[family].made_by_transformers


def model_keys(path: Path) -> dict[str, object]:
    """Return the keys of `model` from a config.json of family hf; raises Unreadable."""
    return {"family": "hf", **_read_with_transformers(path)["sizes"]}


def fill_in_parameters(model: dict[str, Any]) -> list[Problem]:
    """Add the shape of every parameter to a composed model of family hf; return a problem for each key that differs from its
    config.json."""
    if not is_hf_family(model.get("family")) or not isinstance(model.get("hf"), str):
        return []
    answer = _read_with_transformers(Path(model["hf"]))
    model["parameters"] = answer["parameters"]
    return [
        Problem(rule="hf", says=f"model.{key}={value} differs from {model['hf']}", mend="change it there, and leave it out here")
        for key, value in model.items()
        if key not in (*ALLOWED, "parameters") and answer["sizes"].get(key) != value
    ]


def _read_with_transformers(path: Path) -> dict[str, Any]:
    """Return sizes and parameter shapes of the model of a config.json or its folder, from the cache or a child; raises Unreadable."""
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        release, text = version("transformers"), read_plain(file)
    except PackageNotFoundError:
        says = f"model.hf={path} needs transformers, which is not installed"
        raise Unreadable([Problem(rule="hf", says=says, mend="pip install 'distrain[hf]'")]) from None
    except OSError as error:
        raise Unreadable([Problem(rule="hf", says=f"model.hf={file}: {error.strerror}")]) from None
    cached = cache_folder() / "models" / f"{sha256(f'{CACHE_VERSION} {release} '.encode() + text).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        known = json.loads(cached.read_text(encoding="utf-8"))
        if isinstance(known, dict) and known.keys() >= {"sizes", "parameters"}:
            return known
    answer = _ask_child(file)
    with suppress(OSError):  # without a cache the child runs again next time
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cached, json.dumps(answer).encode())
    return answer


def _ask_child(file: Path) -> dict[str, Any]:
    """Run the child and return its answer; raises Unreadable."""
    try:
        child = capture_child("distrain.trainer.models.hf.inspect_config", [str(file)], seconds=TIMEOUT)
        answer: dict[str, Any] = json.loads(child.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        mend = f"to see why, run python -m distrain.trainer.models.hf.inspect_config {file}"
        raise Unreadable([Problem(rule="hf", says=f"transformers can't build the model of model.hf={file}", mend=mend)]) from None
    if "problem" in answer:
        raise Unreadable([Problem(rule="hf", says=f"model.hf={file}: {answer['problem']}")])
    return answer
