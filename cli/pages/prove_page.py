"""A proof as text: an opening, a table row for each layout as it is judged, and a closing with the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from ...trainer.prove.checks.compare_trial_messages import message_differences
from ...trainer.prove.judge import AS_ONE_PROCESS, CONTROL_FACTOR, LayoutResult, ProofResult
from ...trainer.prove.trials.control_and_resume_trials import midway_step
from ...trainer.prove.trials.layouts import FILE_SCHEDULE, ProveLayout
from ...trainer.prove.trials.plan_proof import Proof
from ...trainer.prove.trials.written_choices import choices_sentence
from ...trainer.prove.untested import ALL_PARTS, skipped_checks, unused_parts
from ...trainer.rundir.absolute_paths import relative_folder
from ...trainer.spec.numbers.as_text import plural, seconds_text
from .prove_verdict import micro_batches, names_text, verdict_sentence
from .text_layout import Style, page_width, wrap

# What the parts of a layout's name mean, for a newcomer.
MEANINGS = {
    "dp": "dp: replicas share the batch",
    "zero": "zero: replicas share optimizer states (1), gradients (2), weights (3) too",
    "tp": "tp: ranks share each matrix product",
    "sequence": "sequence: the tokens between products too",
    "cp": "cp: ranks share the tokens of each sequence",
    "ep": "ep: replicas share the experts",
    "pp": "pp: stages share the layers",
    "file": "file: the actions of the recipe's own file",
    "chunks": "chunks: parts of the model a stage",
    "stages": "stages: layers of each part",
    "shard": "shard: ranks over which ZeRO shards",
    "gather": "gather: how often ZeRO 3 gathers weights",
    "is_delayed": "pipedream, pipedream_2bw: gradients of older weights, another curve by design; one process simulates it",
    "is_compressed": "powersgd: gradients as two factors of this rank, another curve by design; one process simulates it",
    "sync": "sync: steps that replicas take alone before they average, another curve by design; one process simulates it",
    "stale": "stale: steps that pass before a sum of gradients is used, another curve by design; one process simulates it",
    "servers": "servers: ranks that sum gradients and step weights for all",
    "offload": "offload: the host has the optimizer's states, or weights too (all), and steps",
    "all_to_all": "all_to_all: in attention cp ranks share the heads",
    "hierarchical": "hierarchical: gradients are summed inside nodes, then between them",
    "engine": "native: our own engine where another is the default",
}
COLUMNS = ("micros", "loss", "norm", "weights", "messages", "verdict")
RESULT_WIDTHS = (7, 7, 7, 9, 8)  # of the other columns
LEFT_ALIGNED = (4, 5)


class ProofTable:
    """The table of a proof, whose rows are made one by one and have the same widths."""

    def __init__(self, proof: Proof, style: Style) -> None:
        trials = [*proof.trials, *(each for each in (proof.control, proof.resume) if each and each.check)]
        self._widths = (max(map(len, [COLUMNS[0], *map(micro_batches, trials)])), *RESULT_WIDTHS)
        longest = max(len(each.name) for each in trials)
        room = page_width() - sum(self._widths)
        self._gap = "  " if longest <= room - 2 * len(self._widths) else " "
        self._name_width = max(len("layout"), min(longest, room - len(self._gap) * len(self._widths)))
        self._style = style

    def head(self) -> str:
        """The line of column names."""
        return self._style.paint(self._line("layout", COLUMNS), "bold")

    def row(self, result: LayoutResult) -> str:
        """A layout's line; a name that is too long for its column has a line of its own."""
        name = result.trial.name
        line = self._line("" if len(name) > self._name_width else name, _cells(result))
        line = self._style.paint(line, "green" if result.verdict in AS_ONE_PROCESS else "red")
        return f"{name}\n{line}" if len(name) > self._name_width else line

    def _line(self, name: str, cells: Sequence[str]) -> str:
        columns = enumerate(zip(cells, self._widths, strict=True))
        aligned = [cell.ljust(width) if column in LEFT_ALIGNED else cell.rjust(width) for column, (cell, width) in columns]
        return self._gap.join([name.ljust(self._name_width), *aligned]).rstrip()


def _cells(result: LayoutResult) -> list[str]:
    return [
        micro_batches(result.trial),
        *(_figure(each) for each in (result.loss, result.norm, result.weights)),
        (result.messages or {}).get("verdict", "-"),
        result.verdict,
    ]


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def proof_opening(proof: Proof) -> str:
    """What will be trained, and what the parts of the layouts' names mean."""
    run = proof.reference.run
    of = f" of its {proof.recipe.train.steps:,}" if (proof.recipe.train.steps or 0) > proof.steps else ""
    ranks = max(each.layout.ranks for each in proof.trials)
    where = f"up to {ranks} {'CPU processes' if run.cluster.device.kind == 'cpu' else 'GPUs'}, {run.train.precision}"
    layouts = plural(len(proof.trials), "layout")
    folder = f"run folders in {relative_folder(proof.folder)}"
    says = f"{proof.recipe.name}, {plural(proof.steps, 'step')}{of}: in one process, then in {layouts} on {where}; {folder}"
    written = choices_sentence(proof)
    own = wrap(written, hang="  ") if written else []
    meanings = "; ".join(text for part, text in MEANINGS.items() if any(_has_part(each.layout, part) for each in proof.trials))
    return "\n".join([*wrap(says, hang="  "), *wrap(meanings, hang="  "), *own])


