"""Tokenizer processes end with their parent and their reader, even if closing their pipes raises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest

from distrain.tests.fakes.processes import alive, children, until
from distrain.trainer.loop.data import source_reader as sources
from distrain.trainer.loop.data.files.find import DataFile
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.tokenize.text_files import Span, split_turns
from distrain.trainer.loop.data.tokenize.workers import Child, start_worker, tokenize_turns
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data
from distrain.trainer.system.child_process import end_child

SETTINGS = ("bytes", None, "text")


def large(folder: Path) -> list[list[Span]]:
    """Turns of some 17 MB of text."""
    (folder / "a.txt").write_text("to be or not to be\n" * 900_000)
    return split_turns([DataFile("a.txt", folder / "a.txt", (folder / "a.txt").stat().st_size)])


def kill(pid: int) -> None:
    """Kill a child and wait until it is dead; it is not reaped."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def with_unsent_words(child: Child) -> None:
    """Kill a child that was written to but not yet sent what was written, so that closing its stdin raises."""
    kill(child.pid)
    assert child.stdin is not None
    child.stdin.write("words\n")


def test_processes_end_when_the_reader_stops(tmp_path: Path) -> None:
    before = children(os.getpid())
    reader = tokenize_turns(large(tmp_path), tmp_path, SETTINGS, 2)
    next(reader)
    assert len(children(os.getpid()) - before) == 2
    reader.close()
    assert children(os.getpid()) <= before


def test_processes_killed_before_the_reader_stops_are_reaped(tmp_path: Path) -> None:
    before = children(os.getpid())
    reader = tokenize_turns(large(tmp_path), tmp_path, SETTINGS, 2)
    next(reader)
    for pid in children(os.getpid()) - before:
        os.kill(pid, signal.SIGKILL)
    reader.close()
    assert children(os.getpid()) <= before


def test_a_killed_child_is_reaped_even_if_closing_its_pipe_raises() -> None:
    before = children(os.getpid())
    with start_worker(SETTINGS) as child:
        with_unsent_words(child)
    assert children(os.getpid()) <= before
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdin.closed
    assert child.stdout.closed


def test_every_child_ends_even_if_closing_pipes_raises() -> None:
    before = children(os.getpid())
    with ExitStack() as held:
        for child in [held.enter_context(start_worker(SETTINGS)) for _ in range(3)]:
            with_unsent_words(child)
    assert children(os.getpid()) <= before


def test_a_childs_pipes_are_closed_when_it_is_ended() -> None:
    with start_worker(SETTINGS) as child:
        with_unsent_words(child)
        end_child(child)
        assert child.returncode == -signal.SIGKILL
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdin.closed
        assert child.stdout.closed


def test_children_end_when_the_reader_raises(tmp_path: Path) -> None:
    before = children(os.getpid())

    def read() -> None:
        for _ in tokenize_turns(large(tmp_path), tmp_path, SETTINGS, 2):
            raise KeyError

    with pytest.raises(KeyError):
        read()
    assert children(os.getpid()) <= before


def test_children_end_before_the_partial_cache_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference to the error keeps its traceback's frames alive, as happens while folders are removed."""
    before = children(os.getpid())
    large(tmp_path)
    monkeypatch.setattr(sources, "_ONE_PROCESS", (0, 0))

    def progress(what: str, done: int, total: int) -> None:
        if what == "tokenize":
            raise KeyError(what)

    data = Data(name="text", path=str(tmp_path / "a.txt"))
    with pytest.raises(KeyError) as held:
        prepare_corpus(data, vocab=256, seq=8, cache=tmp_path / "cache", progress=progress)
    assert children(os.getpid()) <= before
    assert not list((tmp_path / "cache").glob("*.new"))
    assert held.traceback


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    before = children(os.getpid())
    os.mkfifo(tmp_path / "a.txt")  # nobody writes to it: whoever reads it waits

    def kill_all() -> None:
        while len(pids := children(os.getpid()) - before) < 2:
            time.sleep(0.01)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    turns = [[Span(str(tmp_path / "a.txt"), 0, 5, True)]] * 2
    killer = Thread(target=kill_all)
    killer.start()
    with pytest.raises(Unreadable, match=r"^a tokenizer process ended with exit status -9 without an answer$"):
        list(tokenize_turns(turns, tmp_path, SETTINGS, 2))
    killer.join()
    assert children(os.getpid()) <= before


def test_processes_in_the_middle_of_a_turn_end_when_the_reader_is_killed(tmp_path: Path) -> None:
    """Nothing but a parent-death watch ends a process that waits for a file."""
    (tmp_path / "a.txt").write_text("words")
    os.mkfifo(tmp_path / "b.txt")
    turns = [[(str(tmp_path / name), 0, 5, True)] for name in ("a.txt", "b.txt")]
    program = f"""
from pathlib import Path
from distrain.trainer.loop.data.tokenize.workers import tokenize_turns
for part in tokenize_turns({turns!r}, Path({str(tmp_path)!r}), {SETTINGS!r}, 2):
    print(part, flush=True)
"""
    reader = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline()  # the first turn is done: the second waits
        processes = children(reader.pid)
        assert len(processes) == 2
        reader.kill()
        until(lambda: not alive(processes))
    finally:
        end_child(reader)


def test_tokenizer_problems_are_reported_by_the_processes_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("to be")
    turns = [[Span(str(tmp_path / "a.txt"), 0, 5, True)]] * 2
    with pytest.raises(Unreadable, match=r"no.json: No such file or directory"):
        list(tokenize_turns(turns, tmp_path, (str(tmp_path / "no.json"), None, "text"), 2))
    assert capfd.readouterr().err == ""


def test_processes_that_cannot_be_started_are_reported_in_one_line(tmp_path: Path) -> None:
    before = children(os.getpid())
    turns = [[Span(str(tmp_path / "a.txt"), 0, 5, True)]] * 2
    with pytest.raises(Unreadable, match=r"^a tokenizer process can't be started: Argument list too long$"):
        list(tokenize_turns(turns, tmp_path, ("bytes", None, "k" * 10_000_000), 2))
    assert children(os.getpid()) <= before
