"""Time without a core, against another process on the same one."""

import os
import subprocess
import sys

import pytest

from distrain.tests.fakes.deadline import DEADLINE
from distrain.trainer.system.child_process import end_child
from distrain.trainer.system.core_wait import seconds_without_core

WAITS = """
import os, time
os.nice(5)
from distrain.trainer.system.core_wait import seconds_without_core
before, end = seconds_without_core(), time.process_time() + 0.2
while time.process_time() < end:
    pass
print(seconds_without_core() - before)
"""


@pytest.mark.skipif(seconds_without_core() is None, reason="this system does not count the time without a core")
def test_a_process_that_shares_its_core_has_waited_for_it() -> None:
    """One other never sleeps and has priority, so that it waits longer than it computes: 0.2 s."""
    one = {min(os.sched_getaffinity(0))}

    def on_one_core() -> None:
        os.sched_setaffinity(0, one)

    other = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=on_one_core)
    try:
        done = subprocess.run([sys.executable, "-c", WAITS], preexec_fn=on_one_core, capture_output=True, text=True, timeout=DEADLINE)
    finally:
        other.kill()
        end_child(other)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.3
