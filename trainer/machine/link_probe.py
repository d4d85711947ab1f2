"""The links between hosts: all-reduces of one device of each host, alone and of all devices at once, and of neighbouring hosts.

A phase has a process group for each device of a host, a *rail*: the first devices of all hosts, the second ones, and so on. Rails do not
exchange messages, but share the network card of a host where it has one for several devices. All processes of all hosts begin a phase
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

from .all_reduce import SHORT_BYTES, AllReduceSeconds
from .device_probe import ProbeSizes
from .device_seconds import mean_of_calls, wait_for_device
from .process_pool import LONGEST_WAIT, PoolProcess

if TYPE_CHECKING:
    import torch

SHORT_CALLS = 100  # short all-reduces
LEAST_CALLS, MOST_CALLS = 3, 50  # long ones
PHASE_SECONDS = 0.5  # that the long ones of a phase take, about
POLL_SECONDS = 0.005


class HostPlace(NamedTuple):
    """A host among the `hosts` that are measured, and where the store of all their processes listens: on the first host."""

    host: int
    hosts: int
    address: str
    port: int


class Phase(NamedTuple):
    """A phase: its name, the hosts of each group, and whether only the first device of a host takes part."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    one_rail: bool = False


def link_phases(hosts: int, rails: int) -> Iterator[Phase]:
    """Yield the phases. Neighbours on a ring of three hosts or more are measured in pairs; those of a phase have no host in common."""
    everyone = (tuple(range(hosts)),)
    yield Phase("alone", everyone, one_rail=True)
    if rails > 1:
        yield Phase("together", everyone)
    if hosts < 3:
        return
    pairs = [(each, (each + 1) % hosts) for each in range(hosts)]
    even = hosts - hosts % 2
    yield Phase("pairs 0", tuple(pairs[0:even:2]))
    yield Phase("pairs 1", tuple(pairs[1:even:2]))
    if hosts % 2:
        yield Phase("pairs 2", (pairs[-1],))


class RankStore:
    """The store of all processes of all hosts; the process of rank 0 serves it."""

    def __init__(self, place: HostPlace, process: PoolProcess) -> None:
        import torch.distributed as dist

        self.rank, self.ranks = place.host * process.ranks + process.rank, place.hosts * process.ranks
        self.wait = timedelta(seconds=LONGEST_WAIT)
        self.store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            place.address, place.port, is_master=self.rank == 0, timeout=self.wait, wait_for_workers=False
        )

    def wait_for_all(self, name: str) -> None:
        """Wait until every process has called this with the same name; raises RuntimeError where that takes too long."""
        if self.store.add(f"{name} arrived", 1) == self.ranks:
            self.store.set(f"{name} complete", "yes")
        self.store.wait([f"{name} complete"], self.wait)

    def close(self) -> None:
        """Wait for all processes; the one that serves the store leaves last."""
        self.wait_for_all("end")
        if self.store.add("left", 1) < self.ranks and self.rank == 0:
            until = perf_counter() + LONGEST_WAIT
            while self.store.add("left", 0) < self.ranks and perf_counter() < until:
                sleep(POLL_SECONDS)


def measure_links(process: PoolProcess, place: HostPlace, sizes: ProbeSizes, threads: int = 1) -> dict[str, Any]:
    """Take part in all phases with one device; return its seconds by phase: {"alone": [short, long], "pairs 0": ...}."""
    import torch

    torch.set_num_threads(threads)
    device = torch.device(sizes.device, process.rank) if sizes.device == "cuda" else torch.device(sizes.device)
    if sizes.device == "cuda":
        torch.cuda.set_device(device)
    found: dict[str, Any] = {}
    store = RankStore(place, process)
    for phase in link_phases(place.hosts, process.ranks):
        store.wait_for_all(phase.name)
        if process.rank == 0:
            process.lines.put(f"the links between hosts: {phase.name}")
        group = next((each for each in phase.groups if place.host in each), ())
        if phase.one_rail and process.rank > 0:
            group = ()
        if seconds := _time_phase(store, f"{phase.name} {process.rank} {min(group, default=0)}", phase, group, place.host, device, sizes):
            found[phase.name] = seconds
    store.close()
    return found


def _time_phase(
    store: RankStore, name: str, phase: Phase, group: tuple[int, ...], host: int, device: torch.device, sizes: ProbeSizes
) -> AllReduceSeconds | None:
    """Time the all-reduces of one group, `name`; a process in no group only waits where the others do."""
    import torch
    import torch.distributed as dist

    between = f"{phase.name} short"
    if not group:
        store.wait_for_all(between)
        return None
    dist.init_process_group(
        sizes.library,
        store=dist.PrefixStore(name, store.store),  # type: ignore[attr-defined]
        rank=group.index(host),
        world_size=len(group),
        timeout=store.wait,
    )
    short, long = (torch.zeros(count // 4, device=device) for count in (SHORT_BYTES, sizes.reduced))
    for each in (short, long):
        dist.all_reduce(each)  # makes the connections
    short_seconds = mean_of_calls(lambda: dist.all_reduce(short), SHORT_CALLS)
    store.wait_for_all(between)
    calls = _call_count(store, phase, lambda: dist.all_reduce(long), device)
    long_seconds = mean_of_calls(lambda: dist.all_reduce(long), calls)
    dist.destroy_process_group()
    return AllReduceSeconds(short=short_seconds, long=long_seconds)


def _call_count(store: RankStore, phase: Phase, act: Callable[[], object], device: torch.device) -> int:
    """Return the number of long all-reduces, the same for all processes: as many as take PHASE_SECONDS where all devices send at once.

    The first phase finds it: its devices send alone, and a card that they share would give each its share.
    """
    import torch
    import torch.distributed as dist

    if not phase.one_rail:
        return int(store.store.get("calls"))
    wait_for_device()
    began = perf_counter()
    act()
    wait_for_device()
    slowest = torch.tensor([perf_counter() - began], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    rails = store.ranks // dist.get_world_size()
    calls = max(LEAST_CALLS, min(MOST_CALLS, int(PHASE_SECONDS / (slowest.item() * rails))))
    if store.rank == 0:
        store.store.set("calls", str(calls))
    return calls
