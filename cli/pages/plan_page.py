"""A plan as a page of text: the verdict first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ...trainer.plan.result import Memory, Message, Plan, StageMemory
from ...trainer.plan.save_interval import ENOUGH
from ...trainer.spec.problem import Problem
from .format import (
    WOULD_REFUSE,
    Look,
    count,
    digits,
    in_unit,
    many,
    narrow_table,
    one_line,
    part,
    rate,
    seconds,
    share,
    size,
    table,
    unit_of,
    width,
    wrapped,
)

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
HEADS = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "overhead": "other"}
CAUSES = {
    "compute": "computing",
    "exposed": "waiting for messages",
    "bubble": "waiting in the pipeline",
    "optimizer": "optimizer step",
}
ROWS = 12  # stages that are shown before the middle is left out
SHORTEST = 4  # columns of a bar
FEWEST = 3  # kinds of memory that have a column of their own
MESSAGES = 14  # kinds of message that are shown, largest first


def page(plan: Plan, look: Look) -> str:
    """The whole page."""
    sections = (
        [look.paint(line, "green" if plan.ok and plan.fits else "red") for line in wrapped(verdict(plan), hang="  ")],
        [*_listed(plan.problems, "problem", "red", look), *_listed(plan.warnings, "warning", "yellow", look)],
        _headed(_mesh(plan), look),
        _headed(_memory(plan, look), look),
        _headed(_traffic(plan), look),
        _headed(_time(plan, look), look),
        _headed(_run(plan), look),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def verdict(plan: Plan) -> str:
    """One line: whether it fits, how full the fullest device is, and how fast it goes."""
    memory = plan.memory
    if memory is None:
        return f"{one_line(plan.name)} can't be laid out: {many(len(plan.problems), 'problem')}"
    of = part(memory.peak, memory.capacity)
    where = f" on stage {memory.stage}" if len(memory.stages) > 1 else ""
    if not plan.fits:
        says = f"does not fit: needs {of}{where}"
    elif not plan.ok:
        says = f"can't run: {many(len(plan.problems), 'problem')} ({of} would fit)"
    else:
        says = f"fits: {of}"
    return f"{one_line(plan.name)} {says}{_speed(plan)}{_refusal(plan)}"


def _refusal(plan: Plan) -> str:
    if plan.runnable or not (plan.fits and plan.ok):
        return ""
    return "; `fit` would refuse it here" if _refused_here(plan) else f"; not run: {_not_run(plan)}"


def _not_run(plan: Plan) -> str:
    """The first of the words that keep the plan's engine from running it."""
    limits = [each.says.partition(" does not run ")[2] for each in plan.warnings if each.rule == "engine"]
    return limits[0] if limits else "no engine here can"


def _refused_here(plan: Plan) -> str:
    """The first thing that `fit` would refuse of this machine's files; "" where it would refuse nothing."""
    return next((str(each).removeprefix(f"{WOULD_REFUSE}: ") for each in plan.warnings if each.says.startswith(WOULD_REFUSE)), "")


def _speed(plan: Plan) -> str:
    if plan.time is None or plan.throughput is None:
        return "; how long it takes is not known"
    days = f", {seconds(plan.run.seconds)}" if plan.run and plan.run.seconds is not None else ""
    speed = plan.throughput
    return f"; {seconds(plan.time.step)} a step, {count(speed.tokens_per_second)} tokens/s, MFU {share(speed.mfu)}{days}"


def _headed(lines: list[str], look: Look) -> list[str]:
    return [look.paint(lines[0], "bold"), *lines[1:]] if lines else []


def _listed(problems: Sequence[Problem], noun: str, colour: str, look: Look) -> Iterator[str]:
    for each in problems:
        first, *rest = wrapped(f"{noun}: {each}", indent="")
        yield first.replace(noun, look.paint(noun, colour), 1)
        yield from rest


