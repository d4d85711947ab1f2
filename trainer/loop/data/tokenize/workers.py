"""Tokenizes in several processes: each reads turns of text as JSON lines and answers each with a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from ....spec.problem import Unreadable
from ....system.child_process import module_arguments, start_child
from ..files.data_error import data_error
from .pairs import Keys, PairReader, read_keys, tokenize_pairs
from .text_files import BadText, Span, tokenize
from .tokenizer import Tokenizer, load_tokenizer

Settings = tuple[str, int | None, str | Keys]  # data.tokenizer, data.end, data.text_key or the keys of pairs
TurnTokenizer = Callable[[Sequence[Span], Path], None]
Child = subprocess.Popen[str]


def tokenize_turns(turns: Sequence[Sequence[Span]], folder: Path, settings: Settings, processes: int) -> Generator[Path]:
    """Yield each turn's path in the folder, in order, as soon as it is tokenized; raises Unreadable at the first turn that fails.

    The processes end with this iterator and with the process that iterates.
    """
    parts = [folder / f"part_{index}" for index in range(len(turns))]
    lines = [json.dumps([spans, str(part)]) for spans, part in zip(turns, parts, strict=True)]
    if processes == 1:
        here = _turn_tokenizer(settings)
        answers: Iterator[str] = (_do_turn(line, here) for line in lines)
    else:
        answers = _worker_answers(lines, settings, processes)
    for part, answer in zip(parts, answers, strict=True):
        if answer:
            raise data_error(answer)
        yield part


def _turn_tokenizer(settings: Settings) -> TurnTokenizer:
    """Return a function that tokenizes spans into files; raises Unreadable, as the function does."""
    word, end, keys = settings
    by: Tokenizer = load_tokenizer(word, end)
    if isinstance(keys, str):
        return partial(tokenize, tokenizer=by, key=keys)
    return partial(tokenize_pairs, tokenizer=by, read=PairReader(read_keys(keys), word))


def _do_turn(line: str, tokenize_turn: TurnTokenizer) -> str:
    """Tokenize one turn; return the error, or "" if there is none."""
    spans, into = json.loads(line)
    try:
        tokenize_turn([Span(*span) for span in spans], Path(into))
    except (BadText, Unreadable) as error:
        return str(error)
    except OSError as error:
        return f"{into}: {error.strerror or error}"
    return ""


def _worker_answers(lines: Sequence[str], settings: Settings, processes: int) -> Iterator[str]:
    idle: SimpleQueue[Child] = SimpleQueue()

    def ask(line: str) -> str:
        child = idle.get()
        try:
            return _ask_worker(child, line)
        finally:
            idle.put(child)

    with ExitStack() as held:
        children = [held.enter_context(start_worker(settings)) for _ in range(processes)]
        for child in children:
            idle.put(child)
        threads = ThreadPoolExecutor(processes)
        try:
            yield from threads.map(ask, lines)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.kill()
            threads.shutdown()


@contextmanager
def start_worker(settings: Settings) -> Iterator[Child]:
    """Start a process that tokenizes and that ends with the context; raises Unreadable if it can't be started."""
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    arguments = module_arguments(__name__, json.dumps(settings))
    with ExitStack() as held:
        try:
            child = held.enter_context(start_child(arguments, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        except OSError as error:
            raise data_error(f"a tokenizer process can't be started: {error.strerror or error}") from None
        yield child


def _ask_worker(child: Child, line: str) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line + "\n")
        child.stdin.flush()
    except OSError:
        pass  # it has ended: its answer is missing below
    answer = child.stdout.readline()
    return str(json.loads(answer)) if answer else f"a tokenizer process ended with exit status {child.wait()} without an answer"


def main() -> None:
    """Tokenize turns until the pipe ends."""
    tokenize_turn, wrong = None, ""
    try:
        tokenize_turn = _turn_tokenizer(json.loads(sys.argv[1]))
    except Unreadable as error:
        wrong = str(error)
    for line in sys.stdin:
        print(json.dumps(_do_turn(line, tokenize_turn) if tokenize_turn else wrong), flush=True)
