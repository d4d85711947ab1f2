"""Statistics and problems of a run's data before it starts, in a child process.

`ask_json_child` runs it.

stdin: one JSON document, {"data": the keys of `data`, "vocab": model.vocab, "seq": train.seq, "mode": "look" or "prepare",
"evaluate": whether the run validates (default false)}. stdout: JSON lines {"progress": [activity, bytes done, bytes in all]} and
{"remark": "..."}, and a last one {"facts": {...}} or {"problems": [{"rule", "says", "mend"}, ...]}.

"look" is fast: it tokenizes a sample. "prepare" fills the cache and gives exact figures. The exit status is 0 if an answer was
given, else 128 plus the signal that ended it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...spec.problem import Problem, Unreadable
from ...spec.read import read
from ...spec.run import Data
from .check_data import CheckedData, check_data
from .files.data_error import data_problem
from .prepare import cache_folder, cached_corpus, prepare_corpus
from .samples.corpus import shortage, source_name, windows
from .samples.corpus_stats import CorpusStats, SourceShare, corpus_stats
from .samples.packing import packing_remark
from .source_reader import validation_flags
from .token_files import TokenFile
from .tokenize.estimate import TokenEstimate, estimate_tokens
from .tokenize.pairs import PairReader, keys_of
from .tokenize.text_files import text_reader
from .validation_sets import CheckedSet, check_validation_sets, evaluates_held_out, read_validation_sets

_INTERVAL = 0.1  # seconds between progress lines


class ReaderGone(Exception):
    """The reader of the answers has gone."""


class AnswerStream:
    """Writes JSON lines to the parent, each remark once."""

    def __init__(self, out: int) -> None:
        self._out, self._remarks, self._last = out, set[str](), 0.0

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one line; raises ReaderGone."""
        line = f"{json.dumps(message)}\n".encode()
        try:
            while line:
                line = line[os.write(self._out, line) :]
        except BrokenPipeError:
            raise ReaderGone from None

    def remark(self, remark: str) -> None:
        """Send a remark, which is not a problem."""
        if remark not in self._remarks:
            self._remarks.add(remark)
            self.send({"remark": remark})

    def report_progress(self, what: str, done: int, total: int) -> None:
        """Send progress; a total of 0 makes it a remark."""
        if not total:
            self.remark(what)
        elif done >= total or time.monotonic() > self._last + _INTERVAL:
            self._last = time.monotonic()
            self.send({"progress": [what, done, total]})


def main() -> int:
    """Answer the request on stdin; return the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    out = os.dup(1)
    os.dup2(2, 1)  # keep what libraries print out of the answers
    answers = AnswerStream(out)
    try:
        answers.send(answer(sys.stdin.buffer.read(), answers))
    except ReaderGone:
        return 1
    return 0


def _stop(number: int, frame: object) -> None:
    """Exit once: clean-up ends the children, and no second signal interrupts it."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def answer(request: bytes, answers: AnswerStream) -> dict[str, Any]:
    """Return the last line for a request, facts or problems; send remarks and progress to `answers`. Raises ReaderGone."""
    try:
        words = json.loads(request)
        data = read(words["data"], Data, "data.")
        act = {"look": quick_stats, "prepare": prepare_stats}[words["mode"]]
        return {"facts": act(data, words["vocab"], words["seq"], answers, evaluate=words.get("evaluate", False)).to_json()}
    except Unreadable as error:
        problems = error.problems
    except OSError as error:
        problems = (data_problem(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)),)
    except ReaderGone:
        raise
    except Exception as error:
        problems = (data_problem(f"the data could not be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"),)
    return {"problems": [_problem_json(problem) for problem in problems]}


def _problem_json(problem: Problem) -> dict[str, str]:
    return {"rule": problem.rule, "says": problem.says, "mend": problem.mend}


def prepare_stats(data: Data, vocab: int, seq: int, answers: AnswerStream, *, evaluate: bool) -> CorpusStats:
    """Fill the cache and return exact figures; raises Unreadable."""
    checked = check_data(data, vocab, answers.remark)
    if checked.tokenizer:
        _estimate_sources(checked, data, answers)  # for its remarks
    sets = _check_sets(data, vocab, checked, answers) if evaluate else []
    corpus = prepare_corpus(data, vocab=vocab, seq=seq, cache=cache_folder(data), progress=answers.report_progress)
    read_validation_sets(sets, vocab=vocab, seq=seq, cache=cache_folder(data), progress=answers.report_progress)
    if evaluate and evaluates_held_out(data, corpus):
        windows(corpus, seq, "validation")
    return replace(corpus_stats(corpus, seq), entropy=corpus.entropy)


