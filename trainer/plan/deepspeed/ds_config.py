"""The DeepSpeed config of a run."""

from __future__ import annotations

from typing import Any

from ...models.families import op_table
from ...models.ops.op_table import parameter_count
from ...spec.run import Device, Parallel, Run
from .memory import effective_stage


def overlaps_messages(device: Device, parallel: Parallel) -> bool:
    """Return whether gradients are reduced beside backward, from two buckets in turn: on GPUs, which have streams."""
    return parallel.overlap.data and device.kind == "cuda"


def deepspeed_config(run: Run, dp: int, elements: int | None = None) -> dict[str, Any]:
    """Return the DeepSpeed config of a run with `dp` replicas, for a rank of so many parameters; None: it has all of the model's."""
    parallel, train = run.parallel, run.train
    offload = parallel.offload
    if elements is None:
        elements = parameter_count(op_table(run), run.model.layer_groups)
    zero: dict[str, Any] = {
        "stage": zero_stage(run),
        "reduce_bucket_size": min(parallel.bucket, elements),  # DeepSpeed allocates it in full, however few gradients there are
        "allgather_bucket_size": parallel.bucket,
        "overlap_comm": overlaps_messages(run.cluster.device, parallel),
    }
    host = {"device": "cpu", "pin_memory": run.cluster.device.kind == "cuda"}
    if offload.optimizer:
        zero["offload_optimizer"] = host
    if offload.parameters:
        zero["offload_param"] = host
    config: dict[str, Any] = {
        "timers": {"throughput": {"enabled": False}},  # it synchronizes the device twice a micro-batch
        "train_batch_size": train.batch * parallel.cp,  # DeepSpeed counts context-parallel ranks as replicas
        "train_micro_batch_size_per_gpu": train.microbatch,
        "gradient_accumulation_steps": train.batch // (dp * train.microbatch),
        "gradient_clipping": train.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }
    if train.precision in ("bf16", "fp16"):
        config[train.precision] = {"enabled": True}
    if train.gradients == "fp32" and train.precision != "fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        if train.precision == "bf16":
            config["bf16"]["immediate_grad_update"] = True  # else it holds a bf16 copy of all gradients too
    if parallel.pp > 1:
        # By default DeepSpeed sends 1/tp of each activation between stages, and gathers it after.
        config["pipeline"] = {"use_reentrant": False, "pipe_partitioned": False, "grad_partitioned": False}
    return config


def zero_stage(run: Run) -> int:
    """Return the ZeRO stage that DeepSpeed runs.

    ZeRO 1 instead of 0 computes the same without two faults: in half precision ZeRO 0 takes an empty first step, which shifts Adam's
    bias correction, and with expert parallelism it clips experts by a norm that is not theirs.
    """
    return effective_stage(run.parallel.zero, half=run.train.precision != "fp32", ep=run.parallel.ep)
