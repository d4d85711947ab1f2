"""Writes requirements.lock: exact versions of everything that `distrain[dev]` needs, as pip resolves them today.

Run `python -m distrain.scripts.lock` with the oldest supported Python, so that the versions exist for every newer one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from .show_help import show_help

ROOT = Path(__file__).parents[1]
PINNED = ("torch==2.13.0",)  # the version that the engines are tested with; raise it by hand
HEAD = """\
# Exact versions of everything that distrain[dev] needs; written by `python -m distrain.scripts.lock`.
# Packages of a single platform (CUDA libraries, triton) are pinned by torch itself.
"""
TORCH_PREFIXES = ("cuda-", "nvidia-", "triton")


def requirements() -> list[str]:
    """Return the requirements in pyproject.toml, with those of the `dev` extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["dev"], *PINNED]


def resolve(wanted: list[str]) -> dict[str, str]:
    """Return name -> version of all that pip would install into an empty environment."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run([*pip, *wanted], check=True, stdout=subprocess.PIPE, text=True)
    packages = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {item["name"].lower().replace("_", "-"): item["version"].partition("+")[0] for item in packages}


def main() -> None:
    versions = resolve(requirements())
    rows = [f"{name}=={versions[name]}" for name in sorted(versions) if not name.startswith(TORCH_PREFIXES)]
    (ROOT / "requirements.lock").write_text(HEAD + "\n".join(rows) + "\n")
    print(f"requirements.lock: {len(rows)} exact versions. Next: bash scripts/test")


if __name__ == "__main__":
    show_help(__doc__)
    main()
