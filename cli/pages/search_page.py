"""`distrain search`: the layouts found as a page: the verdict, the best of each mesh, what slows the others, time against memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil
from shlex import quote

from ...trainer.plan.search.cluster_sizes import SizedAnswer, best_layout, best_size, is_within, knee, tokens_per_gpu
from ...trainer.plan.search.search import SLOWEST
from ...trainer.plan.search.search_result import Answer, FoundLayout
from ...trainer.spec.numbers.as_text import (
    binary_unit,
    count_text,
    in_unit,
    part_of_size,
    plural,
    seconds_range_text,
    seconds_text,
    share_text,
    size_range_text,
)
from ...trainer.spec.problem import one_line
from ...trainer.spec.sections.search_goal import SearchGoal
from ..arguments.command_name import command_name
from .text_layout import Style, evenly_spaced, narrow_table, page_width, with_heading, wrap

MAX_FRONT = 8  # rows of the front, evenly spaced
NEAREST = 15  # sizes below an answer that a search of each takes
PRICED = ("cost", "tokens_per_dollar")  # goals of a search that a price gives figures
TERM_WORDS = {"compute": "computing", "exposed": "messages", "bubble": "bubble", "optimizer": "optimizer step", "host": "host"}


@dataclass(frozen=True, kw_only=True)
class LayoutHint:
    """A better layout than that of a plan: a sentence, and the commands that find and plan it."""

    says: str
    commands: tuple[str, ...] = ()


def search_text(answer: Answer, words: Sequence[str], by: str, style: Style) -> str:
    """The page of a search `by` its goal; `words` are the recipe and the overrides of the command line."""
    sections = (
        [style.paint(line, "green" if answer.rows else "red") for line in wrap(_verdict(answer), hang="  ")],
        _price_lines(answer.rows, by),
        _next_lines(answer, words),
        _safe_lines(answer),
        with_heading(_row_lines(answer), style),
        with_heading(_front_lines(answer), style),
        wrap(_space_line(answer)) if answer.legal else [],
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def hint_text(hint: LayoutHint) -> str:
    """A hint at the end of another page."""
    return "\n".join(["", *wrap(hint.says), *(line for command in hint.commands for line in wrap(command, indent="  "))])


def best_hint(answer: Answer, words: Sequence[str]) -> LayoutHint:
    """The best layout, or why there is none."""
    if not answer.rows:
        return LayoutHint(says="; ".join(map(str, answer.problems)))
    best = answer.rows[0]
    speed = f"; {_speed_text(best)}" if best.step is not None else ""
    memory = part_of_size(best.memory, answer.capacity) + size_range_text(best.memory, best.memory_low, best.memory_high)
    says = f"The best of {answer.legal:,} layouts is {_mesh_words(best)}, {_other_words(best)}: {memory}{speed}"
    return LayoutHint(says=says, commands=(_plan_command(best, words),))


def waste_hint(best: FoundLayout, seconds: float, words: Sequence[str]) -> LayoutHint:
    """By how much the best layout is faster than one whose whole run takes `seconds`, and the commands that find and plan it."""
    assert best.step is not None
    assert best.days is not None
    wasted = share_text(1 - best.days * 86400 / seconds)
    says = f"This layout wastes {wasted} of its time: {_mesh_words(best)}, {_other_words(best)}, takes {seconds_text(best.step)} a step"
    return LayoutHint(says=says, commands=(_search_command(words), _plan_command(best, words)))


def search_hint(words: Sequence[str]) -> LayoutHint:
    """The command that finds the best layout."""
    return LayoutHint(says=f"{_search_command(words)} finds the best layout that fits")


def _search_command(words: Sequence[str]) -> str:
    conf, *overrides = words
    return f"{command_name()} search {' '.join(map(quote, (f'conf={conf}', *overrides)))}"


def _price_lines(rows: Iterable[FoundLayout], by: str) -> list[str]:
    """The line that costs are not known, where they were asked for."""
    steps = [row for row in rows if row.step is not None]
    if by not in PRICED or not steps or any(row.cost is not None for row in steps):
        return []
    return wrap("cluster.price (of a GPU-hour) is not set: no cost is known; the order is the same at any price")


def _verdict(answer: Answer) -> str:
    where = f"{plural(answer.nodes, 'node')} x {answer.gpus} {answer.device}"
    if not answer.rows:
        return f"{one_line(answer.name)} on {where}: {'; '.join(map(str, answer.problems))}"
    best = answer.rows[0]
    speed = f"; {_speed_text(best)}" if best.step is not None else "; no step time is known: layouts are compared by memory alone"
    memory = part_of_size(best.memory, answer.capacity) + size_range_text(best.memory, best.memory_low, best.memory_high)
    fits = "fits" if _surely_fits(best, answer) else "probably fits"
    return f"{one_line(answer.name)} on {where}: best is {_mesh_words(best)}, {_other_words(best)}; {fits}: {memory}{speed}"


def _surely_fits(layout: FoundLayout, answer: Answer) -> bool:
    """Whether the whole error bar of a layout's memory lies in what a device has."""
    return layout.memory_high is None or layout.memory_high <= answer.capacity


