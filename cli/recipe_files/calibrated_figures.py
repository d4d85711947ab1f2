"""The figures of a device and of a cluster's file from what was measured, each with a comment how it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import floor, log10
from typing import Any, NamedTuple

from ...trainer.machine.cluster_measurement import ClusterMeasurement, SlowHost
from ...trainer.machine.layer_rates import HEAD_DIM
from ...trainer.machine.measurement import AllReduceTimes, DeviceMeasurement, ProductRates
from ...trainer.machine.probe import MATRIX_SIDE
from ...trainer.plan.costs.measured_rates import bandwidth_of_copy, cpu_shares, full_rate, peak_estimate, sustained_share
from ...trainer.plan.costs.roofline import ALONE, OWN_STREAMING
from ...trainer.spec.numbers.as_text import rate_text, seconds_text, share_text, size_text
from ...trainer.spec.run import SUSTAINED, Device
from .data_sheet import DataSheet

LEADING = ("bf16", "fp16", "fp32")  # precisions whose product says what share of its peak a GPU sustains, the first that was measured
MOST_NAMES = 8  # hosts that a comment names
FITTED = {  # figures of a GPU's file that were fitted to published runs, and what they are
    "flash": "share of peak, fused attention",
    "streaming": "share of bandwidth, a memory-bound kernel",
    "launch": "seconds per kernel",
    "dispatch": "seconds of host time per op",
}


class Figure(NamedTuple):
    """A line of an option's file: its dotted key, its value (an empty mapping begins a section), and a comment."""

    key: str
    value: Any
    comment: str = ""


def device_figures(measured: DeviceMeasurement, sheet: DataSheet | None) -> tuple[Figure, ...]:
    """Return the figures of the device; of a GPU with those of its data sheet, where one is known."""
    return tuple(_cpu_figures(measured) if measured.kind == "cpu" else _gpu_figures(measured, sheet))


def cluster_figures(measured: DeviceMeasurement, cluster: ClusterMeasurement | None = None) -> tuple[Figure, ...]:
    """Return the figures of a cluster of this one machine, or of several hosts."""
    inside, between = measured.all_reduce, cluster.together if cluster else None
    what, hosts = "GPUs" if measured.kind == "cuda" else "processes", len(cluster.hosts) if cluster else 1
    where = "each host" if cluster else "this machine"
    head = (
        Figure("nodes", hosts, shortened_names(cluster.names) if cluster else ""),
        Figure("gpus", measured.devices, f"{what} of {where} that were measured together"),
    )
    slowest = " on the slowest host" if hosts > 1 else ""
    links = _link_figures("inside", inside, f"between all {inside.ranks}{slowest}") if inside else None
    if cluster is None or between is None or cluster.alone is None:
        return (
            *head,
            *(links or (Figure("inside", None, "one device sends no messages"),)),
            Figure("between", None, "links between machines were not measured"),
        )
    each, alone = f"between one device of each of {hosts} hosts", ""
    if measured.devices > 1:
        each += f", all {measured.devices} of a host at once,"
        alone = f"; while the others rest: {rate_text(cluster.alone.bandwidth, 'B/s')}"
    return (
        *head,
        *(links or (Figure("inside", None, "a host's one device sends no messages inside it"),)),
        *_link_figures("between", between, each, alone),
    )


def _link_figures(link: str, found: AllReduceTimes, ranks: str, more: str = "") -> tuple[Figure, ...]:
    """Return the figures of a link from its all-reduces; `ranks` says between which devices, `more` ends the bandwidth's comment."""
    long, short = (
        f"{found.library}'s all-reduce of {size_text(size)} {ranks} took {seconds_text(seconds)}"
        for size, seconds in ((found.long_bytes, found.long_seconds), (found.short_bytes, found.short_seconds))
    )
    hops = 2 * (found.ranks - 1)
    return (
        Figure(f"{link}.bandwidth", four_digits(found.bandwidth), f"bytes/s per device and direction: {long}, as a ring{more}"),
        Figure(f"{link}.latency", four_digits(found.latency), f"seconds per hop: {short}, in {hops} hops"),
        Figure(f"{link}.efficiency", 1.0, "share of the bandwidth that messages get: the bandwidth is what they got"),
    )


