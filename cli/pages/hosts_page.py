"""The preflight of a run's hosts as a table."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

from ...trainer.launch.hosts.hostfile import Host
from ...trainer.launch.preflight.checks import HostState
from ...trainer.launch.preflight.preflight import PreflightReport, host_requirements, run_preflight
from ...trainer.plan.plan_data import Plan
from ...trainer.spec.numbers.as_text import plural, rate_text, seconds_text, size_text
from ...trainer.spec.run import Run
from .text_layout import narrow_table, page_width, wrap


def run_preflight_and_show(
    hosts: Sequence[Host], spares: Sequence[Host], run: Run, plan: Plan, show: Callable[[str], object]
) -> PreflightReport:
    """Ask all hosts and spares, show the table, and return the report. Raises SshInterrupted once a stop is requested."""
    report = run_preflight(hosts, host_requirements(run, plan), spares)
    for line in preflight_lines(report, {spare.name for spare in spares}):
        show(line)
    return report


def preflight_lines(report: PreflightReport, spares: Container[str] = ()) -> Iterator[str]:
    """Yield a row per host, those of `spares` marked; the notes; and the rate of the all-reduce."""
    heads = ["host", "answers in", "python", "torch", "slots", "has", "free disk", "clock", "reaches"]
    rows = [_row(each, len(report.seen)) for each in report.seen]
    marked = [[f"{name} (spare)" if name in spares else name, *cells] for name, *cells in rows]
    yield from narrow_table([heads, *marked], width=page_width())
    for note in report.notes:
        yield from wrap(f"note: {note}", hang="  ")
    if report.rate is not None:
        yield f"an all-reduce between the hosts runs at {rate_text(report.rate, 'B/s')}"


def _row(each: HostState, hosts: int) -> list[str]:
    slots = str(len(each.host.slots))
    if each.facts is None:
        return [each.name, "-", "-", "-", slots, "-", "-", "-", "-"]
    facts = each.facts
    cards, free = facts["cards"], facts["folder"].get("free")
    drift = f"{each.drift:+.0f} s" if abs(each.drift) >= 1 else "same"
    reaches = f"{len(each.links['reached'])} of {hosts - 1}" if each.links else "-"
    return [
        each.name,
        seconds_text(each.seconds),
        facts["versions"]["python"],
        facts["versions"]["torch"] or "-",
        slots,
        plural(len(cards), "GPU") if cards else plural(facts["cores"], "core"),
        size_text(free) if free is not None else "-",
        drift,
        reaches if hosts > 1 else "",
    ]
