"""One run of `distrain prove`: plan the proof, train its trials, and print each verdict as it is reached."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...trainer.machine import measure_machine as machine
from ...trainer.prove.fork_client import ForkServer, ServerGone
from ...trainer.prove.judge import LayoutResult, ProofResult
from ...trainer.prove.run_trials import StartServer, run_proof
from ...trainer.prove.trials.plan_proof import NothingToProve, Proof, ProveRequest, plan_proof
from ...trainer.rundir.absolute_paths import relative_folder
from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.spec.run import Run
from ...trainer.system import atomic_file
from ...trainer.system.stop_requests import StopSignal, raise_on_stop_signals
from ..arguments.arguments import read_arguments
from ..arguments.cluster_argument import is_shape
from ..arguments.prove_arguments import read_prove_request, unused_keys
from ..config.load import Loader, override_problems
from ..pages.printing import print_error
from ..pages.prove_json import proof_document
from ..pages.prove_page import ProofTable, proof_closing, proof_opening, reference_line
from ..pages.text_layout import stdout_style
from .exit_status import FAILED, OK


@dataclass(frozen=True, kw_only=True)
class Printer:
    """Functions that print: a text for the user, problems, and the live line, which replaces the one before."""

    show: Callable[[str], None]
    tell: Callable[[Iterable[Problem]], None]
    live: Callable[[str], None]


class RecipeForRanks:
    """A recipe with its overrides, read again for each number of ranks, because a CPU rank gets a share of this machine."""

    def __init__(self, conf: str, overrides: Sequence[str], config_dir: Path | None) -> None:
        self._loader, self._config_dir = Loader(config_dir), config_dir
        self._conf, self._overrides = conf, list(overrides)
        self._run: Run | None = None
        self._runs: dict[int, Run] = {}

    def reread(self) -> RecipeForRanks:
        """The same recipe without what was read, for use once this machine has been measured."""
        return RecipeForRanks(self._conf, self._overrides, self._config_dir)

    def run(self) -> Run:
        """The run as the user wrote it; raises Unreadable."""
        self._run = self._run or self._loader.load(self._conf, self._overrides)
        return self._run

    def run_on(self, ranks: int) -> Run:
        """The run on one node of `ranks` ranks; raises Unreadable."""
        if ranks not in self._runs:
            kept = [each for each in self._overrides if not (each.startswith("cluster=") and is_shape(each.removeprefix("cluster=")))]
            self._runs[ranks] = self._loader.load(self._conf, [*kept, "cluster.nodes=1", f"cluster.gpus={ranks}"])
        return self._runs[ranks]


def prove_recipe(
    arguments: Sequence[str],
    config_dir: Path | None,
    printer: Printer,
    *,
    as_json: bool,
    reasons: bool,
    start_server: StartServer = ForkServer,
    start_wide: StartServer | None = None,
) -> int:
    """Train and compare the layouts that the arguments ask for; return the exit status. `start_wide` starts the server on which departures
    are confirmed. Raises Unreadable."""
    request, recipe, unused = _read_arguments(arguments, config_dir)
    printer.tell(unused)
    if as_json and reasons:
        printer.tell([Problem(rule="idle", says="--reasons does nothing with --json: left_out always holds the reasons")])
    try:
        proof = _plan_and_measure(request, recipe, printer)
    except NothingToProve as error:
        printer.tell(error.problems)
        return FAILED
    try:
        with raise_on_stop_signals():
            result = _run_and_show(proof, printer, start_server, start_wide, as_json=as_json)
    except ServerGone as error:
        printer.live("")
        printer.tell([Problem(rule="server", says=str(error))])
        return FAILED
    except (KeyboardInterrupt, StopSignal) as stop:
        printer.live("")
        printer.tell([Problem(rule="stopped", says=f"stopped; the runs so far are in {relative_folder(proof.folder)}")])
        return 128 + (stop.number if isinstance(stop, StopSignal) else signal.SIGINT)
    document = json.dumps(proof_document(proof, result), indent=2)
    atomic_file.write_atomically(proof.folder / "prove.json", f"{document}\n".encode())
    printer.show(document if as_json else proof_closing(proof, result, reasons=reasons))
    return OK if result.ok else FAILED


def _read_arguments(arguments: Sequence[str], config_dir: Path | None) -> tuple[ProveRequest, RecipeForRanks, list[Problem]]:
    """(request, recipe, warnings of arguments that have no effect); raises Unreadable with every mistake."""
    request, rest, problems = read_prove_request(arguments)
    words = read_arguments(rest, "prove", config_dir)
    if problems or words.problems:
        raise Unreadable([*problems, *words.problems, *override_problems(words.overrides, config_dir)])
    keys = dict.fromkeys(each.partition("=")[0].lstrip("+") for each in words.overrides if "=" in each)
    return request, RecipeForRanks(words.conf, words.overrides, config_dir), [*words.warnings, *unused_keys(keys)]


def _plan_and_measure(request: ProveRequest, recipe: RecipeForRanks, printer: Printer) -> Proof:
    """Plan the proof, and plan it again if this machine had to be measured: what can't run is refused before. Raises NothingToProve."""
    proof = plan_proof(request, recipe.run(), recipe.run_on)
    if machine.is_measured(proof.recipe.cluster.device.kind):
        return proof
    problem = machine.measure_once(lambda: recipe.reread().run().cluster.device.kind, print_error)
    printer.tell([problem] if problem else [])
    measured = recipe.reread()
    return plan_proof(request, measured.run(), measured.run_on)


def _run_and_show(
    proof: Proof, printer: Printer, start_server: StartServer, start_wide: StartServer | None, *, as_json: bool
) -> ProofResult:
    """Train and judge all layouts, and show each result as it is known, unless the output is JSON."""
    if as_json:
        return run_proof(proof, lambda result: None, printer.live, start_server, start_wide)
    table = ProofTable(proof, stdout_style())

    def on_result(result: LayoutResult) -> None:
        if result.trial.run.name == proof.reference.run.name:
            printer.show(f"{reference_line(result)}\n\n{table.head()}")
        else:
            printer.show(table.row(result))

    printer.show(proof_opening(proof))
    return run_proof(proof, on_result, printer.live, start_server, start_wide)
