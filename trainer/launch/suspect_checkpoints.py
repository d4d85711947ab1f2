"""Checkpoints that a device which computes wrong may have spoiled: set aside, so that the run resumes from an older one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..rundir.checkpoints import ASIDE, checkpoint_steps, name_aside, newest_saved, step_path
from .supervisor.outcome import Outcome


@dataclass(kw_only=True)
class SuspectCheckpoints:
    """The checkpoints in `folder` that were saved since the last good check of the devices in this `fit`."""

    folder: Path
    checked: int | None = None  # the step of the last good check
    are_all: bool = False  # all checkpoints are suspect: there is none that a run should resume from

    def set_aside(self, outcome: Outcome, *, same_hosts: bool = True) -> str:
        """After a fault of a device rename the checkpoints saved since the last good check, if there is a whole one that is older. Return a
        line for the user; "" where there is nothing to say. `same_hosts`: the attempt ran on the hosts of the one before; on others, its
        check before the first step says nothing of what the former devices computed."""
        self._note_checks(outcome, same_hosts=same_hosts)
        if self.checked is None or outcome.root_cause is None or not outcome.root_cause.fault:
            return ""
        suspects = [step for step in checkpoint_steps(self.folder) if step > self.checked]
        if not suspects:
            return ""
        since = f"saved since the last good check of the devices, after step {self.checked}, and may hold wrong weights"
        steps = ", ".join(map(str, sorted(suspects)))
        older, _ = newest_saved(self.folder, most=self.checked)
        self.are_all = older is None
        if older is None:
            return f"warning: all checkpoints (of step {steps}) were {since}; there is no older one to resume from"
        try:
            for step in suspects:
                step_path(self.folder, step).rename(name_aside(step_path(self.folder, step)))
        except OSError as error:
            return f"warning: checkpoints of step {steps} were {since}, and can't be renamed: {error.strerror or error}"
        return f"set aside as {ASIDE}step_N the checkpoints of step {steps}: {since}; the one of step {older.step} is older"

    def _note_checks(self, outcome: Outcome, *, same_hosts: bool) -> None:
        checked = max((each.checked for each in outcome.ranks if each.checked is not None), default=None)
        first = min((each.first_step for each in outcome.ranks if each.first_step is not None), default=checked)
        if checked is not None and (same_hosts or self.checked is None or (first is not None and checked > first)):
            self.checked = checked
