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
    - `interleaved`: whether a pipeline whose schedule and virtual stages a run leaves unsaid has several chunks a stage; `tables`: only
      where the micro-batch is unsaid too, as in tables of tuned runs.
    - `kernels`: the rate of its products, as a share of that of Megatron-LM's on the same device.
    - `beside`: bytes a parameter, in bf16 runs, of gradients and copies beside those that it accumulates in float32.
    - `saves`: whose saved activations its layers keep where they are not compiled and recompute nothing: "torch" those of eager modules.
    - `loss`: bytes a logit at the loss, where that is not compiled; `split_loss`: where the tensor axis splits the vocabulary.
    - `compiled_loss`: the year and month since which a run that is compiled compiles its loss too; 0: never.
    - `fragments`: how much its allocator takes beside tensors, as a share of what torch's does with segments of fixed size, which keeps
      pieces that fit no request. 0.4 with segments that grow: a fit to torchtitan's runs. 0.5: a fit to nanotron's, whose "GB" are 2^30
      bytes (its logging/base.py) and are read as 10^9.
    - `scatters`: ZeRO-1 scatters gradients; else it all-reduces them, in half precision whatever they are summed in.
    - `relieves`: its recipes recompute or offload some activations where memory is short, which a run leaves unsaid; what that costs in
      time is little, and not planned.
    - `zero`: ZeRO's stage where a run states neither a stage nor a distributed optimizer.
    - `passes_share`: a stage of its pipelines ends with the layer that passes its share of all products, else layers are spread evenly.
    - `one_card`: its messages between nodes reach the rate of one of a node's network cards, which all of its devices share.
    - `of_first_rank`: its figures of memory are those of the first rank, else of the fullest.
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
    interleaved: Literal["no", "yes", "tables"]
    kernels: float
    beside: int
    saves: Literal["megatron", "torch"]
    loss: int
    split_loss: int
    compiled_loss: int
    fragments: float
    scatters: bool
    relieves: bool
    zero: int
    source: str
    passes_share: bool = False
    of_first_rank: bool = False
    one_card: bool = False


