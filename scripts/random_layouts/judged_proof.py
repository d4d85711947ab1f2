"""Proves a drawn recipe in its layouts by `prove`'s own code, on fork servers that serve many proofs, and names every finding.

What departs is trained again in float64, as `prove` does, and its checks too: `wide_verdict` says whether that was an error or rounding. Of
a recipe in a narrower type than float32, whose own code does not run in float64, it can't be said.
"""

from __future__ import annotations

import re
import shutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ...trainer.prove.confirm_departures import ROUNDING, UNCONFIRMED, narrow_words, wide_verdict
from ...trainer.prove.fork_client import COMMAND, WIDE_COMMAND, ForkServer, ServerGone
from ...trainer.prove.judge import LayoutResult, ProofResult
from ...trainer.prove.run_trials import run_proof
from ...trainer.prove.trials.layouts import ProveLayout
from ...trainer.prove.trials.plan_proof import NothingToProve, ProveRequest, plan_proof
from ...trainer.rundir.measured_run import read_measured_run
from .typed_recipe import DrawnRecipe

# What is float64 there: narrower types would round as before.
WIDE_WORDS = {"train.precision": "fp32", "train.gradients": "auto", "optim.moments": "fp32"}
MEMORY_SHARE, MEMORY_BYTES = 0.01, 4096  # by which measured bytes of a kind may differ from planned ones
UNPLANNED_ROUTING = {"routing", "capacity"}  # warnings of a plan whose activations depend on how tokens are routed
ODD_LINE = re.compile(r"Traceback|[Ww]arning|[Ee]rror\b")  # in the log of a rank

FindingKind = Literal["departs", "rounding", "messages", "actions", "failed", "hangs", "memory", "log", "crash", "no reference"]

UNSEEN_BY_PROVE: tuple[FindingKind, ...] = ("memory", "log")


@dataclass(frozen=True, kw_only=True)
class RunFinding:
    """What one run of a proof shows beside what it should, and the command that shows it again."""

    kind: FindingKind
    run: str  # the name of the layout, or of the check
    says: str
    command: str
    wide: str = ""  # what float64 says of a departure

    @property
    def is_rounding(self) -> bool:
        """Whether float64 has shown that only rounding departs."""
        return self.wide.startswith(ROUNDING)


@dataclass(frozen=True, kw_only=True)
class JudgedProof:
    """A proof's runs that were trained, and its findings."""

    runs: tuple[str, ...]
    findings: tuple[RunFinding, ...]