def _mesh(plan: Plan) -> list[str]:
    """The mesh, outermost axis first, and how the groups of each axis lie on the nodes."""
    mesh = plan.mesh or {}
    shape = " x ".join(f"{axis} {degree}" for axis, degree in mesh.items() if degree > 1 and axis != "ep")
    experts = f" (ep {mesh['ep']} inside dp)" if mesh.get("ep", 1) > 1 else ""
    equals = f"{shape}{experts} = " if shape else ""
    return [
        *wrapped(f"Mesh: {equals}{many(plan.world, 'rank')} on {many(plan.nodes, 'node')} x {plan.gpus} {one_line(plan.device)}"),
        *(wrapped(plan.reading, indent="  ") if plan.reading else ()),
        *(line for axis, lie in plan.groups.items() for line in wrapped(f"{axis.ljust(4)}{lie}", indent="  ")),
        *(wrapped(", ".join(_schedule(plan)), indent="  ") if plan.memory else ()),
    ]


def _schedule(plan: Plan) -> Iterator[str]:
    if plan.microbatches is not None:
        staged = f"schedule {plan.schedule}, " if (plan.mesh or {}).get("pp", 1) > 1 else ""
        yield f"{staged}{plan.microbatches:,} micro-batch{'' if plan.microbatches == 1 else 'es'} a step"
    if plan.bubble_fraction:
        yield f"the pipeline is empty {share(plan.bubble_fraction)} of the time"
    yield (
        f"engine {plan.engine}{'' if plan.runnable or _refused_here(plan) else ' (this version plans it, but does not run it)'}"
        if plan.engine
        else "no engine runs it"
    )


def _memory(plan: Plan, look: Look) -> list[str]:
    """Bytes of one rank by kind, a line for each run of stages that are alike, with bars against the capacity."""
    memory = plan.memory
    if memory is None:
        return []
    kinds = [kind for kind in KINDS if any(getattr(stage.bytes, kind) for stage in memory.stages)]
    runs, unit = _runs(memory), unit_of(memory.peak)
    cells = _cells(runs, kinds, unit)
    while len(kinds) > FEWEST and len(table(cells, (0, 1), " ")[0]) + len("  100 %") + 2 > width():
        kinds.remove(min(kinds, key=lambda kind: max(getattr(stage.bytes, kind) for stage in memory.stages)))
        cells = _cells(runs, kinds, unit)
    head, *shown = _barred(cells, [_fullest(run).bytes.total / memory.capacity for run in runs], look)
    if len(shown) > ROWS:
        shown = _middle_left_out(shown, next(at for at, run in enumerate(runs) if any(stage.index == memory.stage for stage in run)))
    alike = "; a range shows its fullest stage" if any(len(run) > 1 for run in runs) else ""
    return [*wrapped(f"Memory of a rank, in {unit} of {in_unit(memory.capacity, unit)}{alike}"), f"  {head}", *shown]


def _barred(cells: Sequence[Sequence[str]], shares: Sequence[float], look: Look) -> list[str]:
    """A table's head, and its rows with a bar and a percentage of each: as wide as there is room for, else without bar."""
    percents = [f"{digits(100 * each, 1) if each < 10 else count(100 * each)} %" for each in shares]
    longest, columns = max(4, *map(len, percents)), width()
    for gap in ("  ", " "):
        head, *lines = table(cells, (0, 1), gap)
        room = min(24, columns - max(map(len, (head, *lines))) - longest - 5)
        if room >= SHORTEST:
            break
    bars = [f"{look.bar(each, room)} " if room >= SHORTEST else "" for each in shares]
    return [head, *(f"  {line}  {bar}{each.rjust(longest)}" for line, bar, each in zip(lines, bars, percents, strict=True))]


def _cells(runs: Sequence[Sequence[StageMemory]], kinds: Sequence[str], unit: str) -> list[list[str]]:
    """A row for each run of stages, with a column a kind; kinds that have none are in `other`."""
    named = [kind for kind in kinds if kind != "overhead"]
    rest = any(held.total > sum(getattr(held, kind) for kind in named) for run in runs for held in [_fullest(run).bytes])
    cells = [["stage", "layers", *(HEADS.get(kind, kind) for kind in named), *(["other"] if rest else []), "total"]]
    for run in runs:
        held = _fullest(run).bytes
        figures = [getattr(held, kind) for kind in named]
        others = [held.total - sum(figures)] if rest else []
        cells.append([_span(run[0].index, run[-1].index), _layers(run), *(in_unit(each, unit) for each in (*figures, *others, held.total))])
    return cells


