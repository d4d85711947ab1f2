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
from typing import Any

from ...launch.lifeline import die_with
from ...spec.problem import Problem, Unreadable
from ...spec.read import read
from ...spec.run import Data
from .check import Checked, check
from .corpus import windows
from .estimate import Estimate, estimate
from .facts import Facts, Part, facts
from .prepare import cache_folder, cached, prepare
from .refusal import refused, wrong
from .sources import named_for_validation
from .tokenfiles import TokenFile
from .tokenizer import Vocabulary

_OFTEN = 0.1  # seconds between two lines of progress


class Unheard(Exception):
    """Nobody reads what is said."""


class Answers:
    """Lines of JSON for who asked, each remark once."""

    def __init__(self, out: int) -> None:
        self._out, self._remarks, self._last = out, set[str](), 0.0

    def say(self, word: Mapping[str, Any]) -> None:
        """Write one line; raises Unheard."""
        line = f"{json.dumps(word)}\n".encode()
        try:
            while line:
                line = line[os.write(self._out, line) :]
        except BrokenPipeError:
            raise Unheard from None

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
    die_with(os.getppid())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    answers = Answers(out)
    try:
        answers.say(answer(sys.stdin.buffer.read(), answers))
    except Unheard:
        return 1
    return 0


def _stop(number: int, frame: object) -> None:
    """End once: what runs is undone and its children are ended, which no second signal cuts short."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def answer(question: bytes, answers: Answers) -> dict[str, Any]:
    try:
        words = json.loads(question)
        data = read(words["data"], Data, "data.")
        act = {"look": look, "prepare": prepared}[words["mode"]]
        return {"facts": act(data, words["vocab"], words["seq"], answers, evaluate=words.get("evaluate", False)).words()}
    except Unreadable as error:
        problems = error.problems
    except OSError as error:
        problems = (wrong(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)),)
    except Unheard:
        raise
    except Exception as error:
        problems = (wrong(f"the data could not be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"),)
    return {"problems": [_words(problem) for problem in problems]}


def _words(problem: Problem) -> dict[str, str]:
    return {"rule": problem.rule, "says": problem.says, "mend": problem.mend}


def prepared(data: Data, vocab: int, seq: int, answers: Answers, *, evaluate: bool) -> Facts:
    """Exact figures, with the cache filled; raises Unreadable."""
    checked = check(data, vocab, answers.remark)
    if isinstance(checked.tokenizer, Vocabulary):
        _estimates(checked, data, answers)  # for its remarks
    corpus = prepare(data, vocab=vocab, seq=seq, cache=cache_folder(data), progress=answers.progress)
    if evaluate:
        windows(corpus, seq, "validation")
    return replace(facts(corpus), entropy=corpus.entropy)


def look(data: Data, vocab: int, seq: int, answers: Answers, *, evaluate: bool) -> Facts:
    """Figures as far as they are found fast; raises Unreadable with every problem that is."""
    checked = check(data, vocab, answers.remark)
    estimates = _estimates(checked, data, answers) if checked.tokenizer else []
    corpus = cached(checked, data, vocab=vocab, cache=cache_folder(data))
    if corpus:
        windows(corpus, seq, "train")
        if evaluate:
            windows(corpus, seq, "validation")
        return facts(corpus)
    weights = data.weights or (1.0,)
    if data.name == "tokens":
        parts = [_part_of_files(files, weight, data, seq) for files, weight in zip(checked.opened, weights, strict=True)]
        return Facts(key=None, sources=tuple(parts), documents=_documents(checked.opened), exact=True, bytes=_bytes(checked))
    parts = [_part_of_text(each, weight, data, seq) for each, weight in zip(estimates, weights, strict=True)]
    known = [each.documents for each in estimates if each]
    documents = round(sum(known)) if len(known) == len(estimates) else None
    return Facts(key=None, sources=tuple(parts), documents=documents, exact=False, bytes=_bytes(checked))


def _estimates(checked: Checked, data: Data, answers: Answers) -> list[Estimate | None]:
    """Of each source."""
    assert checked.tokenizer is not None
    return [estimate(files, checked.tokenizer, data.text_key, answers.remark) for files in checked.groups]


def _part_of_files(files: list[TokenFile], weight: float, data: Data, seq: int) -> Part:
    """The tokens of files that say how many they hold; raises Unreadable where they are too few."""
    size, apart = sum(each.size for each in files), named_for_validation(files)
    held = (
        round(size * data.validation) if apart is None else sum(each.size for each, is_apart in zip(files, apart, strict=True) if is_apart)
    )
    if size - held <= seq and (apart is not None or size <= seq):
        raise _too_few(size - held if apart is not None else size, data, seq)
    return Part(weight=weight, train=size - held, validation=held)


def _part_of_text(guess: Estimate | None, weight: float, data: Data, seq: int) -> Part:
    """The tokens of text; raises Unreadable where they are surely too few."""
    if guess is None:
        return Part(weight=weight, train=None, validation=None)
    size = round(guess.tokens)
    if guess.exact and size <= seq:
        raise _too_few(size, data, seq)
    held = round(size * data.validation)
    return Part(weight=weight, train=size - held, validation=held)


def _too_few(size: int, data: Data, seq: int) -> Unreadable:
    says = f"train has {size} tokens of data={data.name}, less than one sequence and a token after it: train.seq={seq}"
    return refused(says, f"set train.seq to at most {size - 1}" if size > 1 else "give more text")


def _documents(sources: list[list[TokenFile]]) -> int | None:
    """How many documents the headers and indices of all files tell of; None where one tells nothing."""
    known = [len(each.bounds) - 1 for files in sources for each in files if each.bounds is not None]
    return sum(known) if len(known) == sum(map(len, sources)) else None


def _bytes(checked: Checked) -> int:
    return sum(file.size for files in checked.groups for file in files)


if __name__ == "__main__":
    sys.exit(main())
