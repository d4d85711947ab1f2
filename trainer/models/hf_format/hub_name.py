"""What to do about a folder that is missing where its name is that of a model on Hugging Face's hub, ORG/NAME."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PART = re.compile(r"[A-Za-z0-9][\w.-]*")


def download_mend(path: Path, key: str) -> str:
    """Return the command that makes a folder of a model, and the key that then names the folder, where an absolute path is ORG/NAME in the
    current folder and neither exists; "" for another path."""
    org, name = path.parent, path.name
    if os.path.lexists(org) or str(org.parent) != os.getcwd() or not all(map(_PART.fullmatch, (org.name, name))):
        return ""
    return f"run `hf download {org.name}/{name} --local-dir {name}`, and set {key}={name}"
