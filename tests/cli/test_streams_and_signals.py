"""Commands with closed or full streams, odd environments and signals: one line at most, the right exit status, no child left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from distrain.tests.fakes.deadline import DEADLINE, wait_for
from distrain.tests.fakes.folder_state import folder_state
from distrain.tests.fakes.malformed_files import run_folder
from distrain.tests.fakes.processes import marked_processes

PYTHON = [sys.executable, "-m", "distrain"]


def shell(redirections: str, argv: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line with a shell's redirections."""
    script = f'exec "$@" {redirections}'
    return subprocess.run(
        ["sh", "-c", script, "sh", *PYTHON, *argv], env={**os.environ, **environment}, capture_output=True, text=True, timeout=DEADLINE
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder without damage."""
    return run_folder(tmp_path_factory.mktemp("whole") / "run")


# Streams

PAGE, MISTAKE = ["plan", "conf=quickstart"], ["plan", "conf=quickstart", "parallel.tpp=2"]
LIGHT = (PAGE, MISTAKE, ["plan", "--help"], ["report", "RUN"])


@pytest.mark.parametrize(
    ("redirections", "commands"),
    [
        ("<&-", [PAGE]),
        (">&-", [PAGE]),
        ("2>&-", [PAGE, MISTAKE]),
        ("<&- >&- 2>&-", LIGHT),
        (">/dev/full", LIGHT),
        ("2>/dev/full", [MISTAKE]),
    ],
)
def test_a_closed_or_full_stream_prints_one_line_at_most(redirections: str, commands: Sequence[list[str]], whole: Path) -> None:
    """The verbs share the code that prints, so all of them run with two of the redirections, with the others what writes to the stream."""
    for argv in commands:
        done = shell(redirections, [word.replace("RUN", str(whole)) for word in argv])
        wrong = argv == MISTAKE
        full = redirections == ">/dev/full" and not wrong
        lines = done.stderr.splitlines()
        assert done.returncode == (2 if wrong else 1 if full else 0), (argv, done.stderr)
        assert lines == [] or (len(lines) == 1 and lines[0].startswith("distrain: "))
        assert lines == (["distrain: can't write to stdout: No space left on device"] if full else lines if wrong else [])


@pytest.mark.parametrize(
    "variables",
    [
        {"LC_ALL": "C", "TERM": "dumb", "COLUMNS": "20"},
        {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "1000"},
        {"PYTHONIOENCODING": "ascii", "HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere/cache"},
        {"_DISTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "distrain plan", "COMP_CWORD": "many"},
    ],
    ids=lambda variables: " ".join(variables),
)
def test_an_odd_environment_does_not_change_the_exit_status(variables: dict[str, str]) -> None:
    done = shell("", ["plan", "conf=quickstart", "name=modèle"], **variables)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_argument_that_is_not_utf8_prints_one_line() -> None:
    done = subprocess.run([*map(os.fsencode, PYTHON), b"plan", b"conf=quickstart", b"name=\xff\xfe"], capture_output=True)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"distrain: name=\\udcff\\udcfe is not valid UTF-8\n"


def test_a_terminal_that_hangs_up_ends_a_command_silently() -> None:
    ours, theirs = os.openpty()
    many = ["plan", "-m", "conf=gpt3_175b", "train.batch=range(64,64000,64)"]
    with subprocess.Popen([*PYTHON, *many], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, start_new_session=True) as process:
        os.close(theirs)
        wait_for_processor_time(process, 0.3)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(DEADLINE) == -signal.SIGHUP


# Signals


def wait_for_processor_time(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a process has used so many seconds of processor time, or has ended."""
    ticks = os.sysconf("SC_CLK_TCK")
    while process.poll() is None:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        if (int(fields[11]) + int(fields[12])) / ticks >= seconds:
            return
        time.sleep(0.005)


@pytest.fixture(scope="module")
def startup() -> float:
    """The seconds of processor time in which Python starts, which it can't be interrupted in without a traceback."""
    before = os.times()
    subprocess.run([sys.executable, "-c", ""], check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


# A command line, the signal, and when it is sent: after this processor time, or once the verb has started a process (None).
# fmt: off
STOPPED = (
    (["plan", "-m", "conf=gpt3_175b", "train.batch=range(64,64000,64)"], signal.SIGINT,  0.2),
    (["plan", "-m", "conf=gpt3_175b", "train.batch=range(64,64000,64)"], signal.SIGTERM, 0.5),
    (["plan", "conf=quickstart", "model.hf=NEOX"],                      signal.SIGINT,  None),  # asks transformers, in a child
    (["plan", "conf=quickstart", "model.hf=NEOX"],                      signal.SIGTERM, None),
    (["fit", "conf=quickstart", "log.dir=OUT"],                         signal.SIGTERM, None),  # measures this machine, in a child
    (["calibrate", "-o", "OUT"],                                        signal.SIGINT,  None),  # measures this machine, in a child
    (["doctor"],                                                        signal.SIGTERM, 0.2),
    (["doctor"],                                                        signal.SIGTERM, None),  # trains in a child
    (["doctor"],                                                        signal.SIGTERM, "distrain.trainer.loop.rank"),  # trains two ranks
    (["generate", "RUN", "--prompt", "a"],                              signal.SIGINT,  0.1),
)
# fmt: on


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")
@pytest.mark.parametrize(
    ("argv", "number", "after"), STOPPED, ids=[f"{' '.join(row[:2])} {number.name} {after}" for row, number, after in STOPPED]
)
def test_a_signal_ends_a_verb_and_its_children(
    argv: list[str], number: signal.Signals, after: float | str | None, whole: Path, startup: float, tmp_path: Path
) -> None:
    """After seconds of its processor's time, more where Python starts slowly; or once a child has a word in its command line, None: any."""
    neox = {"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**neox, "vocab_size": 256, "max_position_embeddings": 128}))
    before = folder_state(whole)
    paths = {"RUN": str(whole), "NEOX": str(tmp_path / "config.json"), "OUT": str(tmp_path / "out")}
    given = [paths.get(word, word.replace("NEOX", paths["NEOX"]).replace("OUT", paths["OUT"])) for word in argv]
    (temporary := tmp_path / "temporary").mkdir()
    is_measured = isinstance(after, str)  # its signal comes long after the machine would be measured
    own = {"TMPDIR": str(temporary), **({} if is_measured else {"XDG_CACHE_HOME": str(tmp_path / "cache")})}
    environment = {**os.environ, **own, "TEST_MARK": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*PYTHON, *given], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        if after is None:
            wait_for(lambda: process.poll() is not None or len(marked_processes("TEST_MARK", tmp_path)) > 1)
        elif isinstance(after, str):
            wait_for(lambda: process.poll() is not None or any(after in each for each in marked_processes("TEST_MARK", tmp_path).values()))
        else:
            wait_for_processor_time(process, max(after, 3 * startup))
        process.send_signal(number)
        assert process.stderr is not None
        said = process.stderr.read().decode()
        status = process.wait(DEADLINE)
    assert "Traceback" not in said
    assert all(line.startswith("distrain: ") for line in said.splitlines())
    assert status in (128 + number, -number) or "no checkpoint" in said, said  # which `generate` may have found before the signal
    wait_for(lambda: not marked_processes("TEST_MARK", tmp_path))
    assert folder_state(whole) == before
    if argv == ["doctor"]:  # its folder; managers of multiprocessing that are killed leave theirs, as does Python's own
        assert {each.name.partition("_")[0] for each in temporary.iterdir()} <= {"torchinductor"}