def _has_part(layout: ProveLayout, part: str) -> bool:
    if part == "engine":
        return layout.engine != "auto"
    if part == "file":
        return layout.schedule == FILE_SCHEDULE
    if part in ("chunks", "stages", "shard", "gather", "sync", "stale", "servers", "offload"):
        return getattr(layout, part) is not None
    value: int | bool = getattr(layout, part)
    return bool(value) if part in ("zero", "sequence", "is_delayed", "is_compressed", "all_to_all", "hierarchical") else value > 1


def reference_line(result: LayoutResult) -> str:
    """The curve of one process, with which every row below is compared."""
    losses = result.curve.losses if result.curve else ()
    if not losses:
        return "one process took no step"
    curve = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
    says = f"one process: {curve} in {seconds_text(result.seconds)}; largest differences from it:"
    return "\n".join(wrap(says, hang="  "))


def proof_closing(proof: Proof, result: ProofResult, *, reasons: bool) -> str:
    """The tolerance, what the table does not show, and the verdict in one sentence; `reasons` lists the skipped layouts."""
    lines = [*wrap(_tolerance_sentence(result), hang="  "), *_control_lines(result)]
    lines += [line for each in (*result.layouts, *result.checks) for line in _failure_lines(each)]
    lines += _check_lines(proof, result) + _not_compared_lines(result) + _microbatch_lines(proof)
    lines += _untried_lines(proof, reasons=reasons) + _untested_lines(proof, result)
    return "\n".join(["", *lines, "", *wrap(verdict_sentence(proof, result), hang="  ")])


def _tolerance_sentence(result: ProofResult) -> str:
    tolerance, share = result.tolerance, result.weight_tolerance_share
    if tolerance.weights == float("inf"):
        weights = "weights are not judged in half precision or with moments in 8 bits"
    else:
        weights = f"weights within {tolerance.weights:.1e}" + (f" ({share:.0%} of the learning rates added up)" if share else "")
    return f"same: loss within {tolerance.loss:.1e} nats a token, gradient norm within {tolerance.norm:.1e} (relative), {weights}"


def _control_lines(result: ProofResult) -> list[str]:
    """What the control run says of rounding, where a layout has needed it."""
    control = result.control
    if not control or control.loss is None or (control.trial.check and not result.is_widened):
        return []
    figures = f"loss {_figure(control.loss)}, norm {_figure(control.norm)}, weights {_figure(control.weights)}"
    micros = micro_batches(control.trial)
    says = f"one process with micro-batches of {micros} differs from itself by {figures}"
    if not result.is_widened:
        return wrap(f"rounding does not explain it: {says}", hang="  ")
    return wrap(f"rounding grows in this recipe: {says}; a layout may differ {CONTROL_FACTOR:g} times as much", hang="  ")


def _failure_lines(result: LayoutResult) -> list[str]:
    reasons = [result.reason, "" if result.verdict == "rounding" else result.departure, result.in_float64]
    if result.verdict != "messages":  # else they are the reason
        reasons.append(message_differences(result.messages))
    if result.samples and result.samples not in result.reason:
        reasons.append(f"samples: {result.samples}")
    return [line for each in reasons if each for line in wrap(f"{result.trial.name}: {each}", hang="  ")]


def _check_lines(proof: Proof, result: ProofResult) -> list[str]:
    """From where a run resumed, and how far evaluations are apart."""
    says = [f"resumed: from step {midway_step(proof.steps)} of {proof.saver.layout.name}"] if proof.resume and proof.saver else []
    apart = [each.evaluation for each in (*result.layouts, *result.checks) if each.evaluation is not None]
    says += [f"evaluation at the end: losses within {_figure(max(apart))}"] if apart else []
    says += [f"no evaluation: {result.no_evaluation}"] if result.no_evaluation else []
    return wrap("; ".join(says), hang="  ") if says else []


def _untested_lines(proof: Proof, result: ProofResult) -> list[str]:
    """What the recipe leaves out, with the recipe that has it all, and the checks that were left out."""
    unused, skipped = unused_parts(proof, result), list(skipped_checks(proof, result))
    offer = f"; distrain prove conf={ALL_PARTS} has them all" if unused and proof.recipe.name != ALL_PARTS else ""
    says = [f"untested here: {', '.join(unused)}{offer}"] if unused else []
    says += [f"not checked: {', '.join(skipped)}"] if skipped else []
    return [line for each in says for line in wrap(each, hang="  ")]


def _not_compared_lines(result: ProofResult) -> list[str]:
    names = result.not_compared
    if not names:
        return []
    shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return wrap(f"not compared, gradient only rounding: {shown}", hang="  ")


def _microbatch_lines(proof: Proof) -> list[str]:
    size = proof.reference.run.train.microbatch
    smaller = [each.layout.name for each in proof.trials if each.run.train.microbatch < size]
    says = f"micro-batch below {size}, so that every replica and stage works: {names_text(smaller)}"
    return wrap(says, hang="  ") if smaller else []


def _untried_lines(proof: Proof, *, reasons: bool) -> list[str]:
    """The layouts that were not tried, and why."""
    more = f"{plural(proof.unchosen, 'more layout')} could run: layouts=all" if proof.unchosen else ""
    if not reasons:
        cannot = (
            f"{len(proof.skipped) if more else plural(len(proof.skipped), 'layout')} can't run here: --reasons" if proof.skipped else ""
        )
        return wrap("; ".join(filter(None, [more, cannot])), hang="  ") if more or cannot else []
    lines = [more] if more else []
    if not proof.skipped:
        return lines
    layouts: dict[str, list[str]] = {}
    for each in proof.skipped:
        layouts.setdefault(each.problem.says, []).append(each.layout.name)
    says = [f"{reason}: {names_text(names)}" for reason, names in layouts.items()]
    return [*lines, "skipped:", *(line for each in says for line in wrap(each, indent="  "))]
