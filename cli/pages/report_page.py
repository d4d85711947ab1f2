"""`distrain report`: a run as a page: its history, its plan against what was measured, its loss curve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...trainer.rundir.measured_run import MeasuredRun
from ...trainer.rundir.planned_measured import PlannedMeasured
from ...trainer.rundir.saves_and_restarts import RestartReason, SavesInAll
from ...trainer.rundir.slow_devices import SlowDevice
from ...trainer.spec.numbers.as_text import count_text, plural, seconds_range_text, seconds_text, share_text, size_text
from ...trainer.spec.problem import one_line
from .loss_chart import loss_label, run_chart
from .text_layout import Style, evenly_spaced, table, wrap

SMALL_DRIFT = 0.02  # below it a figure is as planned
MANY_TIMES = 10  # of a planned figure, from which on a measured one is said to be so many times it
MUCH_WAITING = 0.1  # share of a step that rank 0 waited for a core, from which on it is said
TURN_SECONDS = 1e-3  # below it seconds are not compared: other processes and the clock make more
PLANNED_COLUMNS = ("", "planned", "measured", "drift")
NOTHING_MEASURED = "Nothing was measured yet"
MOST_RESTARTS = 5  # the last ones, that have a line each
LONGEST_REASON = 200  # characters


def report_text(run: MeasuredRun, style: Style) -> str:
    """The page of a run."""
    head = [style.paint(line, "bold") for line in wrap(headline(run), hang="  ")]
    history = [line for each in history_sentences(run) for line in wrap(each, indent="  ")]
    sections = ([*head, *history], planned_measured_table(run, style), run_chart(run.losses, run.validations, style, run.loss_unit))
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def headline(run: MeasuredRun) -> str:
    """One line: the steps of a run and its first and last losses."""
    learned = f"; loss {loss_label(run.losses[0][1])} -> {loss_label(run.losses[-1][1])}" if run.losses else ""
    lasts = [f"{name} {loss_label(points[-1][1])}".lstrip() for name, points in run.validations]
    held = f", validation {', '.join(lasts)}" if lasts else ""
    accuracy = f", accuracy {run.accuracy:.3f}" if run.accuracy is not None else ""
    unigram = f" (unigram entropy {loss_label(run.entropy)})" if run.entropy is not None else ""
    return f"{one_line(run.name)}: {run.steps:,} of {plural(run.whole, 'step')}{learned}{accuracy}{held}{unigram}"


def planned_measured_table(run: MeasuredRun, style: Style) -> list[str]:
    """The table of planned and measured figures, and a sentence on what drifted most."""
    rows = planned_measured_rows(run)
    if not rows:
        return [NOTHING_MEASURED]
    first, *lines = (f"  {line}" for line in table([PLANNED_COLUMNS, *rows]))
    return [
        *(style.paint(line, "bold") for line in wrap(planned_measured_title(run), hang="  ")),
        first,
        *lines,
        *(line for each in drift_sentences(run) for line in wrap(each)),
    ]


def planned_measured_title(run: MeasuredRun) -> str:
    """The heading of the table, with what the process takes beside its tensors."""
    resident = f"; the process takes {size_text(run.resident)} in all" if run.resident and run.device == "cpu" else ""
    early = "" if run.whole_batch else ", before those of train.batch"
    steps = f" in steps of {plural(run.batch, 'sequence')}{early}" if run.batch else ""
    since = f" from step {run.planned_since} on, in the layout since then" if run.planned_since is not None else ""
    return f"Planned and measured{steps}{since}{resident}"


def planned_measured_rows(run: MeasuredRun) -> list[list[str]]:
    """Name, planned figure, measured figure and drift of all that is known."""
    known = (each for each in (*run.memory, *run.time, *run.speed, *run.saving) if each.planned is not None or each.measured is not None)
    return [[each.name, figure_text(each, each.planned), figure_text(each, each.measured), drift_text(each)] for each in known]


def incident_lines(run: MeasuredRun) -> list[str]:
    """A line that counts skipped steps, loss spikes and restarts after faults; none where there were none."""
    restarts = [f"{plural(len(run.restart_reasons), 'restart')} after faults"] if run.restart_reasons else []
    counts = [*_anomaly_counts(run), *restarts]
    return ["; ".join(counts)] if counts else []


def _anomaly_counts(run: MeasuredRun) -> list[str]:
    """How many steps were skipped, and how many losses were spikes."""
    counts = []
    if run.skipped:
        skipped = f"{run.skipped:,} of {plural(run.steps, 'step')} {'was' if run.skipped == 1 else 'were'} skipped, weights unchanged"
        counts.append(f"{skipped}, because a loss or gradient was not finite")
    if run.skipped_spikes:
        counts.append(f"{plural(run.skipped_spikes, 'step')} {'was' if run.skipped_spikes == 1 else 'were'} skipped because of a spike")
    return [*counts, plural(run.spikes, "loss spike")] if run.spikes else counts


def drift_sentences(run: MeasuredRun) -> list[str]:
    """A sentence for memory and one for time: what lies furthest from the plan."""
    return [*_memory_drift(run), *_time_drift(run)]


def _memory_drift(run: MeasuredRun) -> Iterator[str]:
    known = [each for each in run.memory if each.drift is not None]
    if known:
        yield f"Memory: {_sentence(max(known, key=lambda each: abs(each.drift or 0.0)))}.{_uneven_routing(run)}"


def _uneven_routing(run: MeasuredRun) -> str:
    """What is planned for the load that the busiest rank of experts had, where activations drifted and that plan is another; else ""."""
    activations, found = next((each for each in run.memory if each.name == "activations"), None), run.expert_ranks
    if activations is None or found is None or abs(activations.drift or 0.0) < SMALL_DRIFT or activations.planned == found.activations:
        return ""
    at_load = PlannedMeasured(name="activations", unit="bytes", planned=found.activations, measured=activations.measured)
    share = f"The busiest rank of experts computed {found.load:.2f} times an even share"
    return f" {share}, for which (parallel.ep_load) {size_text(found.activations)} of activations are planned: {drift_text(at_load)}."


def _time_drift(run: MeasuredRun) -> Iterator[str]:
    step, *parts = run.time or (None,)
    if step is None or step.measured is None:
        return
    if step.drift is None:
        yield "Time: the plan has none; `distrain plan` with the same recipe says which rates it lacks."
        return
    if not run.is_warm:
        yield "Time: the first steps alone, which warm up; a run of more steps than log.every is measured without them."
        return
    where = ""
    known = [(each.name, each.measured - each.planned) for each in parts if each.planned is not None and each.measured is not None]
    if known and abs(step.drift) >= SMALL_DRIFT and not is_too_short(step):
        name, more = max(known, key=lambda each: abs(each[1]))
        where = f", of which {name} {'+' if more >= 0 else '-'}{seconds_text(abs(more))}"
    yield f"Time: {_sentence(step)}{where}{_against_bar(run, step)}.{_lack_of_cores(run, step)}"


def _lack_of_cores(run: MeasuredRun, step: PlannedMeasured) -> str:
    """That rank 0 waited for a core, where its steps are slower than planned and that is much of their time; else ""."""
    if run.without_core is None or run.without_core < MUCH_WAITING or (step.drift or 0.0) < SMALL_DRIFT or is_too_short(step):
        return ""
    return f" For {share_text(run.without_core)} of that time rank 0 had no core: others used it."


def _against_bar(run: MeasuredRun, step: PlannedMeasured) -> str:
    """Whether the measured step lies in the plan's error bar; "" for one that is as planned, or where the plan has none."""
    if run.step_bar is None or step.planned is None or step.measured is None or abs(step.drift or 0.0) < SMALL_DRIFT or is_too_short(step):
        return ""
    low, high = run.step_bar
    ends = seconds_range_text(step.planned, low, high).strip()
    return f"; {'inside' if low <= step.measured <= high else 'outside'} what the plan expects of nine runs in ten {ends}"