class Servers:
    """A fork server of ranks, and one whose ranks compute in float64; each is started when it is first needed."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *, started: Mapping[bool, ForkServer] = MappingProxyType({})) -> None:
        self._folder, self._environment = folder, environment
        self._started = dict(started)

    def server(self, *, wide: bool) -> ForkServer:
        """The server, which runs."""
        if wide not in self._started:
            log = self._folder / f"server{'_wide' if wide else ''}.log"
            self._started[wide] = ForkServer(log, self._environment, command=WIDE_COMMAND if wide else COMMAND)
        return self._started[wide]

    def drop(self, *, wide: bool) -> None:
        """Close a server that is gone, so that the next proof starts another."""
        self._started.pop(wide).close()

    def close(self) -> None:
        """Close both."""
        for wide in list(self._started):
            self.drop(wide=wide)


def judge_proof(recipe: DrawnRecipe, layouts: Sequence[ProveLayout], servers: Servers, *, checks: bool, again: str = "") -> JudgedProof:
    """Train a recipe in layouts and judge each run. The run folders of a proof without findings are removed. `again`: the command of this
    script that judges the recipe again, for what `prove` does not show: memory, and lines of logs."""
    folder, names = Path(recipe.words["log.dir"]), [each.name for each in layouts]
    command = recipe.command(names, checks=checks)
    try:
        result = prove_drawn(recipe, layouts, servers, checks=checks, wide=False)
        results = [result.reference, *result.layouts, *result.checks]
        found = [
            each if each.kind not in UNSEEN_BY_PROVE or not again else replace(each, command=again)
            for one in results
            for each in _run_findings(one, recipe.command([one.trial.layout.name], checks=False) if _is_alone(one, checks) else command)
        ]
    except NothingToProve as error:
        return JudgedProof(runs=(), findings=(RunFinding(kind="crash", run=", ".join(names), says=str(error), command=command),))
    except ServerGone as error:
        servers.drop(wide=False)
        return JudgedProof(runs=(), findings=(RunFinding(kind="crash", run=", ".join(names), says=str(error), command=command),))
    except Exception:
        return JudgedProof(runs=(), findings=(RunFinding(kind="crash", run="", says=traceback.format_exc(), command=command),))
    if departed := {each.trial.name: each for each in results if each.verdict == "departs"}:
        wide = _wide_verdicts(recipe, layouts, servers, checks=checks, departed=departed)
        found = [_with_wide(each, wide) for each in found]
    if not found:
        shutil.rmtree(folder, ignore_errors=True)
    return JudgedProof(runs=tuple(each.trial.name for each in results), findings=tuple(found))


def prove_drawn(recipe: DrawnRecipe, layouts: Sequence[ProveLayout], servers: Servers, *, checks: bool, wide: bool) -> ProofResult:
    """Train a recipe in layouts on one of the servers, and have `prove` judge each run. Raises NothingToProve and ServerGone."""
    request, words = ProveRequest(steps=recipe.steps, chosen="named", layouts=tuple(layouts), checks=checks), recipe.recipe
    proof = plan_proof(request, words.run(), words.run_on)
    server = servers.server(wide=wide)
    return run_proof(proof, lambda result: None, lambda text: None, lambda log, environment: nullcontext(server))


def _run_findings(result: LayoutResult, command: str) -> Iterator[RunFinding]:
    """Yield what one run shows: its verdict, its memory, odd lines of its logs."""
    name, is_layout = result.trial.name, not result.trial.check and result.trial.layout.ranks > 1
    if result.verdict != "same":
        kind: FindingKind = "no reference" if not is_layout and not result.trial.check else result.verdict
        says = f"{result.reason}{f'; {result.departure}' if result.departure else ''}"
        yield RunFinding(kind=kind, run=name, says=says, command=command)
    for says in memory_departures(result):
        yield RunFinding(kind="memory", run=name, says=says, command=command)
    if result.verdict != "failed":
        for line in odd_lines(result.trial.folder):
            yield RunFinding(kind="log", run=name, says=line, command=command)


def _is_alone(result: LayoutResult, checks: bool) -> bool:
    """Whether a proof of this layout alone trains the same run: with checks one of the layouts saves midway."""
    return not checks and not result.trial.check and result.trial.layout.ranks > 1


def memory_departures(result: LayoutResult) -> Iterator[str]:
    """Yield each kind of memory of which a run measured other bytes than its plan says."""
    is_unplanned = any(each.rule in UNPLANNED_ROUTING for each in result.trial.plan.warnings)
    for row in read_measured_run(result.trial.folder).memory if (result.trial.folder / "measured.json").is_file() else ():
        if row.planned is None or row.measured is None or (is_unplanned and row.name == "activations"):
            continue
        if abs(row.measured - row.planned) > MEMORY_SHARE * row.planned + MEMORY_BYTES:
            yield f"{row.name}: measured {row.measured:,.0f} bytes, planned {row.planned:,.0f}"


def odd_lines(folder: Path) -> list[str]:
    """Return the different lines of a run's logs that warn or report an error."""
    lines = (line for log in sorted((folder / "ranks").glob("*.log")) for line in log.read_text(errors="replace").splitlines())
    return list(dict.fromkeys(line.strip()[:300] for line in lines if ODD_LINE.search(line)))


def _wide_verdicts(
    recipe: DrawnRecipe, layouts: Sequence[ProveLayout], servers: Servers, *, checks: bool, departed: Mapping[str, LayoutResult]
) -> dict[str, str]:
    """Train the proof again in float64, and return what it says of each run that departed, by its name."""
    if not checks:
        layouts = [each for each in layouts if each.name in departed]
    words = {**WIDE_WORDS, "log.dir": f"{recipe.words['log.dir']}/wide"}
    try:
        result = prove_drawn(recipe.with_words(words), layouts, servers, checks=checks, wide=True)
        narrow = narrow_words(recipe.recipe.run())
        return {
            each.trial.name: unless_narrow(wide_verdict(each, departed[each.trial.name], result.reference), narrow)
            for each in (*result.layouts, *result.checks)
            if each.trial.name in departed
        }
    except ServerGone as error:
        servers.drop(wide=True)
        return dict.fromkeys(departed, f"not confirmed: {error}")
    except NothingToProve as error:
        return dict.fromkeys(departed, f"not confirmed: {error}")
    except Exception as error:
        return dict.fromkeys(departed, f"not confirmed: {type(error).__name__}: {error}")


def unless_narrow(says: str, narrow: Sequence[str]) -> str:
    """What float64 says of a departure. Of what is `narrow`, it can't say that it is rounding."""
    if not (narrow and says.startswith(ROUNDING)):
        return says
    return f"{UNCONFIRMED}: in float64, without {' '.join(narrow)},{says.partition('in float64')[2]}"


def _with_wide(found: RunFinding, wide: dict[str, str]) -> RunFinding:
    says = wide.get(found.run, "not confirmed: float64 did not train it") if found.kind == "departs" else ""
    return replace(found, wide=says)