def shortened_names(names: Sequence[str]) -> str:
    """The names of hosts, the first ones where there are many."""
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def slow_host_text(slow: SlowHost) -> str:
    """A sentence that names a slow host."""
    rate, median = (rate_text(each, "B/s" if slow.unit == "bytes/s" else slow.unit) for each in (slow.rate, slow.median))
    return f"{slow.host} is slow: {slow.what} at {rate}, {share_text(1 - slow.rate / slow.median)} below the hosts' median of {median}"


def _cpu_figures(measured: DeviceMeasurement) -> Iterator[Figure]:
    """Yield the figures of a process's share of a CPU, with the rates and the shares that device=cpu has."""
    yield Figure("name", "cpu")
    yield Figure("kind", "cpu")
    yield Figure(
        "memory",
        measured.memory,
        f"bytes: {'this machine' if measured.hosts == 1 else 'the smallest host'}'s memory over {measured.devices}",
    )
    yield Figure("bandwidth", four_digits(measured.copy), f"bytes/s: a copy of {size_text(measured.copy_bytes)}, read and written")
    yield Figure(
        "peak", {}, "FLOP/s: as for device=cpu, the rate of a product of this size; what smaller and uneven ones lose comes on top"
    )
    for precision in ("fp32", "bf16"):
        if rate := measured.product(precision, MATRIX_SIDE):
            yield Figure(
                f"peak.{precision}", four_digits(rate), f"a product of {MATRIX_SIDE} x {MATRIX_SIDE}; {_sizes(measured, precision)}"
            )
    yield Figure("units", None)
    alone, layer = measured.product("fp32", MATRIX_SIDE), measured.layer
    if alone and layer:
        shares = cpu_shares(four_digits(alone), **layer, head_dim=HEAD_DIM)
        says = "share of `peak` among a layer's other kernels"
        yield Figure("sustained", shares["sustained"], f"{says}: products at {rate_text(layer['products'], 'FLOP/s')} in fp32")
        yield Figure("flash", shares["flash"], f"{says}: attention at {rate_text(layer['attention'], 'FLOP/s')}")
    yield Figure("streaming", 1.0, "share of `bandwidth`, which is measured")
    yield Figure("launch", 0.0, f"of a CPU a plan counts none: an op on 8 elements took {seconds_text(measured.launch)}")
    if measured.dispatch is not None:
        yield Figure(
            "dispatch", four_digits(measured.dispatch), "seconds of host time per op of a layer, whose kernels have nothing to compute"
        )
    yield Figure("context", 0.0, "there is no driver")


def _gpu_figures(measured: DeviceMeasurement, sheet: DataSheet | None) -> Iterator[Figure]:
    base: Mapping[str, Any] = sheet.device if sheet else {}
    streaming = float(base.get("streaming", Device.streaming))
    yield Figure("name", str(base.get("name", measured.name)))
    yield Figure("kind", "cuda")
    yield Figure("memory", measured.memory, f"bytes: what torch reports as total memory{_sheet_note(sheet, 'memory')}")
    copy = f"a copy of {size_text(measured.copy_bytes)} moved {rate_text(measured.copy, 'B/s')}, read and written"
    yield Figure(
        "bandwidth",
        four_digits(bandwidth_of_copy(measured.copy, streaming)),
        f"bytes/s: {copy}, over {max(OWN_STREAMING, streaming)}, the share that plans take{_sheet_note(sheet, 'bandwidth')}",
    )
    yield from _peaks(measured, sheet)
    yield Figure("units", measured.units, "torch's multi_processor_count")
    sustained, comment = _sustained_figure(measured, sheet)
    yield Figure("sustained", sustained, comment)
    for key, what in FITTED.items():
        took = f"; an op on 8 elements, one of many, took {seconds_text(measured.launch)} here" if key == "launch" else ""
        source = f"device={sheet.option}" if sheet and key in base else "the default"
        yield Figure(key, base.get(key, getattr(Device, key)), f"{what}: {source}, fitted to published runs, not measured{took}")
    yield Figure(
        "context",
        four_digits(measured.context or 0),
        f"bytes that the driver, torch and NCCL held beside tensors, and other programs{_sheet_note(sheet, 'context')}",
    )


