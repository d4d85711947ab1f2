"""`distrain plan`: a plan as a page: its verdict, problems, mesh, memory, traffic, time, and the whole run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ...trainer.launch.file_checks import WOULD_REFUSE
from ...trainer.plan.engines.engine_limits import DOES_NOT_RUN
from ...trainer.plan.result import Memory, Message, Plan, StageMemory
from ...trainer.plan.save_interval import ENOUGH
from ...trainer.spec.format_numbers import (
    binary_unit,
    count_text,
    digits,
    in_unit,
    part_of_size,
    plural,
    rate_text,
    seconds_range_text,
    seconds_text,
    share_text,
    size_range_text,
    size_text,
)
from ...trainer.spec.problem import Problem, one_line
from .text_layout import Style, narrow_table, page_width, table, with_heading, wrap

MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "temporary", "overhead")
ACTIVATION_FORMS = {"torch": "of our modules", "compiled": "of our compiled layers", "megatron": "as the papers count them"}
HEADINGS = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "temporary": "temp", "overhead": "other"}
TIME_PARTS = {
    "compute": "computing",
    "exposed": "waiting for messages",
    "bubble": "waiting in the pipeline",
    "optimizer": "optimizer step",
}
MAX_STAGES = 12  # rows of stages; of more, the middle is left out
MAX_RANGES = 3  # ranges of layers that one row shows
MIN_BAR = 4  # columns of a bar
MIN_KINDS = 3  # kinds of memory that have a column of their own on any page
MAX_MESSAGES = 14  # rows of messages, the largest first


def plan_text(plan: Plan, style: Style) -> str:
    """The page of a plan."""
    sections = (
        [style.paint(line, "green" if plan.ok and plan.fits else "red") for line in wrap(verdict(plan), hang="  ")],
        [*_problem_lines(plan.problems, "problem", "red", style), *_problem_lines(plan.warnings, "warning", "yellow", style)],
        with_heading(_mesh_lines(plan), style),
        with_heading(_memory_lines(plan, style), style),
        with_heading(_traffic_lines(plan), style),
        with_heading(_time_lines(plan, style), style),
        with_heading(_run_lines(plan), style),
        wrap(text) if (text := _bars_text(plan)) else [],
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def verdict(plan: Plan) -> str:
    """One line: whether the plan fits, the memory of its fullest device, its speed, and why nothing here runs it."""
    memory = plan.memory
    if memory is None:
        return f"{one_line(plan.name)} can't be laid out: {plural(len(plan.problems), 'problem')}"
    of = (
        part_of_size(memory.peak, memory.capacity)
        + size_range_text(memory.peak, plan.memory_low, plan.memory_high)
        + (", without activations, which are not known" if memory.unknown else "")
    )
    where = f" on stage {memory.stage}" if len(memory.stages) > 1 else ""
    if not plan.fits:
        says = f"{fit_words(plan)}: needs {of}{where}"
    elif not plan.ok:
        says = f"can't run: {plural(len(plan.problems), 'problem')} (memory fits: {of})"
    else:
        says = f"{fit_words(plan)}: {of}"
    return f"{one_line(plan.name)} {says}{_speed_text(plan)}{_not_runnable(plan)}"


def fit_words(plan: Plan) -> str:
    """Whether the plan's memory fits; "probably" where the capacity lies inside the error bar."""
    assert plan.memory
    capacity = plan.memory.capacity
    if plan.fits:
        return "probably fits" if plan.memory_high is not None and plan.memory_high > capacity else "fits"
    return "probably does not fit" if plan.memory_low is not None and plan.memory_low <= capacity else "does not fit"


def _not_runnable(plan: Plan) -> str:
    if plan.runnable or not (plan.fits and plan.ok):
        return ""
    return "; `fit` would refuse it on this machine" if refusal_here(plan) else f"; not run: {engine_limit(plan)}"


def _engine_note(plan: Plan) -> str:
    """Why that engine, or that it does not run the layout."""
    if not (plan.runnable or refusal_here(plan)):
        return " (planned only: this version does not run it)"
    return f" ({plan.engine_reason})" if plan.engine_reason else ""


def engine_limit(plan: Plan) -> str:
    """The first override that keeps the plan's engine from running it."""
    limits = [each.says.partition(DOES_NOT_RUN)[2] for each in plan.warnings if each.rule == "engine"]
    return next(filter(None, limits), "no engine runs it")


