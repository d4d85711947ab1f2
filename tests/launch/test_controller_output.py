"""The controller survives a lost terminal, output that nobody reads, and Ctrl-C before it has begun."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distrain.cli.pages.background_printing import MOST_WAITING, print_in_background
from distrain.tests.fakes.deadline import DEADLINE, wait_for

# Two ranks that print ten lines each and save when they are asked to stop; the controller prints as `fit` does.
PRINTING_RUN = """
import os, sys
from pathlib import Path
from distrain.cli.pages.background_printing import print_in_background
from distrain.cli.pages.printing import print_error
from distrain.trainer.launch.single_host import launch_local_ranks
rank = '''
import os, signal, sys, time
from distrain.trainer.launch.rank.channel import Channel
channel, rank = Channel.from_environment(), os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: (open(f"saved{rank}", "w"), os._exit(75)))
open(f"ready{rank}", "w")
while not os.path.exists("ready0") or not os.path.exists("ready1"): time.sleep(0.02)
for step in range(10):
    channel.report_step(step)
    channel.report_status(f"step {step}")
    channel.say(f"step {step}")
    while step == 5 and os.path.exists("wait"): time.sleep(0.02)
for _ in range(5000 if os.path.exists("many") else 0): channel.say("x" * 100)
open(f"trained{rank}", "w")
channel.report_done()
'''
with print_in_background() as printer:
    printing = {"show": printer.show, "live": printer.live}
    outcome = launch_local_ranks([sys.executable, "-c", rank], ranks=2, folder=Path(), environment=os.environ, grace=2.0, **printing)
print_error(outcome.says or "trained")
sys.exit(outcome.status)
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr", "both", "closed"])
def test_a_run_whose_output_can_not_be_written_trains(stream: str, tmp_path: Path) -> None:
    """/dev/full behaves like a full disk."""
    redirect = {"stdout": ">/dev/full", "stderr": "2>/dev/full", "both": ">/dev/full 2>&1", "closed": ">&- 2>&-"}[stream]
    command = ["bash", "-c", f'exec "$@" {redirect}', "bash", sys.executable, "-c", PRINTING_RUN]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0
    if stream == "stdout":
        assert done.stderr == "distrain: can't write to stdout: No space left on device; the run goes on without this output\ntrained\n"


def test_a_run_whose_output_nobody_reads_trains(tmp_path: Path) -> None:
    command = ["bash", "-c", '"$@" | head -n 2; exit ${PIPESTATUS[0]}', "bash", sys.executable, "-c", PRINTING_RUN]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "step 0\nstep 1\n", "trained\n")


def test_a_run_whose_output_is_not_taken_trains_and_prints_it_later(tmp_path: Path) -> None:
    """As where a pager waits, or a terminal is stopped: more is printed than pipes hold."""
    (tmp_path / "many").touch()
    started = subprocess.Popen(
        [sys.executable, "-c", PRINTING_RUN], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(lambda: len(list(tmp_path.glob("trained*"))) == 2)
    lines = started.communicate(timeout=DEADLINE)[0].splitlines()
    assert started.returncode == 0
    assert (lines[:2], lines.count("x" * 100), lines[-1]) == (["step 0", "step 1"], 5000, "trained")


class Gate(io.StringIO):
    """A stdout that takes nothing until it is `open`."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def write(self, text: str) -> int:
        self.open.wait(DEADLINE)
        return super().write(text)


def test_lines_that_nothing_takes_are_left_out_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(sys, "stdout", gate)
    with print_in_background() as printer:
        for number in range(MOST_WAITING + 6):
            printer.show(f"line {number}")
        gate.open.set()
    lines = gate.getvalue().splitlines()
    left_out = [int(line.partition(" ")[0]) for line in lines if line.endswith("nothing took them")]
    assert left_out
    assert sum(left_out) + len(lines) - len(left_out) == MOST_WAITING + 6
    assert lines[-MOST_WAITING:] == [f"line {number}" for number in range(6, MOST_WAITING + 6)]


ENDS_BLOCKED = """
import sys, threading
from distrain.cli.pages.background_printing import print_in_background
from distrain.cli.verbs.exit_status import exit_with
join = threading.Thread.join
def report_and_join(thread, timeout=None):
    print("it waits", file=sys.stderr, flush=True)
    join(thread, timeout)
threading.Thread.join = report_and_join
def command(argv):
    with print_in_background() as printer:
        for _ in range(3000): printer.show("x" * 100)
        if argv: printer.patience = 0.01
    return 75
exit_with(command)
"""


@pytest.mark.parametrize("ends", ["by patience", "by Ctrl-C"])
def test_a_command_whose_output_nothing_takes_ends_with_its_status(ends: str) -> None:
    words = [sys.executable, "-c", ENDS_BLOCKED, *(["stopped"] if ends == "by patience" else [])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        assert started.stderr.readline() == "it waits\n"
        if ends == "by Ctrl-C":
            started.send_signal(signal.SIGINT)
        assert started.wait(DEADLINE) == 75


def test_a_run_whose_terminal_hangs_up_saves(tmp_path: Path) -> None:
    """As when its ssh session ends: SIGHUP arrives, and from then on nothing can be written."""
    (tmp_path / "wait").touch()
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.chdir(tmp_path)
            os.execv(sys.executable, [sys.executable, "-c", PRINTING_RUN])
        finally:
            os._exit(1)
    output = b""
    while b"step 5" not in output:
        output += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_fit_trains_where_its_output_can_not_be_written(tmp_path: Path) -> None:
    arguments = ["conf=quickstart", "model=tiny", "model.layers=1", "data=synthetic", "cluster=1x1", "parallel.dp=auto", "train.batch=2"]
    arguments += ["train.microbatch=2", "train.seq=8", "train.steps=1", "optim.warmup=0", "train.evaluate.every=0", f"log.dir={tmp_path}"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "distrain", "fit", *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        0,
        "distrain: can't write to stdout: No space left on device; the run goes on without this output\n",
    )
    assert list(tmp_path.glob("quickstart/checkpoints/step_*"))


@pytest.mark.parametrize("package", ["typer", "msgspec", "distrain.cli.config.load"])
def test_ctrl_c_while_a_command_is_imported_prints_no_traceback(package: str) -> None:
    program = f"""
import runpy, sys
class Interrupted:
    def find_spec(name, *_):
        if name == {package!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted)
sys.argv = ["distrain", "plan", "conf=quickstart"]
runpy.run_module("distrain", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
