"""A key of another trainer and ours, and the values that are the same in both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Synonym:
    """Our key for keys of other trainers, with a note on its meaning; if `key` is "", the note says where the value comes from.

    `values` maps their values to ours; a value that is not in it has no equivalent. None: values are the same.
    """

    names: tuple[str, ...]
    key: str
    note: str = ""
    values: Mapping[str, str] | None = None


YES = {"true": "true", "false": "false"}
FP8_FORMATS = dict.fromkeys(("true", "hybrid", "e4m3", "tensorwise", "rowwise"), "fp8")
# fmt: off
OPTIMIZERS = {
    **{each: each for each in ("adamw", "sgd", "muon")}, "adam": "adamw", "Adam": "adamw", "AdamW": "adamw",
    "adamW": "adamw", "Muon": "muon",
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw optim.moments=int8"),
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "distributed_fused_adam", "fused_adam"), "adamw"),
}
MOMENTS = {
    **{each: each for each in ("fp32", "bf16", "int8")},
    "float32": "fp32", "torch.float32": "fp32", "bfloat16": "bf16", "torch.bfloat16": "bf16",
}
LR_SCHEDULE_SYNONYMS = {each: each for each in ("constant", "linear", "cosine", "wsd")}
DECAYS = {
    **LR_SCHEDULE_SYNONYMS, "WSD": "wsd", "warmup_stable_decay": "wsd", "constant_with_warmup": "constant",
    "cosine_with_warmup": "cosine", "cosine_with_min_lr": "cosine", "linear_with_warmup": "linear",
    "WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "CosineAnnealing": "cosine",
}
PRECISION_SYNONYMS = {
    **{each: each for each in ("fp32", "bf16", "fp16")}, "no": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16",
    "amp_bf16": "bf16", "amp_fp16": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16",
}
# fmt: on


def row(names: str, key: str, note: str = "", values: Mapping[str, str] | None = None) -> Synonym:
    return Synonym(names=tuple(names.split()), key=key, note=note, values=values)
