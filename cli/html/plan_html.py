"""`distrain plan --html`: a plan as one HTML file: its verdict, problems, mesh, memory, time, traffic, the whole run, its config."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from msgspec import to_builtins

from ...trainer.plan.plan_data import Memory, Plan
from ...trainer.plan.timeline.step_simulation import StepSimulation
from ...trainer.spec.numbers.as_text import count_text, plural, seconds_text, share_text
from ...trainer.spec.problem import one_line
from ..drawings.plan_drawing import KINDS, PARTS, memory_drawing, time_drawing
from ..drawings.timeline_drawing import timeline_drawing
from ..pages import plan_facts as facts
from ..pages import whole_run_facts as whole_run
from ..pages.document_facts import documents_text
from ..pages.memory_facts import capacity_share_text, capacity_shares, memory_kinds, memory_rows, memory_title, shown_ranges
from ..pages.operator_rows import operator_notes, operator_rows
from ..pages.search_page import LayoutHint
from ..pages.simulate_page import path_text, title_text, what_if_rows
from .markup import Markup, element, join
from .page import details, fact_tables, figure, page, paragraphs, problem_list, section, sentence, swatch, table, tiles

HEADINGS = {"overhead": "other"}
CONFIG = "The whole config"
PARALLELISM = {"pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "tp": "tensor"}  # for those who do not know the names


def plan_html(plan: Plan, step: StepSimulation | None, hint: LayoutHint | None, config: str, command: str) -> str:
    """Return the page of a plan; `step` is its simulated step, `hint` a better layout, `config` the YAML of the run, `command` what made
    the page."""
    content = [
        element("p", "Plan", class_="kind"),
        element("h1", one_line(plan.name)),
        _verdict(plan),
        element("p", facts.mesh_text(plan), class_="lead"),
        tiles(list(plan_tiles(plan))),
        problem_list(plan.problems, "Problem", "bad"),
        problem_list(plan.warnings, "Warning", "care"),
        _better_layout(hint),
        section("Memory", *_memory(plan)),
        section(f"Time of a step: {facts.step_figure(plan)}" if plan.time else "Time", *_time(plan)),
        section("One step, simulated", *_step(step, plan)),
        section("Mesh", *_mesh(plan)),
        section("Traffic", *_traffic(plan)),
        section("Model and run", *_run(plan)),
        paragraphs([facts.bars_text(plan)], "note"),
        details(CONFIG, config),
    ]
    return page(f"{one_line(plan.name)}: {facts.outcome(plan)}", facts.verdict(plan), content, command)


def _verdict(plan: Plan) -> Markup:
    says, note = facts.outcome(plan), facts.refusal_note(plan)
    kind = "bad" if not (plan.ok and plan.fits) else "care" if note or says != "fits" else "good"
    return element("p", element("span", says, class_=f"badge {kind}"), note)


def plan_tiles(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The figures that a reader looks for first, as far as they are known."""
    memory, time, speed, run = plan.memory, plan.time, plan.throughput, plan.run
    if memory:
        note = "; ".join(filter(None, [facts.memory_ends(plan).strip(), facts.unknown_note(plan)]))
        yield "memory of a device", facts.memory_part(plan), note
    if time:
        yield "a step", seconds_text(time.step), facts.step_ends(plan).strip()
    if speed:
        yield "tokens/s", count_text(speed.tokens_per_second), f"{count_text(speed.tokens_per_second_per_gpu)} on each device"
        hardware = f"HFU {share_text(speed.hfu)}" if speed.hfu > speed.mfu else ""
        yield "MFU", share_text(speed.mfu), hardware
    if run and run.seconds is not None:
        figures = whole_run.run_figures(plan)
        yield "the whole run", figures["of training"], f"{figures['steps']} steps"
        if run.cost is not None:
            yield "cost", figures["at cluster.price"], "at cluster.price"


def _better_layout(hint: LayoutHint | None) -> Markup:
    return section("A better layout", paragraphs([hint.says]), *(element("pre", each) for each in hint.commands)) if hint else Markup("")


