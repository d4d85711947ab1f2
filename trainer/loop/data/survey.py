"""What is known of a run's data before it starts, by a child process: python -m distrain.trainer.loop.data.survey.

stdin: one JSON document, {"data": the keys of `data`, "vocab": model.vocab, "seq": train.seq, "mode": "look" or "prepare",
"evaluate": whether the run validates (false where it is left out)}. stdout: a line of JSON for each {"progress": [what, bytes done,
bytes of all]} and {"remark": "..."}, and at last one {"facts": {...}} or {"problems": [{"rule", "says", "mend"}, ...]}.

"look" is fast: it tokenizes a sample. "prepare" fills the cache and gives exact figures. The exit status is 0 where an answer was
given, else 128 and the signal that ended it. It dies with the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from threading import Thread
from typing import Any

from ...spec.problem import Problem, Unreadable
from ...spec.read import read
from ...spec.run import Data
from ...system.parent_watch import die_with
from .check import CheckedData, check
from .corpus import shortage, source_name, windows
from .corpus_stats import Facts, Part, facts
from .data_error import wrong
from .estimate import Estimate, estimate
from .prepare import cache_folder, cached_corpus, prepare
from .sources import validation_flags
from .token_files import TokenFile
from .workers import end_with

_OFTEN = 0.1  # seconds between two lines of progress


class NoReader(Exception):
    """Nobody reads what is said."""


class Answers:
    """Lines of JSON for who asked, each remark once."""

    def __init__(self, out: int) -> None:
        self._out, self._remarks, self._last = out, set[str](), 0.0

    def say(self, word: Mapping[str, Any]) -> None:
        """Write one line; raises NoReader."""
        line = f"{json.dumps(word)}\n".encode()
        try:
            while line:
                line = line[os.write(self._out, line) :]
        except BrokenPipeError:
            raise NoReader from None

    def remark(self, remark: str) -> None:
        """Say what is worth knowing and no fault."""
        if remark not in self._remarks:
            self._remarks.add(remark)
            self.say({"remark": remark})

    def progress(self, what: str, done: int, total: int) -> None:
        """Say how far it is; a total of 0 makes it a remark."""
        if not total:
            self.remark(what)
        elif done >= total or time.monotonic() > self._last + _OFTEN:
            self._last = time.monotonic()
            self.say({"progress": [what, done, total]})


def main() -> int:
    """Answer the question on stdin; the exit status."""
    parent = os.getppid()
    die_with(parent)
    if sys.platform != "linux":
        Thread(target=end_with, args=(parent,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    answers = Answers(out)
    try:
        answers.say(answer(sys.stdin.buffer.read(), answers))
    except NoReader:
        return 1
    return 0


def _stop(number: int, frame: object) -> None:
    """End once: what runs is undone and its children are ended, which no second signal cuts short."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def answer(question: bytes, answers: Answers) -> dict[str, Any]:
    """The last line for a question, the facts or the problems; remarks and progress go to `answers`. Raises NoReader."""
    try:
        words = json.loads(question)
        data = read(words["data"], Data, "data.")
        act = {"look": look_facts, "prepare": prepare_facts}[words["mode"]]
        return {"facts": act(data, words["vocab"], words["seq"], answers, evaluate=words.get("evaluate", False)).words()}
    except Unreadable as error:
        problems = error.problems
    except OSError as error:
        problems = (wrong(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)),)
    except NoReader:
        raise
    except Exception as error:
        problems = (wrong(f"the data could not be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"),)
    return {"problems": [_words(problem) for problem in problems]}


def _words(problem: Problem) -> dict[str, str]:
    return {"rule": problem.rule, "says": problem.says, "mend": problem.mend}


