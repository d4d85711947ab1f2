"""The loss on preferences, as a change of an op table (trainer/layers/preference_loss.py)."""

from __future__ import annotations

from dataclasses import replace

from ...spec.derived.answer_room import answer_room
from ...spec.run import Run
from .op_table import OpTable, Tensor

ANSWERS = Tensor(("answers", "batch"), 8)


def with_preferences(table: OpTable, run: Run) -> OpTable:
    """Return a table whose loss compares the answers of `data=preferences`: it saves the gradient of each token's loss, and the ranks that
    split a sequence add up the answers' log probabilities."""
    if not run.data.has_preferences or not table.head:
        return table
    *others, loss = table.head
    saves = (*loss.saves_torch, Tensor(("tokens", "batch"), 4))
    loss = replace(loss, saves_torch=saves, reduces=(*loss.reduces, ("tokens", ANSWERS)))
    return replace(table, sizes={**table.sizes, "answers": answer_room(run.train.seq)}, head=(*others, loss))
