"""Evaluation of a run's checkpoint outside training: the loss on what the run validates on, or on other data.

Run it as `python -m distrain.trainer.loop.offline.evaluate_run RUN_DIR OPTIONS`: OPTIONS is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, isfinite, log, nan
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from ...engines.step_figures import PreferenceFigures
from ...models.families import is_made_by_transformers
from ...spec.numbers.as_text import plural
from ...spec.problem import Problem, Unreadable
from ...spec.read import read
from ...spec.run import Data, Run
from ..data.prepare import cache_folder, prepare_corpus
from ..data.samples.batches import Batches
from ..data.samples.corpus import Corpus
from ..data.validation_sets import evaluates_held_out, prepare_validation_sets
from ..metrics.step_row import preference_row
from .evaluated_pairs import PairSums, StartReference, evaluate_batch, micro_batches
from .load_run import load_model, load_saved_run
from .verb_process import run_verb, write_problem, write_stdout

MOST_EXPONENT = 700.0  # of a perplexity that a float holds
HELD_OUT = "validation"  # what the text is called that data.validation holds out


@dataclass(frozen=True, kw_only=True)
class EvaluatedSet:
    """A set of text, how many of its tokens are labels, and their mean loss (nats); of preferences how many pairs are counted, the mean
    loss of a pair, and the figures of pairs."""

    name: str
    counted: int
    loss: float
    are_bytes: bool
    preferences: PreferenceFigures | None = None

    @property
    def figures(self) -> dict[str, Any]:
        """The set in the JSON document; None for what is not finite or not known."""
        finite = isfinite(self.loss)
        if self.preferences is not None:
            loss = self.loss if finite else None
            return {"name": self.name, "pairs": self.counted, "loss": loss, **preference_row(self.preferences)}
        return {
            "name": self.name,
            "tokens": self.counted,
            "loss": self.loss if finite else None,
            "perplexity": exp(self.loss) if finite and self.loss < MOST_EXPONENT else None,
            "bits_per_byte": self.loss / log(2) if finite and self.are_bytes else None,
        }

    def __str__(self) -> str:
        found = self.figures
        if self.preferences is not None:
            accuracy, margin = (found[each] if found[each] is not None else nan for each in ("accuracy", "margin"))
            return f"{self.name}: loss {self.loss:.4f}, accuracy {accuracy:.3f}, margin {margin:.4f}, of {plural(self.counted, 'pair')}"
        perplexity = f"perplexity {found['perplexity']:,.4g}" if found["perplexity"] is not None else "no finite perplexity"
        bits = f", {found['bits_per_byte']:.4f} bits a byte" if found["bits_per_byte"] is not None else ""
        return f"{self.name}: loss {self.loss:.4f}, {perplexity}{bits}, of {self.counted:,} tokens"


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
    device = torch.device("cuda" if run.cluster.device.kind == "cuda" and torch.cuda.is_available() else "cpu")
    sets = [_read_of(run, each, sequences) for each in _sets(run, given="data.path" in changes)]
    reference = StartReference(saved, folder, device)
    for each in sets if run.data.has_preferences else ():
        reference.give(run, each.batches, each.samples)
    reference.close()
    module: Any = load_model(saved, device)
    found = [_evaluate(run, module, each, device) for each in sets]
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


class _Read(NamedTuple):
    """What is read of a set: samples of its batches."""

    name: str
    batches: Batches
    samples: range


def _read_of(run: Run, evaluated: _Set, most: int | None) -> _Read:
    """Return what is read of a set, each sequence once. Of what is held out that is what the run's evaluations read: they begin again where
    less is held out than one of them reads. Raises Unreadable where the family can't."""
    name, corpus, is_held_out = evaluated
    if corpus.ignores_labels and is_made_by_transformers(run.model):
        if corpus.examples:
            says = f"family {run.model.family} does not keep prompts and their answers apart, and {name} has them"
            raise _refusal(says, "name text: data=text data.path=FILE")
        says = f"family {run.model.family} does not keep documents apart, and {name} has them"
        raise _refusal(says, "set data.documents=false, data=text")
    batches = Batches(corpus, seed=run.train.seed, seq=run.train.seq, split="validation")
    many = sum(batches.windows)
    if most is not None:
        many = min(many, most)
    elif is_held_out:
        many = run.train.evaluate.batches * run.train.batch
    return _Read(name, batches, range(many))


def _evaluate(run: Run, module: Any, read_of: _Read, device: torch.device) -> EvaluatedSet:
    """Return the mean loss over what is read of a set, and of preferences the figures of its pairs."""
    name, batches, samples = read_of
    total, count, sums = 0.0, 0, PairSums()
    for batch in micro_batches(run, batches, samples):
        loss, counted = evaluate_batch(module, batch, device)
        total, count = total + loss, count + counted
        sums.take(module)
    are_bytes = run.data.has_text and run.data.tokenizer == "bytes"
    pairs = sums.means(count) if run.data.has_preferences else None
    return EvaluatedSet(name=name, counted=count, loss=total / count, are_bytes=are_bytes, preferences=pairs)


def _refusal(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="evaluate", says=says, mend=mend)])


if __name__ == "__main__":
    raise SystemExit(main())