def prepare_facts(data: Data, vocab: int, seq: int, answers: Answers, *, evaluate: bool) -> Facts:
    """Exact figures, with the cache filled; raises Unreadable."""
    checked = check(data, vocab, answers.remark)
    if checked.tokenizer:
        _estimates(checked, data, answers)  # for its remarks
    corpus = prepare(data, vocab=vocab, seq=seq, cache=cache_folder(data), progress=answers.progress)
    if evaluate:
        windows(corpus, seq, "validation")
    return replace(facts(corpus), entropy=corpus.entropy)


def look_facts(data: Data, vocab: int, seq: int, answers: Answers, *, evaluate: bool) -> Facts:
    """What is found in a moment, with nothing written; raises Unreadable with every problem."""
    checked = check(data, vocab, answers.remark)
    estimates = _estimates(checked, data, answers) if checked.tokenizer else []
    corpus = cached_corpus(checked, data, vocab=vocab, cache=cache_folder(data))
    if corpus:
        windows(corpus, seq, "train")
        if evaluate:
            windows(corpus, seq, "validation")
        return facts(corpus)
    if data.name == "tokens":
        parts, documents = _parts_of_files(checked, data, seq), _documents(checked.opened)
    else:
        parts, documents = _parts_of_text(estimates, data, seq), _rounded([each.documents if each else None for each in estimates])
    exact = data.name == "tokens"
    return Facts(key=None, sources=tuple(parts), documents=documents, exact=exact, bytes=_bytes(checked))


def _estimates(checked: CheckedData, data: Data, answers: Answers) -> list[Estimate | None]:
    """Of each source."""
    assert checked.tokenizer is not None
    return [estimate(files, checked.tokenizer, data.text_key, answers.remark) for files in checked.groups]


def _parts_of_files(checked: CheckedData, data: Data, seq: int) -> list[Part]:
    """The tokens of each source of token files; raises Unreadable where one is surely too short to train on."""
    parts, problems = list[Part](), list[Problem]()
    for index, (files, weight) in enumerate(zip(checked.opened, data.weights or (1.0,), strict=True)):
        size, apart = sum(each.size for each in files), validation_flags(files)
        held = round(size * data.validation) if apart is None else sum(each.size for each, held in zip(files, apart, strict=True) if held)
        split_is_known = apart is not None or (data.end is None and all(each.bounds is None for each in files))
        if size - held <= seq and (split_is_known or size <= seq):
            name = source_name(data.name, index, len(checked.opened))
            problems.append(shortage(name, size - held, size, seq, "train", set_apart=apart is not None))
        parts.append(Part(weight=weight, train=size - held, validation=held))
    if problems:
        raise Unreadable(problems)
    return parts


def _parts_of_text(estimates: list[Estimate | None], data: Data, seq: int) -> list[Part]:
    """The tokens of each source of text; raises Unreadable where one is surely too short to train on."""
    parts, problems = list[Part](), list[Problem]()
    for index, (each, weight) in enumerate(zip(estimates, data.weights or (1.0,), strict=True)):
        size = None if each is None else round(each.tokens)
        held = None if size is None else round(size * data.validation)
        if each and each.exact and size is not None and size <= seq:
            problems.append(shortage(source_name(data.name, index, len(estimates)), size, size, seq, "train", set_apart=False))
        parts.append(Part(weight=weight, train=None if size is None or held is None else size - held, validation=held))
    if problems:
        raise Unreadable(problems)
    return parts


def _rounded(numbers: list[float | None]) -> int | None:
    """The sum of numbers, None where one is not known."""
    known = [number for number in numbers if number is not None]
    return round(sum(known)) if len(known) == len(numbers) else None


def _documents(sources: list[list[TokenFile]]) -> int | None:
    """How many documents the headers and indices of all files tell of; None where one tells nothing."""
    known = [len(each.bounds) - 1 for files in sources for each in files if each.bounds is not None]
    return sum(known) if len(known) == sum(map(len, sources)) else None


def _bytes(checked: CheckedData) -> int:
    return sum(file.size for files in checked.groups for file in files)


if __name__ == "__main__":
    sys.exit(main())
