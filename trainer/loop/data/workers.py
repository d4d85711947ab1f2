"""Tokenizing in several processes: each reads its turns of text as lines of JSON and answers each with a line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import sleep

from ...spec.problem import Unreadable
from ...system.end_child import end_child
from ...system.parent_watch import die_with
from .data_error import refused
from .text_files import Span, Unfit, tokenize
from .tokenizer import Tokenizer, tokenizer

Settings = tuple[str, int | None, str]  # data.tokenizer, data.end, data.text_key
Child = subprocess.Popen[str]


def tokenized(turns: Sequence[Sequence[Span]], folder: Path, settings: Settings, processes: int) -> Generator[Path]:
    """Each turn's tokens below the folder, in order, as soon as they are there; raises Unreadable for the first turn that fails.

    The processes end with this iterator, and with whoever iterates, however that ends.
    """
    word, end, key = settings
    parts = [folder / f"part_{index}" for index in range(len(turns))]
    lines = [json.dumps([spans, str(part)]) for spans, part in zip(turns, parts, strict=True)]
    if processes == 1:
        here = tokenizer(word, end)
        answers: Iterator[str] = (_turn(line, here, key) for line in lines)
    else:
        answers = _answers(lines, settings, processes)
    for part, answer in zip(parts, answers, strict=True):
        if answer:
            raise refused(answer)
        yield part


def _turn(line: str, by: Tokenizer, key: str) -> str:
    """Do one turn; what was wrong, or nothing."""
    spans, into = json.loads(line)
    try:
        tokenize([Span(*span) for span in spans], Path(into), by, key)
    except (Unfit, Unreadable) as error:
        return str(error)
    except OSError as error:
        return f"{into}: {error.strerror or error}"
    return ""


def _answers(lines: Sequence[str], settings: Settings, processes: int) -> Iterator[str]:
    idle: SimpleQueue[Child] = SimpleQueue()

    def ask(line: str) -> str:
        child = idle.get()
        try:
            return _answer(child, line)
        finally:
            idle.put(child)

    with ExitStack() as held:
        children = [held.enter_context(worker(settings)) for _ in range(processes)]
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
def worker(settings: Settings) -> Iterator[Child]:
    """A process that tokenizes, which ends with the context; raises Unreadable where it can't be started."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", __name__, json.dumps(settings), str(os.getpid())]
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    except OSError as error:
        raise refused(f"a process that tokenizes can't be started: {error.strerror or error}") from None
    try:
        yield child
    finally:
        end_child(child)


def _answer(child: Child, line: str) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line + "\n")
        child.stdin.flush()
    except OSError:
        pass  # it is gone: its answer is missing below
    answer = child.stdout.readline()
    return str(json.loads(answer)) if answer else f"a process that tokenized ended with exit status {child.wait()}, without an answer"


def main() -> None:
    """Do turns until the pipe ends, or whoever asks does; Ctrl-C is for them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = int(sys.argv[2])
    die_with(parent)
    Thread(target=end_with, args=(parent,), daemon=True).start()
    word, end, key = json.loads(sys.argv[1])
    by, wrong = None, ""
    try:
        by = tokenizer(word, end)
    except Unreadable as error:
        wrong = str(error)
    for line in sys.stdin:
        print(json.dumps(_turn(line, by, key) if by else wrong), flush=True)


def end_with(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
