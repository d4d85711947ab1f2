"""The checks of all devices at the start of a run and every launch.device_check steps: what they find, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...layers.dtypes import PRECISION_DTYPES
from ...rundir.checkpoints import checkpoint_steps, checkpoints_folder
from ...rundir.metric_rows import SLOW_KEY
from ...spec.numbers.as_text import share_text
from ...spec.run import Run
from ..failures.failure import AllRanksFailed
from ..state.training_setup import TrainingSetup
from .device_reading import DeviceReading, differing_devices, slow_devices, step_share, wrong_devices
from .device_work import read_device
from .weight_copies import all_agree, first_departure, promises_equal_copies, steps_alone, totals, weight_checksums

PHASE = "check"


class DeviceFault(AllRanksFailed):
    """A device computes wrong, or a copy of the weights has departed; `rank` reports it. Its device is at fault if that is known."""

    def __init__(self, says: str, rank: int, *, is_known: bool = True) -> None:
        super().__init__(says, rank)
        self.fault = "device" if is_known else "machine"


class DeviceChecks:
    """Checks the devices of all ranks, which call this together, and compares the copies of the weights where they must be equal.

    A device that computes wrong (silent data corruption: 6 of 419 interruptions in arXiv:2407.21783 table 5; arXiv:2502.12340) spoils the
    weights of all ranks, and a slow one delays each step of all.
    """

    def __init__(self, run: Run, setup: TrainingSetup) -> None:
        self._run, self._setup = run, setup
        self._bits: int | None = None  # of this device's first check
        self._good: int | None = None  # the steps that were done at the last check that found no fault
        self._compares_copies = promises_equal_copies(run)
        self._named: set[int] = set()  # slow ranks of which the user was warned

    def check_start(self, done: int) -> None:
        """Check before this attempt's first step, after `done` steps of the run, unless launch.device_check is 0. Raises DeviceFault."""
        if self._run.launch.device_check != 0:
            self.check(done)

    @property
    def checked(self) -> int | None:
        """The steps that were done at the last good check; None where no other check follows."""
        return self._good if self._run.launch.device_check != "start" else None

    def is_due(self, done: int) -> bool:
        """Whether a check is due after step `done` (from 1)."""
        every = self._run.launch.device_check
        return isinstance(every, int) and every > 0 and done % every == 0

    def check(self, done: int) -> None:
        """Check now, after `done` steps. Raises DeviceFault."""
        self._setup.channel.report_phase(PHASE)
        slow = self._slow_devices(readings := self._read_devices(done))
        if slow:  # before anyone is named: it may have been other work on the machine
            again = self._slow_devices(self._read_devices(done))
            slow = {rank: min(factor, again[rank]) for rank, factor in slow.items() if rank in again}
        if self._compares_copies and not (steps_alone(self._run) and len({each.kind for each in readings}) > 1):
            self._compare_copies(done)
        if self._setup.world.is_rank0:
            self._report_slow(done, slow, readings)
            self._report_differing(readings, is_first=self._good is None)
        self._good = done
        self._setup.channel.report_checked(done)

    def _read_devices(self, done: int) -> list[DeviceReading]:
        """Return the readings of all devices. Raises DeviceFault where one is wrong."""
        world = self._setup.world
        reading = read_device(world.rank, world.device, PRECISION_DTYPES[self._run.train.precision], self._bits)
        self._bits = reading.bits if self._bits is None else self._bits
        readings = self._gather(reading)
        for rank, why in wrong_devices(readings).items():
            says = f"{readings[rank].where} computes wrong: {why}{self._since(done)}"
            raise DeviceFault(f"{says}; launch.device_check=0 trains with it all the same", rank)
        return readings

    def _slow_devices(self, readings: Sequence[DeviceReading]) -> dict[int, float]:
        return slow_devices(readings, self._setup.world.device.type)

    def _compare_copies(self, done: int) -> None:
        """Compare the copies of the weights. Raises DeviceFault where one differs."""
        rows = weight_checksums(self._setup.engine)
        if all_agree(self._gather(totals(rows))):
            return
        if departure := first_departure(self._gather(rows)):
            says = f"copies of the weights have departed: {departure.text}"
            raise DeviceFault(f"{says}{self._since(done)}", departure.rank, is_known=departure.is_known)

    def _since(self, done: int) -> str:
        """Return since when the fault may have been there, and which checkpoints may hold its results."""
        if self._good is None:
            return f" (in the check at step {done}, before this start's first step)"
        suspect = sorted(step for step in checkpoint_steps(checkpoints_folder(self._setup.folder)) if step > self._good)
        saved = f"; checkpoints saved since are suspect: step {', '.join(map(str, suspect))}" if suspect else ""
        return f" (in the check after step {done}; the last good check was after step {self._good}{saved})"

    def _report_slow(self, done: int, slow: dict[int, float], readings: Sequence[DeviceReading]) -> None:
        """Warn of slow devices, of each once, and write them to metrics.jsonl."""
        rows = []
        for rank, factor in slow.items():
            each, share = readings[rank], step_share(factor, self._computing)
            rows.append({"rank": rank, "host": each.host, "device": each.device, "factor": round(factor, 3), "step_share": round(share, 4)})
            if rank not in self._named:
                self._named.add(rank)
                than = f"it takes {factor:.2f} times as long as the median device of its kind for the same work"
                self._setup.warn(f"{each.where} is slow: {than}, which may cost up to {share_text(share)} of each step")
        if rows and self._setup.sinks:
            self._setup.sinks.write({"step": done, SLOW_KEY: rows})

    def _report_differing(self, readings: Sequence[DeviceReading], *, is_first: bool) -> None:
        """Warn, once, of devices of one kind that differ in their bits where no majority tells which are right."""
        for one, other in differing_devices(readings) if is_first else ():
            self._setup.warn(
                f"{one.where} and {other.where} give different bits for the same work, though they are of one kind ({one.kind}): "
                "one may compute wrong, and three or more would tell which"
            )

    @property
    def _computing(self) -> float:
        """The share of the planned step in which devices compute; 1 where the plan has no times."""
        time = self._setup.plan.time
        return time.compute / time.step if time and time.step and time.compute is not None else 1.0

    def _gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self._setup.world.size
        dist.all_gather_object(values, value, group=self._setup.host)
        return values