def _safe_lines(answer: Answer) -> list[str]:
    """The fastest layout whose whole error bar fits, where the best one's does not."""
    if not answer.rows or _surely_fits(answer.rows[0], answer):
        return []
    safe = next((each for each in answer.front if _surely_fits(each, answer)), None)
    if safe is None:
        room = f"search.headroom={_sure_headroom(answer):.2f} searches those that leave its width free"
        return wrap(f"No layout in the list below has an error bar that fits as a whole: {room}", hang="  ") if answer.front else []
    memory = part_of_size(safe.memory, answer.capacity) + size_range_text(safe.memory, safe.memory_low, safe.memory_high)
    step = f", {_front_time(safe)}{'' if _batch_grows(safe) else ' a step'}" if safe.step is not None else ""
    return wrap(f"The fastest whose whole error bar fits: {_mesh_words(safe)}, {_other_words(safe)}: {memory}{step}", hang="  ")


def _sure_headroom(answer: Answer) -> float:
    """The share of the memory that a layout leaves free whose whole error bar fits, by the widest bar of those that were found."""
    widest = max([each.memory_high / each.memory for each in (*answer.rows, *answer.front) if each.memory_high is not None])
    return ceil(100 * (1 - 1 / widest)) / 100


def _speed_text(layout: FoundLayout) -> str:
    assert layout.step is not None
    assert layout.tokens_per_second is not None
    mfu = f", MFU {share_text(layout.mfu)}" if layout.mfu is not None else ""
    days = f", {seconds_text(layout.days * 86400)}" if layout.days is not None else ""
    cost = f", {count_text(layout.cost)} at cluster.price" if layout.cost is not None else ""
    step = f"{seconds_text(layout.step)}{seconds_range_text(layout.step, layout.step_low, layout.step_high)}"
    return f"{step} a step, {count_text(layout.tokens_per_second)} tokens/s{mfu}{days}{cost}"


def _next_lines(answer: Answer, words: Sequence[str]) -> list[str]:
    """The words that plan the best layout."""
    return wrap(_plan_command(answer.rows[0], words), indent="  ") if answer.rows else []


def _plan_command(layout: FoundLayout, words: Sequence[str]) -> str:
    given = dict.fromkeys(layout.overrides)
    conf, *overrides = words
    return f"{command_name()} plan {' '.join(map(quote, (f'conf={conf}', *overrides, *given)))}"


def _row_lines(answer: Answer) -> list[str]:
    """A row for each mesh, with the rest of its layout and what slows it on a line below."""
    if not answer.rows:
        return []
    priced = any(row.cost is not None for row in answer.rows)
    unit = binary_unit(answer.capacity)
    heading = ["layout", "step", "tokens/s", "MFU", unit, *(["cost"] if priced else [])]
    cells = [[_mesh_words(row), *_figures(row, unit, priced=priced)] for row in answer.rows]
    table = narrow_table([heading, *cells], width=page_width() - 2)
    if len(table) != len(cells) + 1:
        return ["The best layout of each mesh", *(f"  {line}" for line in table)]
    lines = ["The best layout of each mesh", f"  {table[0]}"]
    for row, line in zip(answer.rows, table[1:], strict=True):
        lines += [f"  {line}", *wrap(f"{_other_words(row)}{_slower(row, answer.rows[0])}", indent="    ")]
    return lines


def _figures(layout: FoundLayout, unit: str, *, priced: bool) -> Iterator[str]:
    yield seconds_text(layout.step) if layout.step is not None else "-"
    yield count_text(layout.tokens_per_second) if layout.tokens_per_second is not None else "-"
    yield share_text(layout.mfu) if layout.mfu is not None else "-"
    yield in_unit(layout.memory, unit)
    if priced:
        yield count_text(layout.cost) if layout.cost is not None else "-"


