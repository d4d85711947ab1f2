"""Draws random recipes in random layouts from a seed, trains them and judges them by `distrain prove`'s own code.

Run `python -m distrain.scripts.random_layouts [seed=1] [count=100] [first=0] [planned=N] [folder=DIR] [--json FILE]`. `count` is how many
layouts are trained; `first` is the number of the first recipe, so that `first=17 count=1` repeats recipe 17 of that seed, or the next that
has a legal layout. With `planned=N` N recipes are drawn and only planned.

A recipe is a tiny model, options of data, optimizer, training and layout, and up to ten further draws of up to three keys each, whose
values are drawn from their types in the schema. Keys that the project's rules refuse, or that do nothing, are left out, and the refusal is
counted by its rule and first words. Layouts are drawn from the fields of `prove`'s layouts. Each is compared with one process: losses,
norms, weights, averages, validation losses of all sets, samples, messages and actions; memory by kind with its plan; half of the recipes
also resume in another layout. What departs is trained again in float64, which says whether it is rounding or an error. Each change that a
refusal offers is followed: the same refusal must not come again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from random import Random

from ...trainer.prove.trials.layouts import ONE_PROCESS, ProveLayout
from ...trainer.system.stop_requests import StopSignal, raise_on_stop_signals
from ..show_help import show_help
from .data_files import DataFiles, write_data_files
from .drawn_layout import draw_layout
from .drawn_recipe import draw_recipe
from .judged_proof import JudgedProof, RunFinding, Servers, judge_proof
from .legal_trials import LegalTrials
from .typed_recipe import DrawnRecipe

LAYOUTS = 4  # of a recipe
LAYOUT_TRIES = 16
CHECKED = 0.5  # share of the recipes that also train other micro-batches and resume
DEFAULTS = {"seed": "1", "count": "100", "first": "0", "planned": "0", "folder": "runs/random_layouts"}
REFUSALS_SHOWN = 40


def main() -> int:
    """Draw, train and judge; return 1 if anything but rounding was found."""
    given, json_file = read_arguments(sys.argv[1:])
    seed, count, folder = int(given["seed"]), int(given["count"]), Path(given["folder"])
    files, trials, proofs = write_data_files(folder / "data"), LegalTrials(), list[JudgedProof]()
    began, trained, number = time.monotonic(), 0, int(given["first"])
    last = number + int(given["planned"])
    servers = Servers(folder, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    try:
        with suppress(KeyboardInterrupt, StopSignal), raise_on_stop_signals():  # then report what is known so far
            while number < last if int(given["planned"]) else trained < count:
                recipe, layouts, checks = draw(seed, number, files, trials, folder)
                number += 1
                if int(given["planned"]) or not layouts:
                    continue
                again = f"python -m distrain.scripts.random_layouts seed={seed} first={number - 1} count=1"
                proofs.append(judge_proof(recipe, layouts, servers, checks=checks, again=again))
                trained += len(layouts)
                print(f"{number - 1:>5} {' '.join(proofs[-1].runs)}", flush=True)
                print("".join(map(finding_text, proofs[-1].findings)), end="", flush=True)
    finally:
        servers.close()
        if json_file:
            Path(json_file).write_text(f"{json.dumps(campaign_document(seed, proofs, trials), indent=1)}\n", encoding="utf-8")
    print("\n".join(table(proofs, trials)))
    print(f"{number - int(given['first'])} recipes, {trained} layouts, seed {seed}, in {time.monotonic() - began:,.0f} s; folder {folder}")
    return int(error_count(proofs, trials) > 0)


def read_arguments(arguments: list[str]) -> tuple[dict[str, str], str]:
    """Return (the values of KEY=VALUE arguments, the file behind --json); exit for any other argument."""
    rest, json_file = list(arguments), ""
    if "--json" in rest[:-1]:
        place = rest.index("--json")
        json_file = rest[place + 1]
        del rest[place : place + 2]
    given = {**DEFAULTS, **dict(each.partition("=")[::2] for each in rest)}
    unknown = [each for each in rest if each.partition("=")[0] not in DEFAULTS]
    unknown += [f"{key}={value}" for key, value in given.items() if key != "folder" and not value.isdigit()]
    if unknown:
        sys.exit(f"unknown: {' '.join(unknown)}: known are {' '.join(f'{key}={value}' for key, value in DEFAULTS.items())} --json FILE")
    return given, json_file


def draw(seed: int, number: int, files: DataFiles, trials: LegalTrials, folder: Path) -> tuple[DrawnRecipe, list[ProveLayout], bool]:
    """Draw recipe `number` of a seed, its layouts, and whether it has the checks of a proof."""
    random = Random(f"{seed} {number}")
    recipe = draw_recipe(random, files, trials, f"{folder}/{seed}_{number}")
    layers, layouts = recipe.recipe.run().model.layer_groups, dict[ProveLayout, None]()
    for _ in range(LAYOUT_TRIES):
        layout = draw_layout(random, layers)
        if layout != ONE_PROCESS and layout not in layouts and trials.is_legal(recipe, layout):
            layouts[layout] = None
            if len(layouts) == LAYOUTS:
                break
    return recipe, list(layouts), random.random() < CHECKED


def finding_text(finding: RunFinding) -> str:
    """A finding in lines."""
    confirmed = f"\n      {finding.wide}" if finding.wide else ""
    return f"  {finding.kind} of {finding.run}: {finding.says}{confirmed}\n      {finding.command}\n"


def error_count(proofs: Sequence[JudgedProof], trials: LegalTrials) -> int:
    """How many findings are neither rounding nor a line of a log."""
    findings = [each for proof in proofs for each in proof.findings]
    return sum(not each.is_rounding and each.kind != "log" for each in findings) + len(trials.crashes) + len(trials.wrong_advice)


def campaign_document(seed: int, proofs: Sequence[JudgedProof], trials: LegalTrials) -> dict[str, object]:
    """All results as JSON values."""
    return {
        "seed": seed,
        "errors": error_count(proofs, trials),
        "runs": sum(len(each.runs) for each in proofs),
        "findings": [asdict(each) for proof in proofs for each in proof.findings],
        "crashes": trials.crashes,
        "wrong_advice": trials.wrong_advice,
        "advice_followed": trials.followed,
        "refused": dict(trials.refused.most_common()),
        "examples": trials.examples,
    }


def table(proofs: Sequence[JudgedProof], trials: LegalTrials) -> Iterator[str]:
    """Yield the lines of the closing table."""
    findings = [each for proof in proofs for each in proof.findings]
    kinds = Counter(f"{each.kind}: {each.wide.partition(':')[0]}" if each.wide else each.kind for each in findings)
    yield f"\n{sum(len(each.runs) for each in proofs)} runs trained"
    yield from (f"{count:>6} {kind}" for kind, count in sorted(kinds.items()))
    yield f"{trials.refused.total()} draws refused; {trials.followed} changes that refusals offer were followed"
    yield from (f"{count:>6} {name}" for name, count in trials.refused.most_common(REFUSALS_SHOWN))
    yield from (f"crash: {name}\n{text}" for name, text in trials.crashes.items())
    yield from (f"wrong advice: {name}\n{text}" for name, text in trials.wrong_advice.items())


if __name__ == "__main__":
    show_help(__doc__)
    sys.exit(main())