# fmt: off
FRAMEWORKS: tuple[Framework, ...] = (
    #         name, fused, gradients, recompute, sequence, overlap of data, tensor and pipeline, scatter, micros, dropout, interleaved,
    #         kernels, beside, saves, loss, split_loss, compiled_loss, fragments, scatters, relieves, zero, source; by name what few have
    Framework("Megatron-Bridge",    True,  "bf16", "none",      True,  True,  True,  True,  False, "one",    0.0, "no",
              1.0,  0, "megatron", 6,  6,  0,      1.0, True,  True,  0,
              "its performance recipes: overlap of all axes, distributed optimizer, grad_reduce_in_fp32 False; recompute_modules and "
              "cpu_offloading_num_layers by recipe"),
    Framework("NeMo",               True,  "bf16", "none",      True,  True,  True,  True,  False, "one",    0.0, "yes",
              1.07, 0, "megatron", 6,  6,  0,      1.0, True,  True,  0,
              "NeMo's performance configurations: ub_tp_comm_overlap, overlap_grad_sync, overlap_p2p_comm, grad_reduce_in_fp32 False; "
              "activations as Megatron-Bridge"),
    Framework("Megatron-Core",      True,  "fp32", "none",      True,  True,  False, True,  False, "one",    0.0, "tables",
              1.0,  0, "megatron", 6,  6,  0,      1.0, True,  False, 0,
              "Megatron-LM arguments.py of core 0.8: --overlap-p2p-communication is on with virtual stages"),
    Framework("Megatron-DeepSpeed", True,  "fp32", "full",      False, False, False, False, True,  "one",    0.1, "no",
              0.96, 2, "megatron", 6,  6,  0,      1.0, False, False, 0,
              "its examples: --checkpoint-activations, gradients are summed after the last backward; beside: bf16 gradients; "
              "DeepSpeed's stage_1_and_2.py, which all-reduces, and communication_data_type of its engine.py"),
    Framework("Megatron-LM",        True,  "fp32", "full",      False, False, False, False, True,  "one",    0.1, "no",
              1.0,  0, "megatron", 6,  6,  0,      1.0, True,  False, 0,
              "its examples before core 0.5: --checkpoint-activations or --recompute-activations, no --overlap-grad-reduce"),
    Framework("MegaScale",          True,  "fp32", "selective", True,  True,  True,  True,  False, "one",    0.0, "yes",
              1.0,  0, "megatron", 6,  6,  0,      1.0, True,  False, 0,
              "arXiv:2402.15627 section 3"),
    Framework("GPT-NeoX",           True,  "auto", "full",      False, False, False, False, False, "one",    0.0, "no",
              1.0,  0, "megatron", 6,  6,  0,      1.0, False, False, 0,
              "its 20B configuration: checkpoint_activations, ZeRO 1; DeepSpeed, as above"),
    Framework("Meta",               True,  "bf16", "none",      True,  True,  False, False, False, "one",    0.0, "yes",
              1.0,  0, "megatron", 6,  6,  0,      1.0, True,  False, 0,
              "arXiv:2407.21783 section 3.3: interleaved stages, ZeRO without gathering again"),
    Framework("DeepSpeed ZeRO-3",   True,  "auto", "full",      False, True,  False, False, False, "one",    0.1, "no",
              1.0,  0, "megatron", 6,  6,  0,      1.0, True,  False, 0,
              "DeepSpeed's ZeRO-3 of 2021 and 2022: overlap_comm; that the gathers of a node, each of one tensor, reach one card's rate is "
              "read off the steps of two sources (arXiv:2104.04473 table 2, DeepSpeed on Azure), on 384 to 1,536 GPUs", one_card=True),
    Framework("torchtitan",         False, "bf16", "full",      True,  True,  False, False, False, "stages", 0.0, "no",
              0.96, 0, "torch",    14, 16, 202504, 0.4, True,  False, 0,
              "its job_config.py: as many micro-batches as stages, tensor parallelism with a split sequence, reduction in fp32; "
              "loss.py: cross entropy of logits.float(): bf16 logits, float32 ones, their log-softmax and its gradient; torch's "
              "loss_parallel: its backward makes three tensors beside the log-softmax; pull request 1033 compiled the loss in April 2025; "
              "run_train.sh: expandable_segments"),
    Framework("nanotron",           True,  "fp32", "none",      True,  True,  False, False, False, "one",    0.0, "no",
              0.88, 0, "torch",    10, 10, 0,      0.5, True,  False, 0,
              "its defaults: REDUCE_SCATTER, accumulate_grad_in_fp32, recompute_layer false; functional.py's sharded cross entropy: "
              "bf16 logits, float32 ones, and a copy less its maximum; its feed-forward is eager torch; build_model of models/base.py and "
              "get_block_compute_costs of models/llama.py (commit 6771639), which count 4 h^2 + 3 h f a layer and h V for the head; "
              "log_throughput of logging/base.py, which rank 0 writes", passes_share=True, of_first_rank=True),
    Framework("Composer",           False, "bf16", "full",      False, True,  False, False, False, "one",    0.0, "no",
              0.97, 0, "torch",    4,  4,  0,      1.0, True,  False, 0,
              "llm-foundry's yamls: activation_checkpointing, flash attention; its loss_fn is flash-attn's fused cross entropy: logits "
              "and their gradient in bf16"),
    Framework("MaxText",            True,  "bf16", "fit",       False, True,  False, False, False, "one",    0.0, "no",
              1.17, 0, "megatron", 6,  6,  0,      0.0, True,  False, 0,
              "XLA fuses, and plans its buffers; its remat_policy is set per run"),
    Framework("Pax",                True,  "bf16", "fit",       False, True,  False, False, False, "one",    0.0, "no",
              1.0,  0, "megatron", 6,  6,  0,      0.0, True,  False, 0,
              "XLA fuses, and plans its buffers; its checkpoint policy is set per run"),
    Framework("Alpa",               True,  "auto", "full",      False, True,  False, False, False, "one",    0.1, "no",
              1.0,  0, "megatron", 6,  6,  0,      0.0, True,  False, 1,
              "its suite_manual_gpt.py: rematerialization and prefer_reduce_scatter, with which ranks share out the optimizer; XLA "
              "plans its buffers"),
    Framework("lit-gpt",            False, "bf16", "none",      False, True,  False, False, False, "one",    0.0, "no",
              1.0,  0, "torch",    6,  6,  0,      1.0, True,  False, 0,
              "TinyLlama's pretrain script: FSDP, fused kernels of flash-attn"),
    Framework("FSDP",               False, "bf16", "none",      False, True,  False, False, False, "one",    0.0, "no",
              1.0,  0, "torch",    6,  6,  0,      1.0, True,  False, 0,
              "torch's FSDP"),
)
# fmt: on

OTHER = Framework(
    "", False, "auto", "none", False, True, False, False, False, "one", 0.0, "no", 1.0, 0, "torch", 6, 6, 0, 1.0, True, False, 0, "torch"
)


def framework_of(name: str) -> Framework:
    """The first row whose name is part of a case's framework; plain torch for one that has no row."""
    return next((row for row in FRAMEWORKS if row.name in name), OTHER)