def _peaks(measured: DeviceMeasurement, sheet: DataSheet | None) -> Iterator[Figure]:
    """Yield the dense peaks: of the data sheet, with what was measured beside it; without one, estimates."""
    if sheet:
        yield Figure("peak", {}, f"dense FLOP/s of the data sheet: device={sheet.option}")
        for precision, peak in sheet.device.get("peak", {}).items():
            rate = measured.product(precision)
            says = f"measured: {_sizes(measured, precision)}, {share_text(rate / peak)} of it" if rate else "not measured"
            yield Figure(f"peak.{precision}", peak, says)
        return
    share = SUSTAINED * (ALONE if measured.all_devices == 1 else 1.0)
    says = f"dense FLOP/s: ESTIMATES, what products reached over {share:.3g}: type the data sheet's and calibrate again"
    yield Figure("peak", {}, says)
    for precision in dict.fromkeys(each.precision for each in measured.products):
        largest = _largest(measured, precision)
        full = full_rate(measured.rate(largest.rates), largest.side, measured.units, None)
        estimate = peak_estimate(full, SUSTAINED, measured.all_devices)
        yield Figure(f"peak.{precision}", four_digits(estimate), f"measured: {_sizes(measured, precision)}")


def _sustained_figure(measured: DeviceMeasurement, sheet: DataSheet | None) -> tuple[float, str]:
    """Return the share of its peak that a GPU sustains, and a comment."""
    if sheet is None:
        return SUSTAINED, "share of peak, a large product: the default, with which the peaks were estimated"
    peaks = sheet.device.get("peak", {})
    precision = next((each for each in LEADING if each in peaks and measured.product(each)), None)
    if precision is None:
        return float(sheet.device.get("sustained", SUSTAINED)), f"share of peak: device={sheet.option}"
    largest = _largest(measured, precision)
    full = full_rate(measured.rate(largest.rates), largest.side, measured.units, peaks.get("fp8"))
    alone = f" and {ALONE}, which the only GPU of a run reaches" if measured.all_devices == 1 else ""
    before = f"for seconds, not hours; device={sheet.option}: {sheet.device.get('sustained', SUSTAINED)}"
    return (
        round(sustained_share(full, peaks[precision], measured.all_devices), 3),
        f"share of peak, a large product: the {precision} product of {largest.side} over its tiles' share{alone}; {before}",
    )


def _largest(measured: DeviceMeasurement, precision: str) -> ProductRates:
    return max((each for each in measured.products if each.precision == precision), key=lambda each: each.side)


def _sizes(measured: DeviceMeasurement, precision: str) -> str:
    """The rates of a precision's products by size: 650, 671 TFLOP/s at 4096, 8192."""
    found = [each for each in measured.products if each.precision == precision]
    rates = ", ".join(rate_text(measured.rate(each.rates), "FLOP/s") for each in found)
    return f"{rates} at {', '.join(str(each.side) for each in found)}"


def _sheet_note(sheet: DataSheet | None, key: str) -> str:
    """What the data sheet's option has for a figure that was measured."""
    return f"; device={sheet.option}: {si_number(sheet.device[key])}" if sheet and isinstance(sheet.device.get(key), int | float) else ""


def four_digits(value: float) -> float:
    """A measured number with four digits."""
    return float(f"{value:.4g}")


def figure_values(figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the figures as the mapping that their YAML is read as."""
    values: dict[str, Any] = {}
    for key, value, _ in figures:
        section, _, name = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = dict(value) if isinstance(value, dict) else value
    return values


def si_number(value: float) -> str:
    """A number as the files of conf/ write it: 85.03e9, 6.5e-6, 0.78; it reads back as the same number, up to 12 digits."""
    if value == 0 or 1e-2 <= abs(value) < 1e3:
        return str(float(f"{value:.12g}"))
    power = 3 * floor(log10(abs(value)) / 3)
    return f"{value / 10.0**power:.12g}e{power}"
