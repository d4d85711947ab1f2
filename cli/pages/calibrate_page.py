"""What `distrain calibrate` measured as a table, beside what plans know of the device without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...trainer.machine.cluster_measurement import ClusterMeasurement
from ...trainer.machine.measure_machine import BUSY
from ...trainer.machine.measurement import DeviceMeasurement
from ...trainer.spec.numbers.as_text import plural, rate_text, seconds_text, share_text, size_text
from ..recipe_files.calibrated_figures import slow_host_text
from .text_layout import Style, narrow_table, page_width, with_heading, wrap


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """A measured figure in SI units beside the known one (None: none is known)."""

    what: str
    measured: float
    known: float | None
    unit: str  # FLOP/s, bytes/s, seconds, bytes


def measured_rows(measured: DeviceMeasurement, known: Mapping[str, float]) -> tuple[MeasuredRow, ...]:
    """Return the rows of the table. `known` has figures by their keys in a device's file, and `inside.bandwidth` and `inside.latency`."""
    return tuple(_rows(measured, known))


def _rows(measured: DeviceMeasurement, known: Mapping[str, float]) -> Iterator[MeasuredRow]:
    for each in measured.products:
        what = f"product {each.side} x {each.side}, {each.precision}"
        yield MeasuredRow(what=what, measured=measured.rate(each.rates), known=known.get(f"peak.{each.precision}"), unit="FLOP/s")
    copied = f"copy of {size_text(measured.copy_bytes)}, read and written"
    yield MeasuredRow(what=copied, measured=measured.copy, known=known.get("bandwidth"), unit="bytes/s")
    yield MeasuredRow(what="op on 8 elements", measured=measured.launch, known=None, unit="seconds")
    yield MeasuredRow(what="memory", measured=measured.memory, known=known.get("memory"), unit="bytes")
    if measured.context is not None:
        yield MeasuredRow(what="driver and libraries", measured=measured.context, known=known.get("context"), unit="bytes")
    if found := measured.all_reduce:
        for size, seconds in ((found.short_bytes, found.short_seconds), (found.long_bytes, found.long_seconds)):
            what = f"all-reduce of {size_text(size)}, {plural(found.ranks, 'device')}"
            yield MeasuredRow(what=what, measured=seconds, known=None, unit="seconds")
        yield MeasuredRow(
            what="  as a ring: a device's link", measured=found.bandwidth, known=known.get("inside.bandwidth"), unit="bytes/s"
        )
        yield MeasuredRow(what="  as a ring: a hop", measured=found.latency, known=known.get("inside.latency"), unit="seconds")


def between_rows(cluster: ClusterMeasurement) -> tuple[MeasuredRow, ...]:
    """Return the rows of the links between hosts; () for one host."""
    return tuple(_between_rows(cluster))


def _between_rows(cluster: ClusterMeasurement) -> Iterator[MeasuredRow]:
    devices, hosts = cluster.hosts[0].devices.devices, len(cluster.hosts)
    together = cluster.together if devices > 1 else None  # else the same
    for found, sent in ((cluster.alone, "one device of each"), (together, f"all {devices} at once")):
        if found is None:
            continue
        for size, seconds in ((found.short_bytes, found.short_seconds), (found.long_bytes, found.long_seconds)):
            what = f"all-reduce of {size_text(size)}, {hosts} hosts, {sent}"
            yield MeasuredRow(what=what, measured=seconds, known=None, unit="seconds")
        yield MeasuredRow(what="  as a ring: a device's link", measured=found.bandwidth, known=None, unit="bytes/s")
        yield MeasuredRow(what="  as a ring: a hop", measured=found.latency, known=None, unit="seconds")


def spread_text(cluster: ClusterMeasurement, style: Style) -> str:
    """Return the table of how far the hosts' rates are apart, with the slowest and the fastest host, then a line for each slow one."""
    sides = {each.precision: each.side for each in cluster.hosts[0].devices.products}  # the last one of each is the largest
    largest = {f"product {side} x {side}, {precision}" for precision, side in sides.items()}
    cells = [["hosts", "slowest", "host", "median", "fastest", "host"]]
    for row in cluster.spreads:
        if row.kind == "product" and row.what not in largest:
            continue
        named = list(zip(row.rates, cluster.names, strict=True))
        low, high = min(named), max(named)
        cells.append([row.what, _text(low[0], row.unit), low[1], _text(row.median, row.unit), _text(high[0], row.unit), high[1]])
    lines = with_heading(narrow_table(cells, width=page_width()), style)
    for slow in cluster.slow_hosts:
        lines += wrap(slow_host_text(slow), hang="  ")
    return "\n".join(lines)


def calibrate_text(measured: DeviceMeasurement, rows: tuple[MeasuredRow, ...], source: str, style: Style) -> str:
    """Return the page: the devices, then a row for each figure; `source` is where the known ones come from."""
    share = f" of {plural(measured.threads, 'thread')} each" if measured.kind == "cpu" else ""
    together = ", measured together" if measured.all_devices > 1 else ", measured"
    hosts = f"{measured.hosts} hosts with " if measured.hosts > 1 else ""
    title = f"{measured.name}: {hosts}{devices_text(measured)}{share}{together} in {seconds_text(measured.seconds)}"
    cells = [["", "measured", source, "share"], *(_cells(each) for each in rows)]
    if all(each.known is None for each in rows):
        cells = [row[:2] for row in cells]
    table = narrow_table(cells, width=page_width())
    where = "This machine" if measured.hosts == 1 else "A host"
    busy = f"{where} was busy: {measured.load:.1f} processes per core ran in the minute before. On an idle one rates may be higher."
    return "\n".join([*wrap(title), "", *with_heading(table, style), *(["", *wrap(busy, hang="")] if measured.load >= BUSY else [])])


def devices_text(measured: DeviceMeasurement) -> str:
    """The number of devices: 1 GPU, 2 processes."""
    return plural(measured.devices, "GPU") if measured.kind == "cuda" else f"{measured.devices} process{'es' * (measured.devices > 1)}"


def _cells(row: MeasuredRow) -> list[str]:
    known = "" if row.known is None else _text(row.known, row.unit)
    return [row.what, _text(row.measured, row.unit), known, share_text(row.measured / row.known) if row.known else ""]


def _text(value: float, unit: str) -> str:
    match unit:
        case "bytes":
            return size_text(value)
        case "seconds":
            return seconds_text(value)
        case _:
            return rate_text(value, "B/s" if unit == "bytes/s" else unit)