def _memory(plan: Plan) -> Iterator[Markup]:
    memory = plan.memory
    if memory is None:
        return
    yield element("p", memory_title(memory), class_="note")
    yield figure(memory_drawing(to_builtins(plan)))
    (stage, layers, *names), *rows = memory_rows(memory, memory_kinds(memory), HEADINGS)
    rows = [[*row, capacity_share_text(share)] for row, share in zip(rows, capacity_shares(memory), strict=True)]
    colours = {name: colour for _, name, colour in KINDS}
    heading = [join([swatch(colours[name]), name]) if name in colours else name for name in names]
    yield table([stage, layers, *heading, "of capacity"], _shown_rows(rows, memory), (0, 1))
    if host := facts.host_text(plan):
        yield element("p", host, class_="note")


def _shown_rows(rows: list[list[str]], memory: Memory) -> Iterator[list[str]]:
    for before, at in pairwise([-1, *shown_ranges(memory)]):
        if at - before > 1:
            yield [f"{plural(at - before - 1, 'row')} like these"]
        yield rows[at]


def _time(plan: Plan) -> Iterator[Markup]:
    if plan.memory is None:
        return
    if plan.time is None or plan.throughput is None:
        yield paragraphs(["Time, throughput and days are not known.", sentence(facts.missing_rates(plan))])
        return
    yield figure(time_drawing(to_builtins(plan)))
    colours = {name: colour for _, name, colour in PARTS}
    rows = [
        [join([swatch(colours[label]), label]), seconds_text(seconds), share_text(share)]
        for label, seconds, share in facts.time_parts(plan)
    ]
    yield table(("", "seconds", "share"), rows)
    texts = [facts.host_wait_text(plan), facts.speed_texts(plan)[0], documents_text(plan)]
    yield paragraphs([sentence(each) for each in texts if each], "note")
    headings, *operators = operator_rows(plan)
    yield table(headings, operators)
    yield paragraphs([sentence(operator_notes(plan))], "note")


def _step(step: StepSimulation | None, plan: Plan) -> Iterator[Markup]:
    """The timeline, where there are several stages, its critical path, and what would change the step."""
    if step is None:
        if plan.time:
            yield paragraphs(["This step has too many passes for a page; distrain simulate runs it."])
        return
    if len(step.timeline.stages) > 1:
        yield paragraphs([sentence(title_text(step.timeline))], "note")
        yield figure(timeline_drawing(step.timeline))
        yield paragraphs([path_text(step)])
    yield table(("what if", "a step", "change"), what_if_rows(step))


def _mesh(plan: Plan) -> Iterator[Markup]:
    if plan.memory is None and not plan.groups:
        return
    yield paragraphs([sentence(plan.reading or ""), sentence(facts.schedule_text(plan)) if plan.memory else ""])
    degrees = plan.mesh or {}
    rows = [[axis, f"{degrees[axis]:,}" if axis in degrees else "", PARALLELISM.get(axis, ""), lie] for axis, lie in plan.groups.items()]
    yield table(("axis", "degree", "parallelism", "its groups"), rows, (0, 2, 3)) if rows else Markup("")


def _traffic(plan: Plan) -> Iterator[Markup]:
    if plan.traffic:
        rest = facts.rest_of_messages(plan)
        yield element("p", facts.traffic_title(plan), class_="note")
        yield table(facts.MESSAGE_COLUMNS, [*facts.message_rows(plan), *([[rest]] if rest else [])], (0, 1, 2))
        yield paragraphs([sentence(facts.rare_messages(plan))])


def _run(plan: Plan) -> Iterator[Markup]:
    yield fact_tables([facts.model_figures(plan), whole_run.run_figures(plan)])
    says = (whole_run.rampup_text, whole_run.stages_text, whole_run.preference_text, whole_run.saving_text)
    yield paragraphs([sentence(each(plan)) for each in says])