def _sentence(each: PlannedMeasured) -> str:
    assert each.drift is not None
    if abs(each.drift) < SMALL_DRIFT:
        return f"{each.name} is as planned ({drift_text(each)})"
    if is_too_short(each):
        return f"{each.name} is too short to compare with the plan"
    if each.drift + 1 >= MANY_TIMES:
        return f"{each.name} is {drift_text(each)} the plan"
    return f"{each.name} is {share_text(abs(each.drift))} {'above' if each.drift > 0 else 'below'} the plan"


def history_sentences(run: MeasuredRun) -> list[str]:
    """Damaged and missing files, attempts, repeated steps, restarts, incidents, checkpoints, saves, validation losses."""
    says = []
    if run.damaged:
        says.append(f"damaged and left out: {', '.join(run.damaged)}")
    if run.missing:
        says.append(f"missing: {', '.join(run.missing)}")
    if run.lost:
        says.append(f"the loss of {plural(run.lost, 'logged step')} is not finite")
    if run.starts > 1:
        twice = "".join(f"; went back from step {reached} to before step {began}" for reached, began in run.again)
        says.append(f"{plural(run.starts, 'attempt')}{twice}")
    if run.restart_reasons or run.goodput is not None:
        good = f"; goodput {share_text(run.goodput)}" if run.goodput is not None else ""
        says.append(f"{plural(len(run.restart_reasons), 'restart')} after faults{good}")
    says += restart_lines(run)
    says += ["; ".join(counts)] if (counts := _anomaly_counts(run)) else []
    says += [slow_device_text(each) for each in run.slow]
    if run.saved:
        says.append(f"checkpoints: step {', '.join(map(str, run.saved))}")
    says += saves_sentences(run.saves)
    for figure, curves in (("loss", run.validations), ("loss of the averaged weights", run.averaged), ("accuracy", run.accuracies)):
        for name, values in curves:
            says.append(f"{validation_words(name, figure)} {_points(values, '.3f', 8)}")
    return [*says, *routing_sentences(run)]


