"""What a plan says of the whole run: its figures, a batch that grows, data that change, preferences, how often to save."""

from __future__ import annotations

from ...trainer.plan.plan_data import Plan
from ...trainer.plan.save_interval import ENOUGH, WORTH
from ...trainer.spec.numbers.as_text import count_text, plural, seconds_text, share_text, size_text

MAX_LEVELS = 4  # of a batch that grows, and stages of data, which are named


def run_figures(plan: Plan) -> dict[str, str]:
    """The whole run's figures by name; the time and the cost only where they are known."""
    run = plan.run
    if run is None:
        return {}
    known = {
        "steps": f"{run.steps:,}",
        "tokens": count_text(run.tokens),
        "FLOP of the model": f"{run.flops:.3g}".replace("e+", "e"),
        "of training": seconds_text(run.seconds) if run.seconds is not None else "",
        "device-hours": count_text(plan.world * run.seconds / 3600) if run.seconds is not None else "",
        "at every device's peak": seconds_text(run.ideal_seconds) if run.ideal_seconds is not None else "",
        "at cluster.price": count_text(run.cost) if run.cost is not None else "",
        "a checkpoint": size_text(run.checkpoint_bytes),
    }
    return {name: figure for name, figure in known.items() if figure}


def rampup_text(plan: Plan) -> str:
    """How the batch grows: the steps of each level and the time of one; "" where every step has the same batch."""
    levels = plan.run.levels if plan.run else ()
    if not levels:
        return ""
    shown = levels if len(levels) <= MAX_LEVELS else (levels[0], levels[-1])
    parts = [
        f"{each.batch:,} sequences in {plural(each.steps, 'step')}{f' of {seconds_text(each.step)}' if each.step is not None else ''}"
        for each in shown
    ]
    between = [] if shown is levels else [f"{len(levels) - len(shown):,} batches between"]
    mean = f"; MFU over the run {share_text(plan.run.mfu)}" if plan.run and plan.run.mfu is not None else ""
    return f"the batch grows: {', '.join([parts[0], *between, *parts[1:]])}{mean}"


def preference_text(plan: Plan) -> str:
    """The loss on preferences, and how long its reference takes; "" for a run that trains on none."""
    found = plan.run.preferences if plan.run else None
    if found is None:
        return ""
    seconds, says = found.reference_seconds, f"the loss is {found.loss.upper()} of pairs of answers, with beta {found.beta:g}"
    if seconds == 0:
        return f"{says}, without a reference"
    takes = f"takes at most {seconds_text(seconds)}" if seconds is not None else "takes time that is not known"
    return f"{says}; before the first step a forward pass over the pairs that the run reads {takes}"


def stages_text(plan: Plan) -> str:
    """What a run reads from each path of its data, where stages change their weights; "" where none does."""
    if plan.run is None or not plan.run.stages:
        return ""
    shown = plan.run.stages if len(plan.run.stages) <= MAX_LEVELS else (plan.run.stages[0], plan.run.stages[-1])
    parts = [f"{count_text(each.tokens)} tokens by weights {' : '.join(f'{weight:g}' for weight in each.weights)}" for each in shown]
    between = [] if shown is plan.run.stages else [f"{len(plan.run.stages) - len(shown):,} stages between"]
    read = [f"{count_text(each.tokens)}{f' ({_epochs_text(each.epochs)})' if each.epochs is not None else ''}" for each in plan.run.paths]
    return f"the data change: {', then '.join([parts[0], *between, *parts[1:]])}; of the {len(read)} paths it reads {', '.join(read)}"


def _epochs_text(epochs: float) -> str:
    return f"{epochs:,.0f} epochs" if epochs >= 100 else f"{epochs:.3g} epochs"


def saving_text(plan: Plan) -> str:
    """How often to save, for a run that is long enough to be interrupted; "" for a shorter one."""
    saving = plan.saving
    if saving is None or saving.interruptions is None or saving.interruptions < ENOUGH:
        return ""
    expected = f"about {plural(round(saving.interruptions), 'interruption')} expected, one in {seconds_text(saving.mtbf)}"
    if saving.seconds is None or saving.interval is None or saving.goodput is None:
        return f"{expected}; set {saving.missing} to see how often to save"
    best = f"saving every {seconds_text(saving.interval)} (checkpoint.every={saving.every}) gives the best goodput"
    waits = f", of which training waits {seconds_text(saving.pause)}" if saving.pause is not None and saving.pause < saving.seconds else ""
    other = saving.background_goodput
    better = f"; checkpoint.background=true: {share_text(other)}" if other is not None and other >= saving.goodput + WORTH else ""
    return f"{expected}; a save takes {seconds_text(saving.seconds)}{waits}: {best}, {share_text(saving.goodput)}{better}"
