"""The survey of data as a process: its answer, its imports, and how it ends with its children and its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distrain.tests.fakes.deadline import DEADLINE
from distrain.tests.fakes.processes import alive, descendants, until
from distrain.tests.fakes.small_tokenizer import LINE, write_tokenizer
from distrain.trainer.system.child_process import end_child

COMMAND = [sys.executable, "-m", "distrain.trainer.loop.data.survey"]


@contextmanager
def start_survey(**words: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a survey in its own process and send it a request."""
    child = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert child.stdin is not None
        child.stdin.write(json.dumps(words).encode())
        child.stdin.close()
        yield child
    finally:
        end_child(child)


def test_the_survey_answers_on_stdout_and_exits_0(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE * 100)
    data = {"name": "text", "path": str(tmp_path / "a.txt")}
    for path, last in ((data["path"], "facts"), ("no.txt", "problems")):
        question = json.dumps({"data": {**data, "path": path}, "vocab": 256, "seq": 8, "mode": "look"})
        done = subprocess.run(COMMAND, input=question, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert list(json.loads(done.stdout.splitlines()[-1])) == [last]


def test_the_survey_imports_no_heavy_package() -> None:
    program = """
import sys
from distrain.trainer.loop.data import survey
print(sorted({"torch", "deepspeed", "transformers", "tokenizers", "pyarrow", "zstandard", "wandb"} & set(sys.modules)))
sys.modules["torch"] = None
answers = survey.AnswerStream(1)
answers.send(survey.answer(sys.stdin.buffer.read(), answers))
"""
    question = json.dumps({"data": {"name": "stdlib"}, "vocab": 256, "seq": 8, "mode": "look"})
    done = subprocess.run([sys.executable, "-c", program], input=question, capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "[]", done.stderr
    assert list(json.loads(done.stdout.splitlines()[-1])) == ["facts"]


@pytest.fixture
def every_core() -> Iterator[None]:
    """Let a test and its processes run on every core, where its worker is kept to one."""
    kept = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield
    os.sched_setaffinity(0, kept)


@pytest.fixture
def preparing(tmp_path: Path, every_core: None) -> Iterator[subprocess.Popen[bytes]]:
    """Return a survey whose processes tokenize a text that takes minutes."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core tokenizes in one process")
    path = write_endless(tmp_path)
    data = {"name": "text", "path": str(path), "cache": str(tmp_path / "cache"), "tokenizer": str(write_tokenizer(tmp_path))}
    with start_survey(data=data, vocab=300, seq=8, mode="prepare") as child:
        until(lambda: len(descendants(child.pid)) >= 2)
        yield child


def write_endless(folder: Path) -> Path:
    """Write a text that takes this tokenizer minutes."""
    path = folder / "a.txt"
    with path.open("w") as file:
        for _ in range(200):
            file.write("to be or not to be " * 50_000 + "\n")
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_survey_and_its_children_and_leaves_no_partial_cache(
    number: signal.Signals, preparing: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    children = descendants(preparing.pid)
    preparing.send_signal(number)
    assert preparing.wait(DEADLINE) == 128 + number
    until(lambda: not alive(children))  # one that was being started dies by itself when its parent has ended
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.name != "hashes"] == [".lock"]
    assert preparing.stderr is not None
    assert preparing.stderr.read() == b""


def test_the_children_end_when_the_survey_is_killed(preparing: subprocess.Popen[bytes]) -> None:
    children = descendants(preparing.pid)
    preparing.kill()
    until(lambda: not alive(children))


def test_the_survey_dies_with_its_parent(tmp_path: Path) -> None:
    data = {
        "name": "text",
        "path": str(write_endless(tmp_path)),
        "cache": str(tmp_path / "cache"),
        "tokenizer": str(write_tokenizer(tmp_path)),
    }
    question = json.dumps({"data": data, "vocab": 300, "seq": 8, "mode": "prepare"})
    program = f"""
import subprocess
from distrain.trainer.system.child_process import module_arguments, start_child
with start_child(module_arguments({COMMAND[-1]!r}), stdin=subprocess.PIPE) as child:
    child.stdin.write({question.encode()!r})
    child.stdin.close()
    child.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert b"progress" in parent.stdout.readline()
        family = descendants(parent.pid)
        assert family
        parent.kill()
        until(lambda: not alive(family))
    finally:
        end_child(parent)
