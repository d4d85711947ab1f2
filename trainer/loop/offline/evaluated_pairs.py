"""Preferences outside training: the reference of their pairs, from RUN_DIR's file or from the weights that the run began with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engines.step_figures import PreferenceFigures
from ...layers.preference_loss import FIGURES, take_pair_results
from ...models.build import build_model, load_weights
from ...models.hf_format.adapter_reader import open_adapter
from ...models.hf_format.weights import read_hf_weights
from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from ..data.samples.batches import Batch, Batches
from ..state.reference_file import Identity, Reference, read_reference, reference_identity
from ..step.model_inputs import pair_inputs
from .load_run import SavedRun
from .verb_process import write_problem


class PairSums:
    """Sums over the pairs that a module's forwards have evaluated: their figures, in the order of PreferenceFigures."""

    def __init__(self) -> None:
        self._sums = torch.zeros(FIGURES, dtype=torch.float64)

    def take(self, module: torch.nn.Module) -> None:
        """Add the results of a module's last forward."""
        for each in take_pair_results(module):
            self._sums += each.sums.cpu()

    def means(self, pairs: int) -> PreferenceFigures:
        """Return the means over so many pairs."""
        return PreferenceFigures(*(self._sums / pairs).tolist())


class StartReference:
    """The log probabilities of answers under the weights that a saved run began with. Those that RUN_DIR's file lacks are computed with
    these weights in float32, which `close` drops before the checkpoint's are read: one model is in memory at a time."""

    def __init__(self, saved: SavedRun, folder: Path, device: torch.device) -> None:
        self._saved, self._folder, self._device = saved, folder, device
        self._module: Any = None

    def give(self, run: Run, batches: Batches, samples: range) -> None:
        """Give batches of preferences the reference of the samples that are evaluated; nothing where the run's loss has none. Raises
        Unreadable where the weights that the run began with are no longer there."""
        if not run.train.preference.has_reference:
            return
        key = batches.corpus.key
        identity = reference_identity(self._saved.run, batches.corpus)
        held = read_reference(self._folder, identity if self._began is None else {**identity, "weights": self._began})
        if held.problem and not held.values:
            write_problem(held.problem)
        values: Reference = list(held.values.get(key, [np.full((each.examples, 2), np.nan) for each in batches.corpus.examples]))
        for batch in micro_batches(run, batches, samples):
            assert batch.pairs is not None
            source, number = batch.pairs.source.numpy(), batch.pairs.number.numpy()
            if any(np.isnan(values[of][each]).any() for of, each in zip(source, number, strict=True)):
                found = self._log_probabilities(batch, identity)
                for of, each, row in zip(source, number, found, strict=True):
                    values[of][each] = row
        batches.references = values

    def close(self) -> None:
        """Drop the weights that the run began with."""
        self._module = None

    @property
    def _began(self) -> Any:
        """What identifies the weights that the run began with; None of those that were drawn, or where its checkpoint does not say it."""
        return self._saved.checkpoint.extra.get("data", {}).get("reference", {}).get("weights")

    def _log_probabilities(self, batch: Batch, identity: Identity) -> Tensor:
        """Return the log probability of each answer of a batch that has no reference, [pairs, 2]."""
        if self._module is None:
            self._check_start(identity)
            write_problem("the reference of pairs that the run did not read is computed with the weights that it began with")
            self._module = _start_model(self._saved.run, self._device)
        evaluate_batch(self._module, batch, self._device)
        (results,) = take_pair_results(self._module)
        return results.log_ratios.cpu()

    def _check_start(self, identity: Mapping[str, Any]) -> None:
        if identity["weights"] is None:
            says = f"the weights that the run began with are not in {self._saved.run.model.weights} any more"
            raise _refusal(says, "bring them back, or evaluate what the run evaluates")
        if self._began is not None and self._began != identity["weights"]:
            says = "the run began with other weights than those that are there now, and its preferences are relative to those"
            raise _refusal(says, "bring back what it began with, or evaluate what the run evaluates")


def evaluate_batch(module: Any, batch: Batch, device: torch.device) -> tuple[float, int]:
    """Return (sum of losses, how many were counted) of a batch, with what it has of documents and pairs."""
    further: dict[str, Any] = {} if batch.documents is None else {"documents": batch.documents.to(device)}
    if batch.pairs is not None:
        further["pairs"] = pair_inputs(batch.pairs, batch.tokens, None, device)
    with torch.inference_mode():
        loss, counted = module(batch.tokens.to(device), batch.labels.to(device), **further)
    return float(loss.double()), int(counted)


def micro_batches(run: Run, batches: Batches, samples: range) -> Iterator[Batch]:
    """Yield samples in batches of train.microbatch."""
    for first in range(samples.start, samples.stop, run.train.microbatch):
        yield batches.batch(first, min(run.train.microbatch, samples.stop - first))


def _start_model(run: Run, device: torch.device) -> Any:
    """Return the whole model that a run began with, in float32; raises Unreadable."""
    module = build_model(run, device=device, dtype=torch.float32, seed=run.train.seed)
    with ExitStack() as opened:
        if run.model.weights:
            load_weights(module, read_hf_weights(Path(run.model.weights), run), partial=True)
        if run.model.weights and run.model.lora.rank and run.model.lora.weights:
            adapter = opened.enter_context(open_adapter(run.model.lora.weights, run))
            load_weights(module, ((name, each.values) for name, each in adapter.items()), partial=True)
    return module.eval()


def _refusal(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="evaluate", says=says, mend=mend)])
