"""What `distrain calibrate` measures of several hosts, as frozen data: each host's devices, the links between hosts, the slow hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_high
from typing import Any, Literal

from .all_reduce import SHORT_BYTES, AllReduceSeconds, link_rates
from .link_probe import link_phases
from .measurement import AllReduceTimes, DeviceMeasurement

SLOW_SHARE = 0.9  # of the hosts' median, below which a host is named


@dataclass(frozen=True, kw_only=True)
class HostMeasurement:
    """One host: its devices, and the bytes/s of a device in the faster of the all-reduces with its two neighbours, where there are three
    hosts or more."""

    name: str
    devices: DeviceMeasurement
    link: float | None = None


@dataclass(frozen=True, kw_only=True)
class HostSpread:
    """One rate of each host."""

    kind: Literal["product", "copy", "inside", "between"]
    what: str
    rates: tuple[float, ...]
    unit: Literal["FLOP/s", "bytes/s"]

    @property
    def median(self) -> float:
        """The median over the hosts; of an even number the higher of the middle two, so that of two hosts one can be slow."""
        return median_high(self.rates)


@dataclass(frozen=True, kw_only=True)
class SlowHost:
    """A host's rate that is below SLOW_SHARE of the hosts' median."""

    host: str
    what: str
    rate: float
    median: float
    unit: Literal["FLOP/s", "bytes/s"]


@dataclass(frozen=True, kw_only=True)
class ClusterMeasurement:
    """Several hosts that were measured at the same time; `alone` and `together` are the all-reduces between one device of each host,
    while the others rest, and while all devices do the same."""

    hosts: tuple[HostMeasurement, ...]
    alone: AllReduceTimes | None  # None: one host
    together: AllReduceTimes | None

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts in the order of the hostfile."""
        return tuple(each.name for each in self.hosts)

    @property
    def slowest(self) -> DeviceMeasurement:
        """The devices of one host that stands for all: of each rate the slowest host's, for which the others wait in a step."""
        found = [each.devices for each in self.hosts]
        first = found[0]
        return replace(
            first,
            name=" and ".join(dict.fromkeys(each.name for each in found)),
            hosts=len(found),
            cores=min(each.cores for each in found),
            memory=min(each.memory for each in found),
            context=max((each.context for each in found if each.context is not None), default=None),
            products=tuple(min(found, key=partial(_product_rate, at=at)).products[at] for at in range(len(first.products))),
            copies=min(found, key=lambda each: each.copy).copies,
            launches=max(found, key=lambda each: each.launch).launches,
            dispatches=max(found, key=lambda each: each.dispatch or 0.0).dispatches,
            layer_rates=min(found, key=lambda each: each.layer["products"] if each.layer else 0.0).layer_rates,
            all_reduce=min((each.all_reduce for each in found if each.all_reduce), key=lambda link: link.bandwidth, default=None),
            load=max(each.load for each in found),
            seconds=max(each.seconds for each in found),
        )

    @property
    def slow_hosts(self) -> tuple[SlowHost, ...]:
        """The hosts with a slow product, copy or link; of products of several sizes the one that is furthest behind."""
        found: dict[tuple[str, str], SlowHost] = {}
        for row in self.spreads:
            for host, rate in zip(self.names, row.rates, strict=True):
                before = found.get((row.kind, host))
                if rate < SLOW_SHARE * row.median and (before is None or rate / row.median < before.rate / before.median):
                    found[row.kind, host] = SlowHost(host=host, what=row.what, rate=rate, median=row.median, unit=row.unit)
        return tuple(found.values())

    @property
    def spreads(self) -> tuple[HostSpread, ...]:
        """The rates of all hosts, side by side; () where there is one host."""
        return tuple(self._spreads()) if len(self.hosts) > 1 else ()

    def _spreads(self) -> Iterator[HostSpread]:
        found = [each.devices for each in self.hosts]
        for at, row in enumerate(found[0].products):
            rates = tuple(_product_rate(each, at) for each in found)
            yield HostSpread(kind="product", what=f"product {row.side} x {row.side}, {row.precision}", rates=rates, unit="FLOP/s")
        yield HostSpread(kind="copy", what="copy", rates=tuple(each.copy for each in found), unit="bytes/s")
        links: tuple[tuple[Literal["inside", "between"], str, list[float]], ...] = (
            ("inside", "link between its devices", [each.all_reduce.bandwidth for each in found if each.all_reduce]),
            ("between", "link to its neighbours", [each.link for each in self.hosts if each.link is not None]),
        )
        for kind, what, known in links:
            if len(known) == len(found):
                yield HostSpread(kind=kind, what=what, rates=tuple(known), unit="bytes/s")


def _product_rate(devices: DeviceMeasurement, at: int) -> float:
    return devices.rate(devices.products[at].rates)


def cluster_measurement(
    names: Sequence[str], devices: Sequence[DeviceMeasurement], links: Sequence[Sequence[Mapping[str, Any]]], size: int
) -> ClusterMeasurement:
    """Return the measurement of hosts from what they answered: `links` has for each host and device the seconds of each phase
    (`link_probe.py`), `size` is the long all-reduce's bytes."""
    library = "nccl" if devices[0].kind == "cuda" else "gloo"

    def times(phase: str, members: Sequence[int]) -> AllReduceTimes:
        """The slowest of the rails' times."""
        rows = [AllReduceSeconds(*row[phase]) for member in members for row in links[member] if phase in row]
        found = AllReduceSeconds(short=max(each.short for each in rows), long=max(each.long for each in rows))
        return AllReduceTimes(
            library=library,
            ranks=len(members),
            short_bytes=SHORT_BYTES,
            short_seconds=found.short,
            long_bytes=size,
            long_seconds=found.long,
            **link_rates(found, size, len(members)),
        )

    everyone = range(len(names))
    alone = together = None
    best: dict[int, float] = {}
    if len(names) > 1:
        alone = together = times("alone", everyone)
        for phase in link_phases(len(names), devices[0].devices):
            if phase.name == "together":
                together = times("together", everyone)
            elif phase.name != "alone":
                for pair in phase.groups:
                    rate = times(phase.name, pair).bandwidth
                    best |= {host: max(rate, best.get(host, 0.0)) for host in pair}
    return ClusterMeasurement(
        hosts=tuple(HostMeasurement(name=name, devices=devices[at], link=best.get(at)) for at, name in enumerate(names)),
        alone=alone,
        together=together,
    )
