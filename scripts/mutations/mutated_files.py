"""The files in which errors are planted: the mathematics of sharding, schedules, loss, optimizer, data order and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FILES = (
    "trainer/engines/clipping.py",
    "trainer/engines/deepspeed/*.py",
    "trainer/engines/engine.py",
    "trainer/engines/native/*.py",
    "trainer/engines/native/data_parallel/*.py",
    "trainer/engines/rank_parameter.py",
    "trainer/engines/shared_embedding.py",
    "trainer/engines/torch_optimizer.py",
    "trainer/layers/*.py",
    "trainer/layers/transformer/*.py",
    "trainer/loop/build.py",
    "trainer/loop/checkpoint/load.py",
    "trainer/loop/checkpoint/shard_positions.py",
    "trainer/loop/checkpoint/slices.py",
    "trainer/loop/data/samples/*.py",
    "trainer/loop/state/engine_state.py",
    "trainer/loop/state/start_state.py",
    "trainer/loop/step/evaluate.py",
    "trainer/loop/step/model_inputs.py",
    "trainer/loop/step/train_progress.py",
    "trainer/loop/train.py",
    "trainer/models/build.py",
    "trainer/models/moe/module.py",
    "trainer/models/moe/routing.py",
    "trainer/parallel/process_groups.py",
    "trainer/parallel/rank_model.py",
    "trainer/plan/axes/weight_slices.py",
    "trainer/plan/deepspeed/ds_config.py",
    "trainer/plan/layout/layout.py",
    "trainer/plan/layout/schedules.py",
    "trainer/plan/mesh_position.py",
    "trainer/spec/derived/batch_levels.py",
    "trainer/spec/derived/width_scaling.py",
    "trainer/spec/sections/lr_schedule.py",
)

# What these say or cost changes no number of a training run: messages, statistics for people, planned bytes and seconds.
LEFT_OUT = (
    "trainer/engines/deepspeed/import_deepspeed.py",
    "trainer/engines/native/adamw_kernel.py",  # of GPUs alone
    "trainer/loop/data/samples/corpus_stats.py",
)
FUNCTIONS_LEFT_OUT = (
    "no_steps_message",
    "packing_remark",
    "shape_text",
    "held_bytes",
    "_measure_time",
    "Schedule",
    "idle_ranks",
    "peak_in_flight",
    "__repr__",
    "__str__",
)


def files_to_mutate(root: Path) -> Iterator[Path]:
    """Yield the files of a checkout, sorted, in which errors are planted."""
    out = {root / name for name in LEFT_OUT}
    for path in sorted({path for pattern in FILES for path in root.glob(pattern)} - out):
        if path.name != "__init__.py":
            yield path
