"""What is said where a rank's device has no memory left: what it holds beside what is planned, and the smallest change that needs less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...launch.supervisor.outcome import MAX_CAUSE
from ...plan.mesh_position import mesh_position
from ...plan.plan import make_plan
from ...plan.plan_data import MemoryBytes, Plan
from ...spec.changed_run import with_changes
from ...spec.numbers.as_text import size_text
from ...spec.run import Run

SMALLER = 0.98  # of the planned bytes, which a change takes at most where the device lacked next to nothing
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
# torch's allocator of a device names all of these (c10/cuda/CUDACachingAllocator.cpp), its allocator of a CPU the first alone.
ASKED = re.compile(rf"[Tt]ried to allocate {SIZE}")
TOTAL, FREE = re.compile(rf"total capacity of {SIZE}"), re.compile(rf"of which {SIZE} is free")
TENSORS, CACHED = re.compile(rf"{SIZE} is allocated by PyTorch"), re.compile(rf"{SIZE} is reserved by PyTorch but unallocated")
PROCESS, OWN = re.compile(rf"Process \d+ has {SIZE} memory in use"), "this process has"
NO_MEMORY = re.compile(r"CUDA out of memory|CUDA error: out of memory|DefaultCPUAllocator: can't allocate memory")
SETTING = re.compile(r"PYTORCH\w*_CONF=expandable_segments:True")


@dataclass(frozen=True, kw_only=True)
class FullDevice:
    """Bytes of a device when an allocation failed; None: not known, as of a CPU all but `asked`."""

    asked: int | None
    total: int | None = None
    free: int | None = None
    tensors: int | None = None  # that torch's tensors hold
    cached: int | None = None  # that torch's allocator keeps for later tensors
    others: int = 0  # that other processes hold
    setting: str = ""  # of the allocator, which torch recommends where `cached` is much

    @property
    def tensors_with_asked(self) -> int:
        """What tensors would have held."""
        return (self.tensors or 0) + (self.asked or 0)

    @property
    def rest(self) -> int | None:
        """What this process holds besides: the context, NCCL's buffers, workspaces."""
        if self.total is None or self.free is None or self.tensors is None or self.cached is None:
            return None
        return max(0, self.total - self.free - self.tensors - self.cached - self.others)


def full_device(error: BaseException) -> FullDevice | None:
    """Return what an error, or one that it follows from, says of a device without memory; None: it is of another kind."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        text = str(cause)
        if NO_MEMORY.search(text):
            found = {name: _size_in(pattern, text) for name, pattern in (("asked", ASKED), ("total", TOTAL), ("free", FREE))}
            setting = match[0] if (match := SETTING.search(text)) else ""
            held = {"tensors": _size_in(TENSORS, text), "cached": _size_in(CACHED, text)}
            others = _others(text, (held["tensors"] or 0) + (held["cached"] or 0))
            return FullDevice(**found, **held, others=others, setting=setting)
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return None


def out_of_memory_text(device: FullDevice, run: Run, plan: Plan, rank: int) -> str:
    """Return one line: what was asked for and what the device holds, beside what the plan counts for this rank's stage, and what to do."""
    kind = "GPU memory" if run.cluster.device.kind == "cuda" else "memory"
    asked = f": asked for {size_text(device.asked)}" if device.asked is not None else ""
    is_whole = plan.memory is not None and not plan.memory.unknown
    planned = plan.memory.stages[mesh_position(run, rank).coordinates["pp"]].bytes if plan.memory and is_whole else None
    says = f"out of {kind}{asked}{_held_text(device, planned)}"
    tensors = planned.total - planned.overhead if planned else None
    if device.others >= max(1, device.asked or 0) and (tensors is None or device.tensors_with_asked <= tensors):
        return f"{says}: see nvidia-smi"
    if planned is None or tensors is None:
        return says
    if device.setting and device.cached and device.cached >= (device.asked or 0) and device.tensors_with_asked <= tensors:
        return f"{says}: its free blocks are in pieces: set {device.setting} in the environment"
    changes = ""
    for change in smaller_runs(run, plan, planned, device):
        longer = f"{changes} or {change}" if changes else f"; less is needed with {change}"
        if len(says) + len(longer) > MAX_CAUSE:
            break
        changes = longer
    return f"{says}{changes}"


def smaller_runs(run: Run, plan: Plan, planned: MemoryBytes, device: FullDevice) -> Iterator[str]:
    """Yield the smallest changes of a run, as words of a command, whose plans need as much less than this one as the device lacked, and a
    little less in any case; a plan that is too low is taken to be so by the same share with them. `planned`: of the rank's stage; of the
    fullest, with which plans are judged, a change has to leave the same share."""
    capacity = run.cluster.device.memory
    if capacity == "auto" or plan.memory is None:
        return
    room = min(capacity, device.total or capacity) - device.others - max(planned.overhead, device.rest or 0)  # for tensors
    tensors = planned.total - planned.overhead
    share = SMALLER if device.tensors is None else min(SMALLER, room / max(device.tensors_with_asked, tensors))
    fullest = int(share * (plan.memory.peak - planned.overhead))
    if fullest > 0:
        again = make_plan(with_changes(run, [("cluster.device.memory", fullest + planned.overhead)]))
        yield from (" ".join(each) for problem in again.problems for each in problem.changes)


def _held_text(device: FullDevice, planned: MemoryBytes | None) -> str:
    if device.total is None or device.tensors is None:
        return f"; {size_text(planned.total)} planned in all" if planned else ""
    tensors = f" ({size_text(planned.total - planned.overhead)} planned at most)" if planned else ""
    parts = [f"tensors hold {size_text(device.tensors)}{tensors}"]
    parts += [f"torch's free blocks {size_text(device.cached)}"] if device.cached is not None else []
    parts += [f"the rest {size_text(device.rest)}{f' ({size_text(planned.overhead)} planned)' if planned else ''}"] if device.rest else []
    parts += [f"other processes {size_text(device.others)}"] if device.others else []
    return f"; of {size_text(device.total)} {', '.join(parts)}"


def _others(text: str, held: int) -> int:
    """Return the bytes of other processes. In a container torch does not know its own process among them: it holds at least what its
    allocator does."""
    sizes = sorted(_size(*match) for match in PROCESS.findall(text))
    if OWN not in text and (own := next((each for each in sizes if each >= held), None)) is not None:
        sizes.remove(own)
    return sum(sizes)


def _size_in(pattern: re.Pattern[str], text: str) -> int | None:
    return _size(*match.groups()) if (match := pattern.search(text)) else None


def _size(number: str, unit: str) -> int:
    return round(float(number) * UNITS[unit])
