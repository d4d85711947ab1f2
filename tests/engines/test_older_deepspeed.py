"""DeepSpeed before 0.19.8, which has no DualPipeV: engine pipe runs its other schedules."""

import subprocess
import sys

import pytest

from distrain.tests.fakes.planned_messages import run_of
from distrain.trainer.launch.admission import schedule_problem
from distrain.trainer.spec.run import Parallel

WITHOUT_DUALPIPEV = """
import sys
from distrain.trainer.engines.deepspeed.import_deepspeed import import_deepspeed
import_deepspeed()
from deepspeed.runtime.pipe import schedule
del schedule.DualPipeVSchedule, schedule.CommitP2P
sys.modules["deepspeed.runtime.pipe.dualpipev"] = None
from distrain.trainer.engines.deepspeed import pipeline_module
from distrain.trainer.engines.deepspeed.instructions import training_instructions
print(len(list(training_instructions("1f1b", 4, 2, 0))))
"""


def test_a_pipeline_needs_dualpipev_for_that_schedule_alone() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_DUALPIPEV], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 4


@pytest.mark.parametrize(
    ("engine", "schedule", "installed", "says"),
    [
        ("pipe", "dualpipev", "0.19.7", "needs DeepSpeed 0.19.8 or later, and 0.19.7 is installed"),
        ("pipe", "dualpipev", "0.19.8+cpu", None),
        ("pipe", "dualpipev", "0.20.0", None),
        ("pipe", "dualpipev", "", None),
        ("pipe", "1f1b", "0.19.3", None),
        ("native", "dualpipev", "0.19.3", None),
    ],
)
def test_dualpipev_is_refused_where_the_installed_deepspeed_lacks_it(engine: str, schedule: str, installed: str, says: str | None) -> None:
    run = run_of(parallel=Parallel(pp=2, schedule=schedule))
    problem = schedule_problem(run, engine, installed)
    assert (problem and problem.says) == (says and f"parallel.schedule=dualpipev with engine=pipe {says}")
