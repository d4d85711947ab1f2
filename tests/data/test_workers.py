"""Processes that tokenize end with whoever asked them, however that ends, and whatever closing their pipes raises."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread

import pytest

from distrain.trainer.loop.data import sources
from distrain.trainer.loop.data.find import File
from distrain.trainer.loop.data.prepare import prepare
from distrain.trainer.loop.data.text_files import Span, shares
from distrain.trainer.loop.data.workers import Child, tokenized, worker
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data
from distrain.trainer.system.end_child import end_child

SETTINGS = ("bytes", None, "text")


def children() -> set[int]:
    """The processes that this one has started and that are still there, dead or alive."""
    found = set[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def large(folder: Path) -> list[list[Span]]:
    """Turns of some 17 MB of text."""
    (folder / "a.txt").write_text("to be or not to be\n" * 900_000)
    return shares([File("a.txt", folder / "a.txt", (folder / "a.txt").stat().st_size)])


def kill(pid: int) -> None:
    """Kill a child and wait until it is dead; it is not reaped."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def with_unsent_words(child: Child) -> None:
    """Kill a child that was written to but not yet sent what was written, so that closing its stdin raises."""
    kill(child.pid)
    assert child.stdin is not None
    child.stdin.write("words\n")


def test_processes_end_where_their_reader_stops(tmp_path: Path) -> None:
    before = children()
    reader = tokenized(large(tmp_path), tmp_path, SETTINGS, 2)
    next(reader)
    assert len(children() - before) == 2
    reader.close()
    assert children() <= before


def test_processes_end_where_they_were_killed_before_their_reader_stops(tmp_path: Path) -> None:
    before = children()
    reader = tokenized(large(tmp_path), tmp_path, SETTINGS, 2)
    next(reader)
    for pid in children() - before:
        os.kill(pid, signal.SIGKILL)
    reader.close()
    assert children() <= before


def test_a_killed_child_is_waited_for_though_closing_its_pipe_raises() -> None:
    before = children()
    with worker(SETTINGS) as child:
        with_unsent_words(child)
    assert children() <= before


def test_every_child_ends_though_closing_each_of_their_pipes_raises() -> None:
    before = children()
    with ExitStack() as held:
        for child in [held.enter_context(worker(SETTINGS)) for _ in range(3)]:
            with_unsent_words(child)
    assert children() <= before


def test_a_childs_pipes_are_closed_when_it_is_ended() -> None:
    with worker(SETTINGS) as child:
        with_unsent_words(child)
        end_child(child)
        assert child.returncode == -signal.SIGKILL
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdin.closed
        assert child.stdout.closed


def test_children_end_with_an_error_of_whoever_reads(tmp_path: Path) -> None:
    before = children()

    def read() -> None:
        for _ in tokenized(large(tmp_path), tmp_path, SETTINGS, 2):
            raise KeyError

    with pytest.raises(KeyError):
        read()
    assert children() <= before


def test_children_end_before_their_half_cache_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the error is held, as it is while folders are cleared away, so are the frames that it passed through."""
    before = children()
    large(tmp_path)
    monkeypatch.setattr(sources, "_ALONE", (0, 0))

    def progress(what: str, done: int, total: int) -> None:
        if what == "tokenize":
            raise KeyError(what)

    data = Data(name="text", path=str(tmp_path / "a.txt"))
    with pytest.raises(KeyError) as held:
        prepare(data, vocab=256, seq=8, cache=tmp_path / "cache", progress=progress)
    assert children() <= before
    assert not list((tmp_path / "cache").glob("*.new"))
    assert held.traceback


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    before = children()
    os.mkfifo(tmp_path / "a.txt")  # nobody writes to it: whoever reads it waits

    def kill_all() -> None:
        while len(pids := children() - before) < 2:
            time.sleep(0.01)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    turns = [[Span(str(tmp_path / "a.txt"), 0, 5, True)]] * 2
    killer = Thread(target=kill_all)
    killer.start()
    with pytest.raises(Unreadable, match=r"^a process that tokenized ended with exit status -9, without an answer$"):
        list(tokenized(turns, tmp_path, SETTINGS, 2))
    killer.join()
    assert children() <= before


def test_what_is_wrong_with_a_tokenizer_is_said_by_the_processes_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("to be")
    turns = [[Span(str(tmp_path / "a.txt"), 0, 5, True)]] * 2
    with pytest.raises(Unreadable, match=r"no.json: No such file or directory"):
        list(tokenized(turns, tmp_path, (str(tmp_path / "no.json"), None, "text"), 2))
    assert capfd.readouterr().err == ""


def test_processes_that_cannot_be_started_are_one_line(tmp_path: Path) -> None:
    before = children()
    turns = [[Span(str(tmp_path / "a.txt"), 0, 5, True)]] * 2
    with pytest.raises(Unreadable, match=r"^a process that tokenizes can't be started: Argument list too long$"):
        list(tokenized(turns, tmp_path, ("bytes", None, "k" * 10_000_000), 2))
    assert children() <= before
