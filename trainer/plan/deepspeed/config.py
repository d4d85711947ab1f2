"""What DeepSpeed is told: its JSON."""

from __future__ import annotations

from typing import Any

from ...models.families import FAMILIES
from ...models.table import parameters
from ...spec.run import Run
from .memory import stage_of


def config(run: Run, dp: int) -> dict[str, Any]:
    """The DeepSpeed JSON of a run."""
    parallel, train = run.parallel, run.train
    offload = parallel.offload
    elements = parameters(FAMILIES[run.model.family](run.model, run.train), run.model.layers)
    zero: dict[str, Any] = {
        "stage": stage(run),
        "reduce_bucket_size": min(parallel.bucket, elements),  # made in full, however few gradients there are
        "allgather_bucket_size": parallel.bucket,
        "overlap_comm": parallel.overlap.data and run.cluster.device.kind == "cuda",
    }
    if offload.optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload.parameters:
        zero["offload_param"] = {"device": "cpu"}
    said: dict[str, Any] = {
        "timers": {"throughput": {"enabled": False}},  # it waits for the device twice a micro-batch
        "train_batch_size": train.batch * parallel.cp,  # ranks that share a micro-batch's sequences count each as one
        "train_micro_batch_size_per_gpu": train.microbatch,
        "gradient_accumulation_steps": train.batch // (dp * train.microbatch),
        "gradient_clipping": train.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }
    if train.precision in ("bf16", "fp16"):
        said[train.precision] = {"enabled": True}
    if train.gradients == "fp32" and train.precision != "fp32":
        said["data_types"] = {"grad_accum_dtype": "fp32"}
        if train.precision == "bf16":
            said["bf16"]["immediate_grad_update"] = True  # else a bf16 copy of all gradients stands beside
    if parallel.pp > 1:
        # By default DeepSpeed hands on 1/tp of what travels between stages, and gathers it there.
        said["pipeline"] = {"use_reentrant": False, "pipe_partitioned": False, "grad_partitioned": False}
    return said


def stage(run: Run) -> int:
    """The ZeRO stage that DeepSpeed is told. In half precision stage 0 takes a first step of nothing, which shifts Adam's
    bias correction, and of experts on several ranks it clips by a norm that is not theirs: stage 1 computes the same and does not."""
    return stage_of(run.parallel.zero, half=run.train.precision != "fp32", ep=run.parallel.ep)
