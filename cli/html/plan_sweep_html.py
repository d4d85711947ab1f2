"""`distrain plan -m --html`: the plans of a sweep as one HTML file, with a row for each layout."""

from __future__ import annotations

from collections.abc import Sequence

from ...trainer.plan.plan_data import Plan
from ...trainer.spec.numbers.as_text import plural
from ...trainer.spec.problem import one_line
from ..pages.plan_facts import mesh_text
from ..pages.plan_sweep_page import COLUMNS, WHOLE_RUN, fastest_layout, layout_name, plan_cells, sweep_notes, unrun_words, whole_run_cell
from .markup import Markup, element, join
from .page import details, page, paragraphs, section, table, tiles
from .plan_html import plan_tiles


def sweep_html(plans: Sequence[tuple[Sequence[str], Plan]], commands: Sequence[str], command: str) -> str:
    """Return the page of a sweep's layouts, each given as its overrides and its plan; `commands` plan each of them alone."""
    names = [layout_name(words, plan) for words, plan in plans]
    fitting = [at for at, (_, plan) in enumerate(plans) if plan.ok and plan.fits]
    best = fastest_layout([plan for _, plan in plans])
    title = ", ".join(dict.fromkeys(one_line(plan.name) for _, plan in plans))
    says = f"{len(fitting):,} of {plural(len(plans), 'layout')} {'fits' if len(fitting) == 1 else 'fit'}"
    fastest = f"The fastest that fits: {names[best]}{unrun_words(plans[best][1])}" if best is not None else ""
    rows = [[name, *plan_cells(plan), whole_run_cell(plan)] for name, (_, plan) in zip(names, plans, strict=True)]
    meshes = dict.fromkeys(mesh_text(plan).rpartition(" = ")[2] for _, plan in plans)
    content = [
        element("p", "Plans of a sweep", class_="kind"),
        element("h1", title),
        element("p", element("span", says, class_=f"badge {'good' if fitting else 'bad'}")),
        element("p", "; ".join(meshes), class_="lead"),
        paragraphs([fastest]),
        tiles(list(plan_tiles(plans[best][1]))) if best is not None else Markup(""),
        section("Layouts", table(("layout", *COLUMNS, WHOLE_RUN), rows, (0, 1), strong=() if best is None else (best,), wrapped=(0,))),
        section("Problems", _problems(names, [plan for _, plan in plans])),
        paragraphs(sweep_notes([plan for _, plan in plans]), "note"),
        details("The command that plans each layout alone", "\n".join(commands)),
    ]
    return page(f"{title}: {says}", "; ".join(filter(None, [says, fastest])), content, command)


def _problems(names: Sequence[str], plans: Sequence[Plan]) -> Markup:
    """Each problem with the layouts that have it."""
    having: dict[str, list[str]] = {}
    for name, plan in zip(names, plans, strict=True):
        for each in plan.problems:
            having.setdefault(str(each), []).append(name)
    rows = ([says, join(element("div", name) for name in some)] for says, some in having.items())
    return table(("problem, and what would do", "layouts"), rows, wrapped=(0, 1)) if having else Markup("")
