"""Evaluation of a run's checkpoint outside training: the loss on what the run validates on, or on other data.

Run it as `python -m distrain.trainer.loop.offline.evaluate_run RUN_DIR OPTIONS`: OPTIONS is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, isfinite, log
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from ...models.families import is_made_by_transformers
from ...spec.problem import Problem, Unreadable
from ...spec.read import read
from ...spec.run import Data, Run
from ..data.prepare import cache_folder, prepare_corpus
from ..data.samples.batches import Batches
from ..data.samples.corpus import Corpus
from ..data.validation_sets import evaluates_held_out, prepare_validation_sets
from .load_run import load_model, load_saved_run
from .verb_process import run_verb, write_problem, write_stdout

MOST_EXPONENT = 700.0  # of a perplexity that a float holds
HELD_OUT = "validation"  # what the text is called that data.validation holds out


@dataclass(frozen=True, kw_only=True)
class EvaluatedSet:
    """A set of text, how many of its tokens are labels, and their mean loss (nats)."""

    name: str
    tokens: int
    loss: float
    are_bytes: bool

    @property
    def figures(self) -> dict[str, Any]:
        """The set in the JSON document; None for what is not finite or not known."""
        finite = isfinite(self.loss)
        return {
            "name": self.name,
            "tokens": self.tokens,
            "loss": self.loss if finite else None,
            "perplexity": exp(self.loss) if finite and self.loss < MOST_EXPONENT else None,
            "bits_per_byte": self.loss / log(2) if finite and self.are_bytes else None,
        }

    def __str__(self) -> str:
        found = self.figures
        perplexity = f"perplexity {found['perplexity']:,.4g}" if found["perplexity"] is not None else "no finite perplexity"
        bits = f", {found['bits_per_byte']:.4f} bits a byte" if found["bits_per_byte"] is not None else ""
        return f"{self.name}: loss {self.loss:.4f}, {perplexity}{bits}, of {self.tokens:,} tokens"


def main() -> int:
    """Evaluate with the arguments of the command line."""
    folder, options = sys.argv[1:]
    return run_verb(lambda: evaluate_run(Path(folder), **json.loads(options)))


def evaluate_run(
    folder: Path,
    *,
    changes: Mapping[str, Any],
    step: int | None = None,
    sequences: int | None = None,
    ema: bool = False,
    as_json: bool = False,
) -> None:
    """Print the loss of a checkpoint of RUN_DIR on each set of data, in float32 and one process; `changes` are keys of `data` with other
    values, `sequences` how many of each set are read at most. Raises Unreadable, LoadFailed."""
    saved = load_saved_run(folder, step=step, ema=ema)
    for remark in saved.remarks:
        write_problem(remark)
    run = replace(saved.run, data=changed_data(saved.run.data, changes))
    if run.data.has_preferences:
        raise _refusal(
            "a loss of preferences is relative to a reference, which one checkpoint is not", "name text: data=text data.path=FILE"
        )
    sets = list(_sets(run, given="data.path" in changes))
    device = torch.device("cuda" if run.cluster.device.kind == "cuda" and torch.cuda.is_available() else "cpu")
    module: Any = load_model(saved, device)
    found = [_evaluate(run, module, each, device, sequences) for each in sets]
    if as_json:
        write_stdout(f"{json.dumps({'version': 1, 'step': saved.checkpoint.step, 'sets': [each.figures for each in found]}, indent=2)}\n")
        return
    write_stdout(f"{saved.title} of {run.name}, in float32\n")
    write_stdout("".join(f"{each}\n" for each in found))


def changed_data(data: Data, changes: Mapping[str, Any]) -> Data:
    """Return a run's data with keys changed; of other paths nothing that belongs to the run's own paths stays. Raises Unreadable."""
    config: dict[str, Any] = msgspec.to_builtins(data)
    if {"data.path", "data.name"} & changes.keys():
        config |= {"weights": None, "stages": None, "validate": None}
    for key, value in changes.items():
        _, first, *names = key.split(".")
        if names:
            config[first] = {**(config[first] if isinstance(config.get(first), dict) else {}), ".".join(names): value}
        else:
            config[first] = value
    return read(config, Data, "data.")


class _Set(NamedTuple):
    """A set by its name; whether it is what the run holds out of its own data, or all of some files."""

    name: str
    corpus: Corpus
    is_held_out: bool


def _sets(run: Run, *, given: bool) -> Iterator[_Set]:
    """Yield all of data.path where it is `given`, else what the run holds out of it; then the sets of data.validate."""
    where: dict[str, Any] = {"vocab": run.model.vocab, "seq": run.train.seq, "cache": cache_folder(run.data), "progress": _show_remark}
    if given:
        paths = run.data.path or ""
        of_path = prepare_validation_sets(replace(run.data, validate={"": paths}), **where)
        yield _Set(paths if isinstance(paths, str) else ", ".join(paths), of_path[""], is_held_out=False)
    else:
        corpus = prepare_corpus(run.data, **where)
        if evaluates_held_out(run.data, corpus):
            yield _Set(HELD_OUT, corpus, is_held_out=True)
    yield from (_Set(name, corpus, is_held_out=False) for name, corpus in prepare_validation_sets(run.data, **where).items())


def _show_remark(what: str, done: int, total: int) -> None:
    """Show what was found in the data; how far its preparation is, is not shown."""
    if not total:
        write_problem(what)


def _evaluate(run: Run, module: Any, evaluated: _Set, device: torch.device, most: int | None) -> EvaluatedSet:
    """Return the mean loss over a set, of which each sequence is read once. Of what is held out it reads what the run's evaluations read:
    they begin again where less is held out than one of them reads."""
    name, corpus, is_held_out = evaluated
    if corpus.ignores_labels and is_made_by_transformers(run.model):
        raise _refusal(
            f"family {run.model.family} does not keep documents apart, and {name} has them", "set data.documents=false, data=text"
        )
    batches = Batches(corpus, seed=run.train.seed, seq=run.train.seq, split="validation")
    many = sum(batches.windows)
    if most is not None:
        many = min(many, most)
    elif is_held_out:
        many = run.train.evaluate.batches * run.train.batch
    total, count = 0.0, 0
    with torch.inference_mode():
        for first in range(0, many, run.train.microbatch):
            batch = batches.batch(first, min(run.train.microbatch, many - first))
            further = {} if batch.documents is None else {"documents": batch.documents.to(device)}
            loss, labels = module(batch.tokens.to(device), batch.labels.to(device), **further)
            total, count = total + float(loss.double()), count + int(labels)
    are_bytes = run.data.has_text and run.data.tokenizer == "bytes"
    return EvaluatedSet(name=name, tokens=count, loss=total / count, are_bytes=are_bytes)


def _refusal(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="evaluate", says=says, mend=mend)])


if __name__ == "__main__":
    raise SystemExit(main())