def quick_stats(data: Data, vocab: int, seq: int, answers: AnswerStream, *, evaluate: bool) -> CorpusStats:
    """Return quick figures and write nothing; raises Unreadable with every problem."""
    checked = check_data(data, vocab, answers.remark)
    if evaluate:
        _check_sets(data, vocab, checked, answers)
    estimates = _estimate_sources(checked, data, answers) if checked.tokenizer else []
    corpus = cached_corpus(checked, data, vocab=vocab, cache=cache_folder(data))
    if corpus:
        windows(corpus, seq, "train")
        if evaluate and evaluates_held_out(data, corpus):
            windows(corpus, seq, "validation")
        if remark := packing_remark(corpus.examples, seq):
            answers.remark(remark)
        return corpus_stats(corpus, seq)
    if data.name == "tokens":
        parts, documents = _token_file_shares(checked, data, seq), _document_count(checked.token_files)
    else:
        parts, documents = _text_shares(estimates, data, seq), _rounded_sum([each.documents if each else None for each in estimates])
    exact = data.name == "tokens"
    return CorpusStats(key=None, sources=tuple(parts), documents=documents, exact=exact, bytes=_total_bytes(checked))


def _check_sets(data: Data, vocab: int, checked: CheckedData, answers: AnswerStream) -> list[CheckedSet]:
    """Return the validation sets; raises Unreadable with every problem of theirs."""
    return check_validation_sets(data, vocab, [file for files in checked.groups for file in files], answers.remark)


def _estimate_sources(checked: CheckedData, data: Data, answers: AnswerStream) -> list[TokenEstimate | None]:
    """Estimate the tokens of each source."""
    assert checked.tokenizer is not None
    pairs = PairReader(keys_of(data), data.tokenizer)
    read = pairs.text if data.has_prompts else text_reader(data.text_key)
    return [estimate_tokens(files, checked.tokenizer, data.text_key, read, answers.remark) for files in checked.groups]


def _token_file_shares(checked: CheckedData, data: Data, seq: int) -> list[SourceShare]:
    """Return the tokens of each source of token files; raises Unreadable if one is certainly too short to train on."""
    parts, problems = list[SourceShare](), list[Problem]()
    for index, files in enumerate(checked.token_files):
        size, apart = sum(each.size for each in files), validation_flags(files)
        held = round(size * data.validation) if apart is None else sum(each.size for each, held in zip(files, apart, strict=True) if held)
        split_is_known = apart is not None or (data.end is None and all(each.bounds is None for each in files))
        if size - held <= seq and (split_is_known or size <= seq):
            name = source_name(data.name, index, len(checked.token_files))
            problems.append(shortage(name, size - held, size, seq, "train", set_apart=apart is not None))
        parts.append(SourceShare(train=size - held, validation=held))
    if problems:
        raise Unreadable(problems)
    return parts


def _text_shares(estimates: list[TokenEstimate | None], data: Data, seq: int) -> list[SourceShare]:
    """Return the tokens of each source of text; raises Unreadable if one is certainly too short to train on."""
    parts, problems = list[SourceShare](), list[Problem]()
    for index, each in enumerate(estimates):
        size = None if each is None else round(each.tokens)
        held = None if size is None else round(size * data.validation)
        if each and each.exact and size is not None and size <= seq:
            problems.append(shortage(source_name(data.name, index, len(estimates)), size, size, seq, "train", set_apart=False))
        parts.append(SourceShare(train=None if size is None or held is None else size - held, validation=held))
    if problems:
        raise Unreadable(problems)
    return parts


def _rounded_sum(numbers: list[float | None]) -> int | None:
    """Return the rounded sum of numbers; None if one is unknown."""
    known = [number for number in numbers if number is not None]
    return round(sum(known)) if len(known) == len(numbers) else None


def _document_count(sources: list[list[TokenFile]]) -> int | None:
    """Return the number of documents by the headers and indices of all files; None if one has none."""
    known = [len(each.bounds) - 1 for files in sources for each in files if each.bounds is not None]
    return sum(known) if len(known) == sum(map(len, sources)) else None


def _total_bytes(checked: CheckedData) -> int:
    return sum(file.size for files in checked.groups for file in files)


if __name__ == "__main__":
    sys.exit(main())