def _runs(memory: Memory) -> list[list[StageMemory]]:
    """Neighbouring stages that hold as many layers and parameters."""
    return [list(run) for _, run in groupby(memory.stages, key=lambda stage: (stage.layers[1] - stage.layers[0], stage.parameters))]


def _fullest(run: Sequence[StageMemory]) -> StageMemory:
    return max(run, key=lambda stage: stage.bytes.total)


def _layers(run: Sequence[StageMemory]) -> str:
    first, last = run[0], run[-1]
    if last.layers[1] == first.layers[0]:
        return "-"
    back = f", {_span(last.back[0], first.back[1] - 1)}" if first.back and last.back else ""
    return _span(first.layers[0], last.layers[1] - 1) + back


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _middle_left_out(lines: list[str], fullest: int) -> list[str]:
    kept = sorted({0, 1, fullest, len(lines) - 2, len(lines) - 1})
    shown = []
    for before, at in zip([-1, *kept], kept, strict=False):
        shown += [f"  ... {many(at - before - 1, 'line')} like these"] if at - before > 1 else []
        shown.append(lines[at])
    return shown


def _traffic(plan: Plan) -> list[str]:
    """What one rank sends in a step, by axis and link, largest first."""
    if not plan.traffic:
        return []
    by_link = {link: sum(each.sent for each in plan.traffic if each.link == link) for link in ("inside", "between")}
    total = ", ".join(f"{size(sent)} {link} {'nodes' if link == 'between' else 'the node'}" for link, sent in by_link.items() if sent)
    messages = sorted(plan.traffic, key=lambda each: -each.sent)
    rows = [["axis", "verb", "link", "messages", "sent", "takes", "waited for"], *(_message(each) for each in messages[:MESSAGES])]
    rest = messages[MESSAGES:]
    more = [f"  ... and {size(sum(each.sent for each in rest))} in {len(rest)} smaller kinds"] if rest else []
    return [
        *wrapped(f"Traffic of a rank in a step: {total or 'nothing'}"),
        *(f"  {line}" for line in narrow_table(rows, (0, 1, 2), room=width() - 2)),
        *more,
    ]


def _message(each: Message) -> list[str]:
    times = [seconds(value) if value is not None else "?" for value in (each.seconds, each.exposed)]
    return [each.axis, each.verb, each.link, f"{each.count:,} x {size(each.payload)}", size(each.sent), *times]


def _time(plan: Plan, look: Look) -> list[str]:
    time, speed = plan.time, plan.throughput
    if plan.memory is None:
        return []
    if time is None or speed is None:
        return ["Time, throughput and days are not known", *wrapped(_how_to_know(plan), indent="  ")]
    parts = [(words, getattr(time, cause)) for cause, words in CAUSES.items() if getattr(time, cause)]
    rows = [[words, seconds(part), share(part / time.step)] for words, part in parts]
    lines = table(rows)
    bars = [look.bar(part / time.step, min(30, width() - len(lines[0]) - 4)) for _, part in parts]
    flops = (speed.model_flops_per_second_per_gpu, speed.hardware_flops_per_second_per_gpu)
    again = f", {rate(flops[1], 'FLOP/s')} with recomputation (HFU {share(speed.hfu)})" if flops[1] > flops[0] else ""
    return [
        f"Time of a step: {seconds(time.step)}",
        *(f"  {line}  {bar}" for line, bar in zip(lines, bars, strict=True)),
        *wrapped(f"on each device {rate(flops[0], 'FLOP/s')} of the model (MFU {share(speed.mfu)}){again}", indent="  "),
        f"  {count(speed.tokens_per_second)} tokens/s, {count(speed.tokens_per_second_per_gpu)} on each device",
    ]


def _how_to_know(plan: Plan) -> str:
    told = [each for each in plan.warnings if each.rule == "time" and each.mend]
    return told[0].mend if told else f"state what {plan.device} computes and moves: cluster.device.peak, .bandwidth, and both links"


