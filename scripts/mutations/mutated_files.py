"""The files in which errors are planted: the mathematics of training (sharding, schedules, loss, optimizer, data order and checkpoints),
what a plan computes, or what a run says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from .kinds import KINDS, PLAN_KINDS, Kind


@dataclass(frozen=True, kw_only=True)
class FileList:
    """Files in which errors are planted, by patterns from the checkout's root, the kinds of errors, and what is to find them."""

    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    functions_left_out: tuple[str, ...] = ()  # which say something, or show it
    kinds: Mapping[str, Kind]
    is_proved: bool  # whether `prove` trains with them; else tests alone find errors
    tests: tuple[str, ...] = ()  # the folders of tests that find errors; (): all for quick ones, the rooms of a file for slow ones
    recorded_calls: float = inf  # of a function in a test: its lines in further calls are not recorded


TRAINING_FILES = (
    "trainer/engines/**/*.py",
    "trainer/layers/**/*.py",
    "trainer/loop/build.py",
    "trainer/loop/checkpoint/load.py",
    "trainer/loop/checkpoint/shard_positions.py",
    "trainer/loop/checkpoint/slices.py",
    "trainer/loop/data/samples/*.py",
    "trainer/loop/data/tokenize/chats.py",
    "trainer/loop/data/tokenize/pairs.py",
    "trainer/loop/state/engine_state.py",
    "trainer/loop/state/reference_file.py",
    "trainer/loop/state/reference_pass.py",
    "trainer/loop/state/start_state.py",
    "trainer/loop/step/*.py",
    "trainer/loop/train.py",
    "trainer/loop/validate.py",
    "trainer/models/*/module.py",
    "trainer/models/build.py",
    "trainer/models/hybrid/fla_kernels.py",
    "trainer/models/moe/routing*.py",
    "trainer/parallel/process_groups.py",
    "trainer/parallel/rank_model.py",
    "trainer/plan/axes/weight_slices.py",
    "trainer/plan/deepspeed/ds_config.py",
    "trainer/plan/layout/layout.py",
    "trainer/plan/layout/schedules.py",
    "trainer/plan/mesh_position.py",
    "trainer/rundir/resume_changes.py",
    "trainer/spec/derived/batch_levels.py",
    "trainer/spec/derived/data_blends.py",
    "trainer/spec/derived/loss_chunks.py",
    "trainer/spec/derived/weight_decay.py",
    "trainer/spec/derived/width_scaling.py",
    "trainer/spec/sections/lr_schedule.py",
)

# What these say or cost changes no number of a training run: messages, statistics for people, planned bytes and seconds.
TRAINING = FileList(
    files=TRAINING_FILES,
    left_out=(
        "trainer/engines/deepspeed/import_deepspeed.py",
        "trainer/engines/held_bytes.py",
        "trainer/engines/lazy_dynamo.py",
        "trainer/engines/span_recorder.py",
        "trainer/loop/data/samples/corpus_stats.py",
    ),
    functions_left_out=(
        "no_steps_message",
        "packing_remark",
        "shape_text",
        "held_bytes",
        "_measure_time",
        "Schedule",
        "idle_ranks",
        "peak_in_flight",
        "compiled_adamw",  # these four choose a kernel of GPUs
        "has_kernel",
        "kernel_rows",
        "_trial_step",
        "__repr__",
        "__str__",
    ),
    kinds=KINDS,
    is_proved=True,
)
PLAN = FileList(
    files=("trainer/plan/*.py", "trainer/plan/**/*.py"),
    functions_left_out=("__repr__", "__str__"),
    kinds=PLAN_KINDS,
    is_proved=False,
    tests=("plan", "cli"),
    recorded_calls=8,
)
# Collectives that ranks record and what is said of a hang, rows of steps, reports, and what a proof makes of curves and messages.
REPORTS = FileList(
    files=(
        "cli/pages/report_page.py",
        "trainer/launch/rank/*.py",
        "trainer/launch/supervisor/compare_collectives.py",
        "trainer/launch/supervisor/outcome.py",
        "trainer/loop/failures/recorded_collectives.py",
        "trainer/loop/metrics/step_row.py",
        "trainer/parallel/ledger.py",
        "trainer/prove/checks/*.py",
        "trainer/prove/confirm_departures.py",
        "trainer/prove/judge.py",
        "trainer/rundir/measured_*.py",
        "trainer/rundir/metric_rows.py",
        "trainer/rundir/planned_measured.py",
        "trainer/rundir/slow_devices.py",
        "trainer/rundir/timed_rows.py",
    ),
    functions_left_out=("__repr__",),
    kinds={kind: PLAN_KINDS[kind] for kind in ("arithmetic", "comparison", "constant", "reduction", "term")},
    is_proved=False,
    tests=("launch", "loop", "prove", "parallel", "cli"),
)
FILE_LISTS = {"training": TRAINING, "plan": PLAN, "reports": REPORTS}


def files_to_mutate(root: Path, files: FileList = TRAINING) -> Iterator[Path]:
    """Yield the files of a checkout, sorted, in which errors are planted."""
    out = {root / name for name in files.left_out}
    for path in sorted({path for pattern in files.files for path in root.glob(pattern)} - out):
        if path.name != "__init__.py":
            yield path