def routing_sentences(run: MeasuredRun) -> list[str]:
    """How even a mixture's routing was, how many copies it dropped, what its routers add to the loss; none of other models."""
    says = []
    if run.expert_load:
        idle = f"; {plural(run.idle_experts, 'expert')} without a token" if run.idle_experts else ""
        where = f" (layer {run.busiest_layer})" if run.busiest_layer is not None else ""
        says.append(f"load of the busiest expert (even: 1): {_points(run.expert_load, '.2f')}{where}{idle}")
    if run.ep_load:
        says.append(f"load of the busiest rank of experts (parallel.ep_load plans it): {_points(run.ep_load, '.2f')}")
    if run.dropped_copies:
        percent = tuple((step, 100 * share) for step, share in run.dropped_copies)
        says.append(f"copies dropped beyond model.capacity, in %: {_points(percent, '.1f')}")
    if run.router_loss:
        says.append(f"routers add to the loss: {_points(run.router_loss, '.4f')}")
    return says


def _points(curve: Sequence[tuple[int, float]], form: str, most: int = 4) -> str:
    """At most so many figures of a curve, each with its step."""
    return ", ".join(f"{value:{form}} at step {step}" for step, value in evenly_spaced(curve, most))


def validation_words(name: str, figure: str = "loss") -> str:
    """What the figures of a validation set are; without a name, those of the text that is held out."""
    return f"validation {figure}{' on' if figure != 'loss' else ' of'} {name}" if name else f"validation {figure}"


def restart_lines(run: MeasuredRun) -> list[str]:
    """A line for each of the last restarts, and how many there were before."""
    more = len(run.restart_reasons) - MOST_RESTARTS
    lines = [restart_text(each) for each in run.restart_reasons[-MOST_RESTARTS:]]
    return [*lines, *([f"and {more:,} more before these"] if more > 0 else [])]


def restart_text(restart: RestartReason) -> str:
    """From which step a run went on after a fault, why it was restarted, and how its hosts changed."""
    where = "restart that reached no step" if restart.step is None else f"restart from step {restart.step:,}"
    lost = f", {plural(restart.lost, 'step')} lost" if restart.lost is not None else ""
    why = [_shorten(each) for each in (restart.says.partition("; its log is ")[0], restart.hosts) if each]
    return f"{where}{lost}{': ' if why else ''}{'; '.join(why)}"


def _shorten(text: str) -> str:
    """Text as one line of a length that a page can hold."""
    line = one_line(text)
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 4]} ..."


def saves_sentences(saves: SavesInAll) -> list[str]:
    """How many saves there were, how long they took, and how long training waited for them; none where no save is recorded."""
    if not saves.count and not saves.failed:
        return []
    took = []
    if saves.seconds is not None and saves.longest is not None:
        longest = f" (longest {seconds_text(saves.longest)})" if saves.count > 1 else ""
        each = "a median of " if saves.count > 1 else ""
        took = [f"{plural(saves.count, 'save')} took {each}{seconds_text(saves.seconds)}{longest} and wrote {size_text(saves.bytes)}"]
    share = f", {share_text(saves.share)} of the time up to the last" if saves.share is not None else ""
    failed = [f"{plural(saves.failed, 'save')} failed"] if saves.failed else []
    return ["; ".join([*took, *failed, f"training waited {seconds_text(saves.pause)} in all{share}"])]


def slow_device_text(slow: SlowDevice) -> str:
    """A slow device, how slow it was, and when it was found so."""
    when = f"at step {slow.first:,}" if slow.first == slow.last else f"from step {slow.first:,} to {slow.last:,}"
    where = one_line(f"rank {slow.rank} ({slow.host}, {slow.device})")
    return f"slow device {when}: {where}, {slow.factor:.2f} times the median: up to {share_text(slow.step_share)} of a step"


def figure_text(each: PlannedMeasured, value: float | None) -> str:
    """A planned or measured value in the unit of its row; "?" where it is not known."""
    if value is None:
        return "?"
    match each.unit:
        case "bytes":
            return size_text(value)
        case "seconds":
            return seconds_text(value)
        case "rate":
            return count_text(value)
        case "share":
            return share_text(value)


def drift_text(each: PlannedMeasured) -> str:
    """The drift as a percentage with its sign, or from MANY_TIMES on as a factor; that seconds are too few to be timed; "" where it is not
    known."""
    if each.drift is None:
        return ""
    if is_too_short(each):
        return "too short"
    return f"{100 * each.drift:+.1f} %" if each.drift + 1 < MANY_TIMES else f"{each.drift + 1:.3g} times"


def is_too_short(each: PlannedMeasured) -> bool:
    """Whether planned and measured seconds are both less than an operating system may keep a process waiting for its turn."""
    return each.unit == "seconds" and max(each.planned or 0.0, each.measured or 0.0) < TURN_SECONDS