def refusal_here(plan: Plan) -> str:
    """The first reason why `fit` would refuse the run on this machine; "" where there is none."""
    return next((str(each).removeprefix(f"{WOULD_REFUSE}: ") for each in plan.warnings if each.says.startswith(WOULD_REFUSE)), "")


def _speed_text(plan: Plan) -> str:
    if plan.time is None or plan.throughput is None:
        return "; step time not known"
    days = f", {seconds_text(plan.run.seconds)}" if plan.run and plan.run.seconds is not None else ""
    speed = plan.throughput
    step = f"{seconds_text(plan.time.step)}{seconds_range_text(plan.time.step, plan.step_low, plan.step_high)}"
    return f"; {step} a step, {count_text(speed.tokens_per_second)} tokens/s, MFU {share_text(speed.mfu)}{days}"


def _problem_lines(problems: Sequence[Problem], noun: str, colour: str, style: Style) -> Iterator[str]:
    for each in problems:
        first, *rest = wrap(f"{noun}: {each}", indent="")
        yield first.replace(noun, style.paint(noun, colour), 1)
        yield from rest


def _mesh_lines(plan: Plan) -> list[str]:
    """The mesh, outermost axis first, the nodes of each axis's groups, and the schedule."""
    mesh = plan.mesh or {}
    shape = " x ".join(f"{axis} {degree}" for axis, degree in mesh.items() if degree > 1 and axis != "ep")
    experts = f" (ep {mesh['ep']} inside dp)" if mesh.get("ep", 1) > 1 else ""
    equals = f"{shape}{experts} = " if shape else ""
    return [
        *wrap(f"Mesh: {equals}{plural(plan.world, 'rank')} on {plural(plan.nodes, 'node')} x {plan.gpus} {one_line(plan.device)}"),
        *(wrap(plan.reading, indent="  ") if plan.reading else ()),
        *(line for axis, lie in plan.groups.items() for line in wrap(f"{axis.ljust(4)}{lie}", indent="  ")),
        *(wrap(", ".join(_schedule_parts(plan)), indent="  ") if plan.memory else ()),
    ]


def _schedule_parts(plan: Plan) -> Iterator[str]:
    if plan.microbatches is not None:
        staged = f"schedule {plan.schedule}, " if (plan.mesh or {}).get("pp", 1) > 1 else ""
        yield f"{staged}{plan.microbatches:,} micro-batch{'' if plan.microbatches == 1 else 'es'} a step"
    if plan.bubble_fraction:
        yield f"pipeline bubble {share_text(plan.bubble_fraction)}"
    yield (f"engine {plan.engine}{_engine_note(plan)}" if plan.engine else "no engine runs it")


def _memory_lines(plan: Plan, style: Style) -> list[str]:
    """Bytes of one rank by kind, a line for each range of similar stages, with bars of the capacity."""
    memory = plan.memory
    if memory is None:
        return []
    unknown = memory.unknown[:1]  # a column for the first: logits are activations too
    kinds = [kind for kind in MEMORY_KINDS if kind in unknown or any(getattr(stage.bytes, kind) for stage in memory.stages)]
    ranges, unit = _similar_stages(memory), binary_unit(memory.peak)
    cells = _memory_cells(ranges, kinds, unit, unknown)
    while len(kinds) > MIN_KINDS and len(table(cells, (0, 1), " ")[0]) + len("  100 %") + 2 > page_width():
        kinds.remove(min(kinds, key=lambda kind: max(getattr(stage.bytes, kind) for stage in memory.stages)))
        cells = _memory_cells(ranges, kinds, unit, unknown)
    heading, *lines = _with_bars(cells, [_fullest_stage(stages).bytes.total / memory.capacity for stages in ranges], style)
    if len(lines) > MAX_STAGES:
        lines = _without_middle(lines, next(at for at, stages in enumerate(ranges) if any(each.index == memory.stage for each in stages)))
    note = "; a range of stages shows its fullest" if any(len(stages) > 1 for stages in ranges) else ""
    title = f"Memory of a rank in {unit}, capacity {in_unit(memory.capacity, unit)}; activations {ACTIVATION_FORMS[memory.form]}{note}"
    return [*wrap(title), f"  {heading}", *lines]


