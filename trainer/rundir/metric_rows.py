"""The rows of metrics.jsonl by kind: most are of a logged step, others of a save, of slow devices, of a restart or of a whole `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .read_files import read_rows

SLOW_KEY = "slow_devices"  # of the rows that name slow devices
SAVE_KEY = "save_pause"  # of the rows of saves: the seconds that training waited
END_WAIT_KEY = "save_end_wait"  # of the same rows: those of them in which nothing was left to train under the save
RESTART_KEY = "restart"  # of the rows of restarts: their number in this `fit`
VALIDATION_KEY = "validation_loss"  # of the text that is held out; of a validation set its name follows, after a slash
OTHER_KEYS = frozenset({SLOW_KEY, SAVE_KEY, RESTART_KEY})


def is_step_row(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of a logged step, not of something that happened after one, or of a whole `fit`."""
    return "step" in row and not OTHER_KEYS & row.keys()


def validation_key(name: str = "") -> str:
    """Return the key of a validation set's loss; without a name, of the text that is held out. wandb and TensorBoard group by the slash."""
    return f"{VALIDATION_KEY}/{name}" if name else VALIDATION_KEY


def validation_losses(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validation losses of a row by the name of their set, "" for the text that is held out: those that it has."""
    found = [(key.partition("/"), loss) for key, loss in row.items() if isinstance(key, str)]
    return {name: loss for (key, slash, name), loss in found if key == VALIDATION_KEY and bool(slash) == bool(name)}


def main_validation_loss(row: Mapping[str, Any]) -> Any:
    """Return the loss that stands for all validation of a row: that of the text that is held out, else that of the first set."""
    losses = validation_losses(row)
    return losses.get("", next(iter(losses.values()), None))


def read_step_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of logged steps in RUN_DIR/metrics.jsonl, of all attempts; none where it can't be read."""
    return [row for row in read_rows(folder / "metrics.jsonl") if is_step_row(row)]
