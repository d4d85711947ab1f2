"""Validation sets of files of their own (`data.validate`): checked and read as the training data are, and evaluated whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...spec.problem import Problem, Unreadable
from ...spec.run import Data
from .check_data import CheckedData, check_data
from .files.data_error import data_error
from .files.find import DataFile, Remark
from .prepare import read_corpus
from .samples.corpus import Corpus, merge_ranges, windows
from .source_reader import Progress, SourceReader


@dataclass(frozen=True, kw_only=True)
class CheckedSet:
    """A validation set: its name, the `data` keys that read it, and what there is to read."""

    name: str
    data: Data
    checked: CheckedData


def check_validation_sets(data: Data, vocab: int, trained: Sequence[DataFile], remark: Remark) -> list[CheckedSet]:
    """Return the validation sets of a run that trains on files; raises Unreadable with every problem of every set."""
    found, problems = list[CheckedSet](), list[Problem]()
    files = {file.path.resolve() for file in trained}
    for name, paths in (data.validate or {}).items():
        kind = "text" if data.name == "stdlib" else data.name
        keys = replace(data, name=kind, path=paths, weights=None, stages=None, validate=None, validation=0.0)
        said = _remark_with_key(name, remark)
        try:
            checked = check_data(keys, vocab, said, trains=False)
        except Unreadable as error:
            problems += [_problem_of_set(name, each) for each in error.problems]
            continue
        _remark_on_trained(name, [file.path for group in checked.groups for file in group], files, remark)
        found.append(CheckedSet(name=name, data=keys, checked=checked))
    if problems:
        raise Unreadable(problems)
    return found


def prepare_validation_sets(data: Data, *, vocab: int, seq: int, cache: Path, progress: Progress, verify: bool = True) -> dict[str, Corpus]:
    """Return the corpus of each set by name, as `prepare_corpus` does that of the training data; raises Unreadable."""
    sets = check_validation_sets(data, vocab, (), lambda remark: progress(remark, 0, 0))
    return read_validation_sets(sets, vocab=vocab, seq=seq, cache=cache, progress=progress, verify=verify)


def read_validation_sets(
    sets: Sequence[CheckedSet], *, vocab: int, seq: int, cache: Path, progress: Progress, verify: bool = True
) -> dict[str, Corpus]:
    """Return the corpus of each set by name, all of whose tokens validate; tokenize it into the folder `cache` if that does not hold it
    yet. Raises Unreadable."""
    found, problems = dict[str, Corpus](), list[Problem]()
    for each in sets:
        try:
            reader = SourceReader(each.data, vocab, cache.expanduser(), _progress_with_key(each.name, progress), verify)
            found[each.name] = _whole(each, read_corpus(each.checked, reader), seq)
        except Unreadable as error:
            problems += [_problem_of_set(each.name, problem) for problem in error.problems]
    if problems:
        raise Unreadable(problems)
    return found


def evaluates_held_out(data: Data, corpus: Corpus) -> bool:
    """Return whether a run that evaluates reads what is held out of its training data: not where sets take the place of none."""
    return not data.validate or corpus.size("validation") > 0


def _whole(of: CheckedSet, corpus: Corpus, seq: int) -> Corpus:
    """Return a corpus of which everything validates."""
    sources = [replace(source, validation=merge_ranges(np.zeros(1, np.int64), np.array([source.tokens.size]))) for source in corpus.sources]
    whole = replace(corpus, sources=tuple(sources), pads=True)
    try:
        windows(whole, seq, "validation")
    except Unreadable:
        says = f"{_key(of.name)} has no token that counts as a label in train.seq={seq}"
        raise data_error(says, "give it more text") from None
    return whole


def _remark_on_trained(name: str, paths: Sequence[Path], trained: set[Path], remark: Remark) -> None:
    """Remark on files of a set that the run trains on."""
    both = [path for path in paths if path.resolve() in trained]
    if both:
        more = f" and {len(both) - 1:,} more of its files train" if both[1:] else " trains"
        remark(f"{_key(name)}: {both[0]}{more} too, as data.path names it: its loss is no validation")


def _problem_of_set(name: str, problem: Problem) -> Problem:
    """Return a problem of the keys that read a set, with the key that the user set."""
    return replace(problem, says=_with_key(name, problem.says), mend=_with_key(name, problem.mend))


def _remark_with_key(name: str, remark: Remark) -> Callable[[str], object]:
    return lambda says: remark(_with_key(name, says))


def _progress_with_key(name: str, progress: Progress) -> Progress:
    return lambda what, done, total: progress(_with_key(name, what), done, total)


def _with_key(name: str, text: str) -> str:
    return text.replace("data.path", _key(name))


def _key(name: str) -> str:
    """Return the key that names a set's files; without a name they are the data themselves."""
    return f"data.validate.{name}" if name else "data.path"
