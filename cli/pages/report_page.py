"""A run as a page of text: planned against measured, the curve, and where the drift is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...trainer.rundir.measured import Beside, Ran
from .format import Look, count, many, one_line, seconds, share, size, table, width, wrapped

TALL = 12  # lines of a curve
SMALL = 0.02  # drift below which a figure is as planned
EDGE = 8  # columns of a curve's own scale

Points = Sequence[tuple[int, float]]


def page(run: Ran, look: Look) -> str:
    """The whole page."""
    head = [look.paint(line, "bold") for line in wrapped(headline(run), hang="  ")]
    sections = ([*head, *_course(run)], beside(run, look), _curve(run, look))
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def headline(run: Ran) -> str:
    """One line: how far the run is and what it has learned."""
    learned = f"; loss {level(run.losses[0][1])} -> {level(run.losses[-1][1])}" if run.losses else ""
    held = f", validation {level(run.validation[-1][1])}" if run.validation else ""
    unigram = f" (single tokens alone: {level(run.entropy)})" if run.entropy is not None else ""
    return f"{one_line(run.name)}: {run.steps:,} of {many(run.whole, 'step')}{learned}{held}{unigram}"


def beside(run: Ran, look: Look) -> list[str]:
    """The table of planned and measured figures, and what drifted most."""
    rows = [each for each in (*run.memory, *run.time, *run.speed) if each.planned is not None or each.measured is not None]
    if not rows:
        return ["Nothing was measured yet"]
    cells = [["", "planned", "measured", "drift"]]
    cells += [[each.name, figure(each, each.planned), figure(each, each.measured), _drift(each)] for each in rows]
    first, *lines = (f"  {line}" for line in table(cells))
    resident = f"; the process takes {size(run.resident)}" if run.resident and run.device == "cpu" else ""
    heading = f"Planned and measured{resident}, with all that is no tensor" if resident else "Planned and measured"
    return [
        *(look.paint(line, "bold") for line in wrapped(heading, hang="  ")),
        first,
        *lines,
        *(line for each in drifts(run) for line in wrapped(each)),
    ]


def incidents(run: Ran) -> list[str]:
    """A line that counts skipped steps, spikes of the loss and restarts after faults; none where there were none."""
    said = []
    if run.skipped:
        were = "was" if run.skipped == 1 else "were"
        said.append(
            f"{run.skipped:,} of {many(run.steps, 'step')} {were} skipped (a loss or gradient was not finite), and the weights stayed"
        )
    said += [f"{many(run.spikes, 'spike')} of the loss"] if run.spikes else []
    said += [f"{many(len(run.restarts), 'restart')} after faults"] if run.restarts else []
    return ["; ".join(said)] if said else []


def drifts(run: Ran) -> list[str]:
    """A sentence for memory and one for time: what lies furthest from the plan."""
    said = []
    found = [each for each in run.memory if each.drift is not None]
    if found:
        worst = max(found, key=lambda each: abs(each.drift or 0.0))
        said.append(f"Memory: {_sentence(worst)}.")
    parts = [each for each in run.time[1:] if each.planned is not None and each.measured is not None]
    step = run.time[0] if run.time else None
    if step is not None and step.drift is not None and step.planned is not None and step.measured is not None:
        where = ""
        if parts and abs(step.drift) >= SMALL:
            worst = max(parts, key=lambda each: abs((each.measured or 0.0) - (each.planned or 0.0)))
            more = (worst.measured or 0.0) - (worst.planned or 0.0)
            where = f", of which {worst.name} {'+' if more >= 0 else '-'}{seconds(abs(more))}"
        said.append(f"Time: {_sentence(step)}{where}.")
    elif step is not None and step.measured is not None:
        said.append("Time: the plan had none; `distrain fit` measures this machine once, and plans after it have.")
    return said


def _sentence(each: Beside) -> str:
    assert each.drift is not None
    if abs(each.drift) < SMALL:
        return f"{each.name} is as planned ({_drift(each)})"
    return f"{each.name} is {share(abs(each.drift))} {'above' if each.drift > 0 else 'below'} the plan"


def _course(run: Ran) -> list[str]:
    """What is damaged or not finite, starts, steps that were done twice, checkpoints, validation points."""
    lines = []
    if run.damaged:
        lines += wrapped(f"not as it was written, and left out: {', '.join(run.damaged)}", indent="  ")
    if run.lost:
        lines += wrapped(f"the loss of {many(run.lost, 'logged step')} is not finite", indent="  ")
    if run.starts > 1:
        twice = "".join(f"; went back from step {reached} to before {began}" for reached, began in run.again)
        lines += wrapped(f"{many(run.starts, 'start')}{twice}", indent="  ")
    if run.restarts or run.goodput is not None:
        after = "".join(f"; from step {step}, {many(lost, 'step')} lost" for step, lost in run.restarts)
        good = f"; goodput {share(run.goodput)}" if run.goodput is not None else ""
        lines += wrapped(f"{many(len(run.restarts), 'restart')} after faults{after}{good}", indent="  ")
    lines += [line for each in incidents(replace(run, restarts=())) for line in wrapped(each, indent="  ")]
    if run.saved:
        lines += wrapped(f"checkpoints of step {', '.join(map(str, run.saved))}", indent="  ")
    if run.validation:
        points = evenly(run.validation, 8)
        lines += wrapped("validation " + ", ".join(f"{loss:.3f} at {step}" for step, loss in points), indent="  ")
    return lines


def evenly(points: Points, most: int) -> Points:
    """At most so many points, evenly, the last one among them."""
    if len(points) <= most:
        return points
    return [points[round(at * (len(points) - 1) / (most - 1))] for at in range(most)]


def figure(each: Beside, value: float | None) -> str:
    if value is None:
        return "?"
    match each.unit:
        case "bytes":
            return size(value)
        case "seconds":
            return seconds(value)
        case "rate":
            return count(value)
        case "share":
            return share(value)


def _drift(each: Beside) -> str:
    if each.drift is None:
        return ""
    return f"{100 * each.drift:+.1f} %" if abs(each.drift) < 1e3 else f"{100 * each.drift:+.1e} %"


def _curve(run: Ran, look: Look) -> list[str]:
    """The loss over steps: dots of braille, two wide and four high a letter, or stars; validation points as o."""
    if len(run.losses) < 2:
        return []
    wide, fine = width() - EDGE - 2, (2, 4) if look.blocks else (1, 1)
    every = [*run.losses, *run.validation]
    low, high = min(loss for _, loss in every), max(loss for _, loss in every)
    first, last = min(step for step, _ in every), max(step for step, _ in every)

    def place(step: int, loss: float, across: int, down: int) -> tuple[int, int]:
        x = round((step - first) / max(1, last - first) * (across - 1))
        return x, round((high - loss) / ((high - low) or 1.0) * (down - 1))

    dots = {place(step, loss, wide * fine[0], TALL * fine[1]) for step, loss in run.losses}
    letters = _braille(dots) if look.blocks else dict.fromkeys(dots, "*")
    letters |= dict.fromkeys((place(step, loss, wide, TALL) for step, loss in run.validation), "o")
    lines = ["".join(letters.get((x, y), " ") for x in range(wide)).rstrip() for y in range(TALL)]
    scale = {0: level(high), TALL - 1: level(low)}
    ends = f"{'step':>{EDGE}}  {first:<{wide // 2}}{last:>{wide - wide // 2}}"
    title = "Loss, nats a token" + (", and validation (o)" if run.validation else "")
    bar = "│" if look.blocks else "|"
    drawn = [f"{scale.get(y, ''):>{EDGE}} {bar}{line}" for y, line in enumerate(lines)]
    return [look.paint(title, "bold"), *drawn, ends]


def level(loss: float) -> str:
    """A loss at a curve's scale, which has EDGE columns for it."""
    return words if len(words := f"{loss:.3f}") <= EDGE else f"{loss:.2g}"


BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # the bit of a dot by its column and row in a letter


def _braille(dots: set[tuple[int, int]]) -> dict[tuple[int, int], str]:
    bits: dict[tuple[int, int], int] = {}
    for x, y in dots:
        at = (x // 2, y // 4)
        bits[at] = bits.get(at, 0) | BRAILLE[x % 2][y % 4]
    return {at: chr(0x2800 + each) for at, each in bits.items()}
