"""Writes requirements.lock: one exact version of everything that `distrain[dev]` needs, as pip resolves it today.

Run `python -m distrain.scripts.lock` with the oldest Python that we support, so that every newer one finds its versions too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HELD = ("torch==2.13.0",)  # what the engines are tried with; raise it by hand
HEAD = """\
# Exact versions of everything that distrain[dev] needs; written by `python -m distrain.scripts.lock`.
# What one platform alone needs (CUDA libraries, triton) is pinned by torch itself.
"""
OF_TORCH = ("cuda-", "nvidia-", "triton")


def wanted() -> list[str]:
    """The requirements that pyproject.toml states, with those of the development extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["dev"], *HELD]


def resolved(requirements: list[str]) -> dict[str, str]:
    """Name -> version of all that pip would install for them into an empty environment."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    answer = subprocess.run([*pip, *requirements], check=True, stdout=subprocess.PIPE, text=True)
    found = [item["metadata"] for item in json.loads(answer.stdout)["install"]]
    return {item["name"].lower().replace("_", "-"): item["version"].partition("+")[0] for item in found}


def main() -> None:
    versions = resolved(wanted())
    rows = [f"{name}=={versions[name]}" for name in sorted(versions) if not name.startswith(OF_TORCH)]
    (ROOT / "requirements.lock").write_text(HEAD + "\n".join(rows) + "\n")
    print(f"requirements.lock: {len(rows)} exact versions. Next: bash scripts/test")


if __name__ == "__main__":
    main()