def _with_bars(cells: Sequence[Sequence[str]], shares: Sequence[float], style: Style) -> list[str]:
    """A table's heading line, and its rows with a percentage and, where there is room for one, a bar."""
    percents = [f"{digits(100 * each, 1) if each < 10 else count_text(100 * each)} %" for each in shares]
    longest, columns = max(4, *map(len, percents)), page_width()
    for gap in ("  ", " "):
        heading, *lines = table(cells, (0, 1), gap)
        bar_width = min(24, columns - max(map(len, (heading, *lines))) - longest - 5)
        if bar_width >= MIN_BAR:
            break
    bars = [f"{style.bar(each, bar_width)} " if bar_width >= MIN_BAR else "" for each in shares]
    return [heading, *(f"  {line}  {bar}{each.rjust(longest)}" for line, bar, each in zip(lines, bars, percents, strict=True))]


def _memory_cells(ranges: Sequence[Sequence[StageMemory]], kinds: Sequence[str], unit: str, unknown: Sequence[str]) -> list[list[str]]:
    """A row for each range of stages, with a column a kind; `other` is the sum of the kinds without a column."""
    columns = [kind for kind in kinds if kind != "overhead"]
    fullest = [_fullest_stage(stages).bytes for stages in ranges]
    others = [each.total - sum(getattr(each, kind) for kind in columns) for each in fullest]
    heading = ["stage", "layers", *(HEADINGS.get(kind, kind) for kind in columns), *(["other"] if any(others) else []), "total"]
    cells = [heading]
    for stages, held, other in zip(ranges, fullest, others, strict=True):
        figures = ["?" if kind in unknown else in_unit(getattr(held, kind), unit) for kind in columns]
        sums = [in_unit(each, unit) for each in ([other, held.total] if any(others) else [held.total])]
        cells.append([_range_text(stages[0].index, stages[-1].index), _layer_range(stages), *figures, *sums])
    return cells


def _similar_stages(memory: Memory) -> list[list[StageMemory]]:
    """Ranges of neighbouring stages that hold equally many layers and parameters."""
    return [list(stages) for _, stages in groupby(memory.stages, key=lambda each: (each.layers[1] - each.layers[0], each.parameters))]


def _fullest_stage(stages: Sequence[StageMemory]) -> StageMemory:
    return max(stages, key=lambda stage: stage.bytes.total)


def _layer_range(stages: Sequence[StageMemory]) -> str:
    """The layers of a range of stages, for each of the parts of the model that every stage holds."""
    first, last = stages[0], stages[-1]
    ranges = [(min(one[0], other[0]), max(one[1], other[1])) for one, other in zip(first.parts, last.parts, strict=True)]
    shown = [_range_text(start, end - 1) for start, end in ranges if end > start]
    if len(shown) > MAX_RANGES:
        shown = [shown[0], "..", shown[-1]]
    return ", ".join(shown) or "-"


def _range_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _without_middle(lines: list[str], fullest: int) -> list[str]:
    """Keep the first two lines, the line `fullest` and the last two; count the others."""
    kept = sorted({0, 1, fullest, len(lines) - 2, len(lines) - 1})
    short: list[str] = []
    for before, at in zip([-1, *kept], kept, strict=False):
        short += [f"  ... {plural(at - before - 1, 'line')} like these"] if at - before > 1 else []
        short.append(lines[at])
    return short


def _traffic_lines(plan: Plan) -> list[str]:
    """The messages that one rank sends in a step, by axis and link, largest first."""
    if not plan.traffic:
        return []
    by_link = {link: sum(each.sent for each in plan.traffic if each.link == link) for link in ("inside", "between")}
    total = ", ".join(f"{size_text(sent)} {link} {'nodes' if link == 'between' else 'the node'}" for link, sent in by_link.items() if sent)
    messages = sorted(plan.traffic, key=lambda each: -each.sent)
    rows = [
        ["axis", "verb", "link", "messages", "sent", "takes", "waited for"],
        *(_message_cells(each) for each in messages[:MAX_MESSAGES]),
    ]
    rest = messages[MAX_MESSAGES:]
    more = [f"  ... and {size_text(sum(each.sent for each in rest))} in {len(rest)} smaller kinds"] if rest else []
    return [
        *wrap(f"Traffic of a rank in a step: {total or 'nothing'}"),
        *(f"  {line}" for line in narrow_table(rows, (0, 1, 2), width=page_width() - 2)),
        *more,
    ]


def _message_cells(each: Message) -> list[str]:
    times = [seconds_text(value) if value is not None else "?" for value in (each.seconds, each.exposed)]
    return [each.axis, each.verb, each.link, f"{each.count:,} x {size_text(each.payload)}", size_text(each.sent), *times]