def _run(plan: Plan) -> list[str]:
    model, run = plan.model, plan.run
    if model is None:
        return []
    active = f", {count(model.active_parameters)} of them met by a token" if model.active_parameters != model.parameters else ""
    flops = rate(model.flops_per_token, "FLOP")
    lines = wrapped(f"Model: {count(model.parameters)} parameters{active}; {flops} a token, forward and backward")
    if run is None:
        return lines
    took = seconds(run.seconds) if run.seconds is not None else "how long is not known"
    ideal = f" ({seconds(run.ideal_seconds)} at every device's peak)" if run.ideal_seconds is not None else ""
    whole = f"{run.flops:.3g}".replace("e+", "e")
    return [
        *lines,
        *wrapped(f"{many(run.steps, 'step')}, {count(run.tokens)} tokens, {whole} FLOP of the model: {took}{ideal}", indent="  "),
        f"  a checkpoint is {size(run.checkpoint_bytes)}",
        *_saving(plan),
    ]


def _saving(plan: Plan) -> list[str]:
    """How often to save, of a run that is long enough to be interrupted."""
    saving = plan.saving
    if saving is None or saving.interruptions is None or saving.interruptions < ENOUGH:
        return []
    expected = f"about {many(round(saving.interruptions), 'interruption')} to be expected, one in {seconds(saving.mtbf)}"
    if saving.seconds is None or saving.interval is None or saving.goodput is None:
        return wrapped(f"{expected}; state cluster.storage (bytes/s) to be told how often to save", indent="  ")
    best = f"saving every {seconds(saving.interval)} is best (checkpoint.every={saving.every})"
    kept = f"{share(saving.goodput)} of the time is then kept work"
    return wrapped(f"{expected}; a save takes {seconds(saving.seconds)}: {best}, and {kept}", indent="  ")


def rows(plans: Sequence[tuple[Sequence[str], Plan]], look: Look) -> str:
    """A sweep as a table: one line a layout."""
    cells = [["verdict", "memory", "step", "tokens/s", "MFU"], *(_layout(plan) for _, plan in plans)]
    words, room = ["layout", *(_short(words, plan) for words, plan in plans)], width() - 2
    numbers = table(cells)
    if max(map(len, numbers)) > room - len("layout"):  # the verdict stands with the words
        words = [f"{word}: {row[0]}" for word, row in zip(words, cells, strict=True)]
        numbers = table([row[1:] for row in cells], left=())
    wide = max(0, min(max(map(len, words)), room - max(map(len, numbers))))
    painted = ["bold", *("green" if plan.ok and plan.fits else "red" for _, plan in plans)]
    lines: list[str] = []
    for word, line, colour in zip(words, numbers, painted, strict=True):
        if len(word) > wide:
            lines += wrapped(word)
            word = ""
        lines.append(look.paint(f"{word.ljust(wide)}  {line}" if wide else f"  {line}", colour))
    readings = dict.fromkeys(plan.reading for _, plan in plans if plan.reading)
    refused = dict.fromkeys(f"refused: {why}" for _, plan in plans if plan.ok and plan.fits and (why := _refused_here(plan)))
    return "\n".join([*lines, *(line for each in (*readings, *refused) for line in wrapped(each))])


def _layout(plan: Plan) -> list[str]:
    memory, time, speed = plan.memory, plan.time, plan.throughput
    return [
        _word(plan),
        part(memory.peak, memory.capacity) if memory else "-",
        seconds(time.step) if time else "-",
        count(speed.tokens_per_second) if speed else "-",
        share(speed.mfu) if speed else "-",
    ]


def _word(plan: Plan) -> str:
    if plan.memory is not None and not plan.fits:
        return "does not fit"
    if plan.ok and plan.fits:
        if plan.runnable:
            return "fits"
        if _refused_here(plan):
            return "fits, refused"
        return f"fits, not run: {_not_run(plan).replace('parallel.', '').replace('train.', '')}"
    return f"can't: {plan.problems[0].rule}" if plan.problems else "can't"


def _short(words: Sequence[str], plan: Plan) -> str:
    """The words that make a layout, by their last names: `tp=8 pp=4`."""
    return " ".join(word.partition("=")[0].rpartition(".")[2] + "=" + word.partition("=")[2] for word in words) or one_line(plan.name)