def _mesh_words(layout: FoundLayout) -> str:
    degrees = [f"{axis} {degree}" for axis, degree in layout.mesh.items() if degree > 1]
    return " x ".join(degrees) or "one device"


def _other_words(layout: FoundLayout) -> str:
    """The rest of a layout: `micro-batch 1, ZeRO 1 over 32, interleaved in 8, sequence parallel, engine native`."""
    staged = layout.mesh["pp"] > 1
    words = [
        f"micro-batch {layout.microbatch}",
        f"ZeRO {layout.zero}" + ("" if layout.shard == "all" else f" over {layout.shard}"),
        (layout.schedule + (f" in {layout.chunks}" if layout.chunks > 1 else "")) if staged else "",
        _stage_words(layout),
        "tokens exchanged for heads" if layout.cp_comm == "all_to_all" else "",
        "sequence parallel" if layout.sequence else "",
        f"{layout.recompute} recomputation" if layout.recompute != "none" else "",
        f"{' and '.join(layout.offload)} on the host" if layout.offload else "",
        "compiled" if layout.compiled else "",
        f"engine {layout.engine}" if layout.engine else "no engine runs it",
    ]
    return ", ".join(filter(None, words))


def _stage_words(layout: FoundLayout) -> str:
    """The layers of each stage, equal neighbours counted, and what they win: `layers 3 x 20, 19 (1.2 % less time than even ones)`."""
    found = layout.boundaries
    if found is None or layout.step is None:
        return ""
    runs = [(layers, len(list(some))) for layers, some in groupby(found.stages)]
    words = ", ".join(f"{many} x {layers}" if many > 1 else str(layers) for layers, many in runs)
    won, most = (share_text(1 - seconds / found.even_step) for seconds in (layout.step, found.least_step))
    unproven = f"; none wins more than {most}" if won != most else ""
    return f"layers {words} ({won} less time than even ones{unproven})"


def _slower(layout: FoundLayout, best: FoundLayout) -> str:
    """By how much a layout is slower than the best, and the term that slows it most."""
    if layout.step is None or best.step is None or layout is best:
        return ""
    if _batch_grows(layout):
        assert layout.days is not None
        assert best.days is not None
        return f"; {share_text(layout.days / best.days - 1)} slower over the run"
    term, most = max(layout.slower_by.items(), key=lambda pair: pair[1])
    slower = f"; {share_text(layout.step / best.step - 1)} slower"
    return f"{slower}: {TERM_WORDS[term]} +{seconds_text(most)}" if most > 0 else slower


def _front_lines(answer: Answer) -> list[str]:
    """Layouts with less memory, and what they cost in time."""
    rows = answer.front
    if len(rows) < 2 or rows[0].step is None:
        return []
    shown = evenly_spaced(rows, MAX_FRONT)
    unit = binary_unit(answer.capacity)
    cells = [[in_unit(row.memory, unit), _front_time(row), f"{_mesh_words(row)}, {_other_words(row)}"] for row in shown]
    lines = ["Less memory, more time"]
    for memory, step, words in cells:
        lines += wrap(f"{memory} {unit}, {step}: {words}", indent="  ")
    left_out = f"  {len(shown)} of {len(rows)} such layouts, up to {SLOWEST:g} times as slow as the fastest; --json has all"
    return [*lines, *(wrap(left_out.strip(), indent="  ") if len(shown) < len(rows) else ())]


def _front_time(row: FoundLayout) -> str:
    """The time by which such layouts are ranked: of a step, or where the batch grows of the whole run."""
    return f"{seconds_text((row.days or 0.0) * 86400)} the run" if _batch_grows(row) else seconds_text(row.step or 0.0)


def _batch_grows(row: FoundLayout) -> bool:
    """Whether layouts are ranked by days, as no term slows their steps alone."""
    return not row.slower_by and row.days is not None


def _space_line(answer: Answer) -> str:
    return (
        f"{answer.legal:,} legal layouts: {answer.costed:,} costed, {answer.discarded:,} discarded by bounds that show that they are worse"
    )