def _time_lines(plan: Plan, style: Style) -> list[str]:
    time, speed = plan.time, plan.throughput
    if plan.memory is None:
        return []
    if time is None or speed is None:
        return ["Time, throughput and days are not known", *wrap(_missing_rates(plan), indent="  ")]
    parts = [(label, getattr(time, part)) for part, label in TIME_PARTS.items() if getattr(time, part)]
    lines = table([[label, seconds_text(part), share_text(part / time.step)] for label, part in parts])
    bars = [style.bar(part / time.step, min(30, page_width() - len(lines[0]) - 4)) for _, part in parts]
    model, hardware = speed.model_flops_per_second_per_gpu, speed.hardware_flops_per_second_per_gpu
    recomputed = f", {rate_text(hardware, 'FLOP/s')} with recomputation (HFU {share_text(speed.hfu)})" if hardware > model else ""
    return [
        f"Time of a step: {seconds_text(time.step)}{seconds_range_text(time.step, plan.step_low, plan.step_high)}",
        *(f"  {line}  {bar}" for line, bar in zip(lines, bars, strict=True)),
        *wrap(f"on each device {rate_text(model, 'FLOP/s')} of the model (MFU {share_text(speed.mfu)}){recomputed}", indent="  "),
        f"  {count_text(speed.tokens_per_second)} tokens/s, {count_text(speed.tokens_per_second_per_gpu)} on each device",
    ]


def _missing_rates(plan: Plan) -> str:
    """How to have the time planned: the fix of the plan's own warning, where it has one."""
    fixes = [each.mend for each in plan.warnings if each.rule == "time" and each.mend]
    return fixes[0] if fixes else f"set cluster.device.peak and .bandwidth of {plan.device}, and both links"


def _run_lines(plan: Plan) -> list[str]:
    model, run = plan.model, plan.run
    if model is None:
        return []
    active = f", {count_text(model.active_parameters)} active per token" if model.active_parameters != model.parameters else ""
    per_token = rate_text(model.flops_per_token, "FLOP")
    trained = f", {count_text(model.trained_parameters)} trained" if model.trained_parameters != model.parameters else ""
    lines = wrap(f"Model: {count_text(model.parameters)} parameters{trained}{active}; {per_token} a token, forward and backward")
    if run is None:
        return lines
    time = seconds_text(run.seconds) if run.seconds is not None else "time not known"
    ideal = f" ({seconds_text(run.ideal_seconds)} at every device's peak)" if run.ideal_seconds is not None else ""
    flops = f"{run.flops:.3g}".replace("e+", "e")
    cost = f", {count_text(run.cost)} at cluster.price" if run.cost is not None else ""
    return [
        *lines,
        *wrap(f"{plural(run.steps, 'step')}, {count_text(run.tokens)} tokens, {flops} FLOP of the model: {time}{ideal}{cost}", indent="  "),
        f"  a checkpoint takes {size_text(run.checkpoint_bytes)}",
        *_saving_lines(plan),
    ]


def _saving_lines(plan: Plan) -> list[str]:
    """How often to save, for a run that is long enough to be interrupted."""
    saving = plan.saving
    if saving is None or saving.interruptions is None or saving.interruptions < ENOUGH:
        return []
    expected = f"about {plural(round(saving.interruptions), 'interruption')} expected, one in {seconds_text(saving.mtbf)}"
    if saving.seconds is None or saving.interval is None or saving.goodput is None:
        return wrap(f"{expected}; set cluster.storage (bytes/s) to see how often to save", indent="  ")
    best = f"saving every {seconds_text(saving.interval)} (checkpoint.every={saving.every}) gives the best goodput"
    return wrap(f"{expected}; a save takes {seconds_text(saving.seconds)}: {best}, {share_text(saving.goodput)}", indent="  ")


def _bars_text(plan: Plan) -> str:
    """What the ends in brackets mean, and which measured runs they rest on."""
    reasons: dict[str, list[str]] = {}
    for figure, bar in plan.bars.items():
        of = f" ({plural(bar.runs, 'run')} of {plural(bar.sources, 'source')})" if bar.runs else ""
        reasons.setdefault(f"{bar.because}{of}", []).append(figure)
    if not reasons:
        return ""
    says = "; ".join(f"{' and '.join(figures)}: {why}" for why, figures in reasons.items())
    return f"In brackets: where nine runs in ten lie. {says[0].upper()}{says[1:]}"
