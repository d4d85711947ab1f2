"""What the head of RUN_DIR/reference.safetensors says, read without torch: whether all that its run needs is in it."""

from __future__ import annotations

import json
from pathlib import Path

from .files import REFERENCE_FILE

WHOLE_KEY = "whole"  # of its metadata: "false" while pairs that the run reads are not computed yet


def has_whole_reference(folder: Path) -> bool:
    """Return whether a run folder has the file, of the size that its head says, with every pair that the run was to read."""
    path = folder / REFERENCE_FILE
    try:
        with open(path, "rb") as file:
            head_size = int.from_bytes(file.read(8), "little")
            if head_size > path.stat().st_size:
                return False
            head = json.loads(file.read(head_size))
        size = max((each["data_offsets"][1] for name, each in head.items() if name != "__metadata__"), default=0)
        is_whole = head.get("__metadata__", {}).get(WHOLE_KEY) != "false"  # files of earlier versions do not say
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False
    return path.stat().st_size == 8 + head_size + size and is_whole
