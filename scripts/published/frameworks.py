"""What each framework does where a published run does not say: its documented defaults, one row each."""

from __future__ import annotations

from typing import Literal, NamedTuple

Recompute = Literal["none", "selective", "full", "fit"]


class Framework(NamedTuple):
    """A framework's defaults.

    - `fused`: pointwise operators are fused, by kernels of its own or by a compiler.
    - `gradients` accumulate in this type in bf16 runs.
    - `recompute` where a run states none. `fit`: the least with which the plan fits, since the run has trained. With sequence
      parallelism `full` means `selective` (Megatron-LM's --recompute-activations came with it).
    - `sequence`: sequence parallelism comes with tensor parallelism.
    - `overlap_data`, `overlap_tensor`, `overlap_pipeline`: which messages hide under computation.
    - `scatter`: the tensor ranks send a shard each between stages.
    - `micros`: micro-batches of a pipeline where a run states no size of one; 0: a micro-batch is one sequence.
    - `interleaved`: a pipeline whose schedule and virtual stages a run leaves unsaid has several chunks a stage.
    - `kernels`: the rate of its products, as a share of that of Megatron-LM's on the same device.
    - `beside`: bytes a parameter, in bf16 runs, of gradients and copies beside those that it accumulates in float32.
    - `saves`: whose saved activations its layers keep where they are not compiled and recompute nothing: "torch" those of eager modules.
    - `loss`: bytes a logit at the loss, where that is not compiled.
    - `dropout` of models of the GPT-2 kind, in runs without flash attention.
    """

    name: str  # part of a case's `framework`
    fused: bool
    gradients: str
    recompute: Recompute
    sequence: bool
    overlap_data: bool
    overlap_tensor: bool
    overlap_pipeline: bool
    scatter: bool
    micros: Literal["one", "stages"]
    dropout: float
    interleaved: bool
    kernels: float
    beside: int
    saves: Literal["megatron", "torch"]
    loss: int
    source: str


# fmt: off
FRAMEWORKS: tuple[Framework, ...] = (
    #         name, fused, gradients, recompute, sequence, overlap of data, tensor and pipeline, scatter, micros, dropout, interleaved,
    #         kernels, beside, saves, loss, source
    Framework("Megatron-Bridge",    True,  "fp32", "none",      True,  True,  True,  True,  False, "one",    0.0, False,
              1.0,  0, "megatron", 6,  "its performance recipes: overlap of all axes, no recomputation, distributed optimizer"),
    Framework("NeMo",               True,  "fp32", "none",      True,  True,  True,  True,  False, "one",    0.0, True,
              1.07, 0, "megatron", 6,  "NeMo's performance configurations: ub_tp_comm_overlap, overlap_grad_sync, overlap_p2p_comm"),
    Framework("Megatron-Core",      True,  "fp32", "none",      True,  True,  False, True,  False, "one",    0.0, True,
              1.0,  0, "megatron", 6,  "Megatron-LM arguments.py of core 0.8: --overlap-p2p-communication is on with virtual stages"),
    Framework("Megatron-DeepSpeed", True,  "fp32", "full",      False, False, False, False, True,  "one",    0.1, False,
              0.96, 4, "megatron", 6,  "its examples: --checkpoint-activations, gradients are summed after the last backward; beside: bf16 "
                                       "gradients, and 2 by a fit to BLOOM's bf16 runs"),
    Framework("Megatron-LM",        True,  "fp32", "full",      False, False, False, False, True,  "one",    0.1, False,
              1.0,  0, "megatron", 6,  "its examples before core 0.5: --checkpoint-activations or --recompute-activations, no "
                                       "--overlap-grad-reduce"),
    Framework("MegaScale",          True,  "fp32", "selective", True,  True,  True,  True,  False, "one",    0.0, True,
              1.0,  0, "megatron", 6,  "arXiv:2402.15627 section 3"),
    Framework("GPT-NeoX",           True,  "auto", "full",      False, False, False, False, False, "one",    0.0, False,
              1.0,  0, "megatron", 6,  "its 20B configuration: checkpoint_activations, ZeRO 1"),
    Framework("Meta",               True,  "bf16", "none",      True,  True,  False, False, False, "one",    0.0, True,
              1.0,  0, "megatron", 6,  "arXiv:2407.21783 section 3.3: interleaved stages, ZeRO without gathering again"),
    Framework("DeepSpeed ZeRO-3",   True,  "auto", "full",      False, True,  False, False, False, "one",    0.1, False,
              1.0,  0, "megatron", 6,  "DeepSpeed's ZeRO-3: overlap_comm"),
    Framework("torchtitan",         False, "bf16", "full",      True,  True,  False, False, False, "stages", 0.0, False,
              0.96, 0, "torch",    14, "its job_config.py: as many micro-batches as stages, tensor parallelism with a split sequence, "
                                       "reduction in fp32; loss.py: cross entropy of logits.float(): bf16 logits, float32 ones, their "
                                       "log-softmax and its gradient"),
    Framework("nanotron",           True,  "fp32", "none",      True,  True,  False, False, False, "one",    0.0, False,
              0.97, 2, "torch",    10, "its defaults: REDUCE_SCATTER, accumulate_grad_in_fp32, recompute_layer false; functional.py's "
                                       "sharded cross entropy: bf16 logits, float32 ones, and a copy less its maximum; its feed-forward is "
                                       "eager torch"),
    Framework("Composer",           False, "bf16", "full",      False, True,  False, False, False, "one",    0.0, False,
              0.97, 0, "torch",    6,  "llm-foundry's yamls: activation_checkpointing, flash attention"),
    Framework("MaxText",            True,  "bf16", "fit",       False, True,  False, False, False, "one",    0.0, False,
              1.17, 0, "megatron", 6,  "XLA fuses; its remat_policy is set per run"),
    Framework("Pax",                True,  "bf16", "fit",       False, True,  False, False, False, "one",    0.0, False,
              1.0,  0, "megatron", 6,  "XLA fuses; its checkpoint policy is set per run"),
    Framework("Alpa",               True,  "auto", "full",      False, True,  False, False, False, "one",    0.1, False,
              1.0,  0, "megatron", 6,  "its benchmark: use_remat"),
    Framework("lit-gpt",            False, "bf16", "none",      False, True,  False, False, False, "one",    0.0, False,
              1.0,  0, "torch",    6,  "TinyLlama's pretrain script: FSDP, fused kernels of flash-attn"),
    Framework("FSDP",               False, "bf16", "none",      False, True,  False, False, False, "one",    0.0, False,
              1.0,  0, "torch",    6,  "torch's FSDP"),
)
# fmt: on

OTHER = Framework("", False, "auto", "none", False, True, False, False, False, "one", 0.0, False, 1.0, 0, "torch", 6, "torch")


def framework_of(name: str) -> Framework:
    """The first row whose name is part of a case's framework; plain torch for one that has no row."""
    return next((row for row in FRAMEWORKS if row.name in name), OTHER)