def sizes_text(sizes: Sequence[SizedAnswer], goal: SearchGoal, style: Style) -> str:
    """The table of a search over sizes of the cluster, with the knee and the best size, or the smallest that is fast enough."""
    by = goal.by
    found = [row for each in sizes for row in each.answer.rows]
    priced = any(row.cost is not None for row in found)
    heading = ["GPUs", "step", "tokens/s", "per GPU", *(["days", "cost"] if priced else ["MFU", "days"]), "layout"]
    rows = [_size_row(each, priced=priced) for each in sizes]
    left = (len(heading) - 1,)
    lines = narrow_table([heading, *rows], left, width=page_width() - 2)
    best, at = best_size(sizes, by), knee(sizes)
    if goal.within is not None:
        best = next((each for each in sizes if is_within(each, goal.within)), None)
    name = one_line(sizes[0].answer.name)
    if not found:
        broken = next((each for size in sizes for each in size.answer.problems if each.rule != "memory"), None)
        verdict = f"{name}: {broken}" if broken else f"{name} fits on none of these sizes"
    elif goal.within is not None:
        verdict = _within_text(name, best, sizes[-1].nodes, goal.within)
    elif best is None:
        verdict = f"{name}: no step time is known, so no size is best by {by.replace('_', ' ')}: search.by=memory needs none"
    else:
        verdict = f"{name}: best by {by.replace('_', ' ')} on {plural(best.nodes, 'node')}"
        verdict += f"; up to {plural(at, 'node')} a GPU trains at least 80 % of the tokens that it trains at best" if at else ""
    head = [style.paint(line, "green" if best else "red") for line in wrap(verdict, hang="  ")]
    head += _untried_lines(sizes, best.nodes) if goal.within is not None and best else []
    return "\n".join([*head, *_price_lines(found, by), "", *(f"  {line}" for line in lines)])


def _within_text(name: str, found: SizedAnswer | None, most: int, days: float) -> str:
    """The verdict of a search for the smallest cluster that trains a run within so many days."""
    limit = seconds_text(days * 86400)
    layout = best_layout(found) if found else None
    if found is None or layout is None or layout.days is None or layout.step is None:
        return f"{name}: no size up to {plural(most, 'node')} trains it in {limit}"
    taken = layout.days * 86400
    ends = [None if end is None else end * taken / layout.step for end in (layout.step_low, layout.step_high)]
    bar = seconds_range_text(taken, *ends)
    where = f"{plural(found.nodes, 'node')} ({found.nodes * found.run.cluster.gpus:,} GPUs)"
    verb = "trains" if found.nodes == 1 else "train"
    return f"{name}: {where} {verb} it in {seconds_text(taken)}{bar}, the fewest of these sizes that take at most {limit}"


def _untried_lines(sizes: Sequence[SizedAnswer], enough: int) -> list[str]:
    """What sizes of fewer nodes were not tried, where more of those that were take longer: one of them may be fast enough."""
    tried = sorted((each.nodes, best.days) for each in sizes if (best := best_layout(each)) and best.days is not None)
    slower = [(fewer[0], more[0]) for fewer, more in pairwise(tried) if more[1] > fewer[1] and fewer[0] < enough]
    untried = sorted(set(range(1, enough)) - {each.nodes for each in sizes})
    if not slower or not untried:
        return []
    fewer, more = slower[0]
    says = f"Here {plural(more, 'node')} take longer than {plural(fewer, 'node')}, so a smaller size that was not tried may be fast enough"
    return wrap(f"{says}: search.nodes={max(1, enough - NEAREST)}..{enough - 1}+1 tries the nearest", hang="  ")


def _size_row(each: SizedAnswer, *, priced: bool) -> list[str]:
    best, gpus = best_layout(each), f"{each.nodes * each.run.cluster.gpus:,}"
    if best is None:
        return [gpus, *["-"] * 5, "none fits"]
    timed = best.step is not None and best.tokens_per_second is not None and best.days is not None
    cells = [
        seconds_text(best.step) if best.step is not None else "-",
        count_text(best.tokens_per_second) if best.tokens_per_second is not None else "-",
        count_text(tokens_per_gpu(each)) if timed else "-",
    ]
    days = f"{best.days:,.1f}" if best.days is not None else "-"
    mfu = share_text(best.mfu) if best.mfu is not None else "-"
    cost = count_text(best.cost) if best.cost is not None else "-"
    return [gpus, *cells, *([days, cost] if priced else [mfu, days]), _mesh_words(best)]
