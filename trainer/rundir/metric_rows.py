"""The rows of metrics.jsonl by kind: most are of a logged step, others of a save, of slow devices, of a restart or of a whole `fit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .read_files import read_rows

SLOW_KEY = "slow_devices"  # of the rows that name slow devices
SAVE_KEY = "save_pause"  # of the rows of saves: the seconds that training waited
END_WAIT_KEY = "save_end_wait"  # of the same rows: those of them in which nothing was left to train under the save
RESTART_KEY = "restart"  # of the rows of restarts: their number in this `fit`
VALIDATION, AVERAGED = "validation_", "ema_"  # before the figures of validations; behind it, those of the average of the weights
VALIDATION_KEY = f"{VALIDATION}loss"  # of the text that is held out; of a validation set its name follows, after a slash
ACCURACY_KEY = "validation_accuracy"  # of preferences, in the same way
AVERAGED_KEY = f"{VALIDATION}{AVERAGED}loss"  # of the average of the weights (optim.ema), in the same way
OTHER_KEYS = frozenset({SLOW_KEY, SAVE_KEY, RESTART_KEY})


def is_step_row(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of a logged step, not of something that happened after one, or of a whole `fit`."""
    return "step" in row and not OTHER_KEYS & row.keys()


def validation_key(name: str = "") -> str:
    """Return the key of a validation set's loss; without a name, of the text that is held out. wandb and TensorBoard group by the slash."""
    return key_of_set(VALIDATION_KEY, name)


def key_of_set(key: str, name: str) -> str:
    """Return the key of a figure of a validation set; without a name, of the text that is held out."""
    return f"{key}/{name}" if name else key


def validation_losses(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validation losses of a row by the name of their set, "" for the text that is held out: those that it has."""
    return figures_of_sets(row, VALIDATION_KEY)


def figures_of_sets(row: Mapping[str, Any], figure: str) -> dict[str, Any]:
    """Return a figure of validation sets in a row by the name of their set, as `validation_losses`."""
    found = [(key.partition("/"), value) for key, value in row.items() if isinstance(key, str)]
    return {name: value for (key, slash, name), value in found if key == figure and bool(slash) == bool(name)}


def main_validation_loss(row: Mapping[str, Any]) -> Any:
    """Return the loss that stands for all validation of a row: that of the text that is held out, else that of the first set."""
    losses = validation_losses(row)
    return losses.get("", next(iter(losses.values()), None))


def join_late_validations(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of steps with each validation that a resumed run made up in the row of its step, from which a stop left it out."""
    joined = list[dict[str, Any]]()
    for row in rows:
        figures = row.keys() - {"step"}
        is_of_last = bool(joined) and joined[-1]["step"] == row["step"] and not figures & joined[-1].keys()
        if is_of_last and figures and all(str(key).startswith(VALIDATION) for key in figures):
            joined[-1] |= row
        else:
            joined.append(dict(row))
    return joined


def read_step_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of logged steps in RUN_DIR/metrics.jsonl, of all attempts; none where it can't be read."""
    return join_late_validations(row for row in read_rows(folder / "metrics.jsonl") if is_step_row(row))
