"""LoRA's weights as PEFT's files: adapter_config.json, and tensors by the names of Hugging Face's modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...spec.run import Run
from .adapter_names import PREFIX, adapter_place, changed_weights, weight_shapes_of
from .model_type import hf_model_type
from .tensor_names import Columns, tensors_of
from .weights import write_json

# I inner, O outer, R rank, E experts; n weights side by side in one of Hugging Face's


@dataclass(frozen=True)
class _Part:
    """A weight's A [I, R] and B [R, O], or [E, I, R] and [E, R, O], and its columns in a tensor of several; None: it is the whole."""

    a: Tensor
    b: Tensor
    columns: Columns | None


@dataclass
class _Target:
    """One of Hugging Face's weights, which PEFT finds as a module, or with its parameter's name: the tensors of experts, and of every
    feed-forward in models with experts, whose names PEFT takes for experts' wherever they are."""

    module: str
    parameter: str | None
    parts: list[_Part] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.module}.{self.parameter}" if self.parameter else self.module

    def matrices(self) -> tuple[Tensor, Tensor]:
        """A and B as PEFT has them: [n R, I] and [O, n R], of experts [E n R, I] and [O, n R E]. Of several weights side by side each has
        its own rows of A, and in B its own columns of them: exact, with n times the rank."""
        a = torch.cat([each.a for each in self.parts], dim=-1).mT  # [(E,) n R, I]
        b = torch.cat([_placed(each.b, each.columns) for each in self.parts], dim=-2)  # [(E,) n R, O]
        if b.dim() == 2:
            return a.contiguous(), b.mT.contiguous()
        return a.flatten(0, 1).contiguous(), b.permute(2, 1, 0).flatten(1).contiguous()


def _placed(b: Tensor, columns: Columns | None) -> Tensor:
    """Return B [..., R, O] of one weight as columns of those of all weights side by side, which have zeros."""
    if columns is None:
        return b
    whole = b.new_zeros(*b.shape[:-1], columns.runs, columns.width)
    whole[..., columns.start : columns.stop] = torch.unflatten(b, -1, (columns.runs, -1))
    return whole.flatten(-2)


def write_adapter(additions: Mapping[str, Tensor], run: Run, folder: Path) -> None:
    """Write the A and B of a run's LoRA, by logical name, as a folder that `peft.PeftModel.from_pretrained` loads on `model.weights`."""
    targets = _targets(additions, run)
    tensors: dict[str, Tensor] = {}
    by_module: dict[str, list[_Target]] = {}
    for target in targets:
        by_module.setdefault(target.module, []).append(target)
    for module, found in by_module.items():
        for target, inner in zip(
            found, reversed(range(len(found))), strict=True
        ):  # PEFT wraps the parameters of a module one around another
            key = f"{PREFIX}{module}{'.base_layer' * inner}"
            a, b = target.matrices()
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", _config(targets, run))


def _targets(additions: Mapping[str, Tensor], run: Run) -> list[_Target]:
    """Return Hugging Face's weights that LoRA changes, in the order of ours."""
    found: dict[str, _Target] = {}
    shapes = weight_shapes_of(run)
    for weight in changed_weights(additions):
        place, base = adapter_place(weight, run, shapes), weight.removesuffix(".weight")
        target = found.setdefault(place.name, _Target(place.module, place.parameter))
        target.parts.append(_Part(additions[f"{base}.lora_a.weight"], additions[f"{base}.lora_b.weight"], place.columns))
    return list(found.values())


def _config(targets: list[_Target], run: Run) -> dict[str, object]:
    """Return PEFT's configuration. A target is named by the words that tell it from the other layers; a weight that holds several of ours
    has as many times the rank, and the same scale."""
    lora, parameters = run.model.lora, sorted({_suffix(each) for each in targets if each.parameter})
    several = {_suffix(each): len(each.parts) for each in targets if len(each.parts) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": run.model.weights,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(_module_names({_suffix(each) for each in targets if not each.parameter}, run)),
        "target_parameters": parameters or None,
        "rank_pattern": {name: many * lora.rank for name, many in several.items()},
        "alpha_pattern": {name: many * lora.alpha for name, many in several.items()},
        "fan_in_fan_out": hf_model_type(run) == "gpt2",
        "lora_dropout": lora.dropout,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _module_names(suffixes: set[str], run: Run) -> set[str]:
    """Return the last words of modules' names, as PEFT's users write them; GPT-2's c_proj is two modules: where one alone is a target, its
    longer name."""
    every = {tensor.name.partition("#.")[2] for tensor in tensors_of(run).values()} - suffixes
    others = {name.rpartition(".")[2] for name in every}
    return {last if (last := name.rpartition(".")[2]) not in others else name for name in suffixes}


def _suffix(target: _Target) -> str:
    """Return the end of a target's name, behind its layer's number: self_attn.q_proj."""
    words = target.name.split(".")
    return ".".join(words[next(at for at, word in enumerate(words) if word.isdigit()) + 1 :])
