"""Where PEFT's files hold LoRA's A and B of our weights: the modules and parameters that they are of, and the words that name layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

from ...spec.run import Model, Run
from ...spec.sections.lora import HYBRID_TARGETS, PEFT_TARGETS, Lora, target_of_layer
from ..families import op_table
from ..ops.op_table import model_parameters
from .tensor_names import Columns, HfTensor, columns_in_tensor, hf_tensor, tensors_of

PREFIX = "base_model.model."  # of a module's name in PEFT's files
FUSED_EXPERTS = ("gate", "up")  # whose matrices lie side by side in the parameter gate_up_proj of transformers 5
HF_WORDS: dict[str, tuple[str, ...]] = {  # words of Hugging Face's modules and parameters, beside PEFT_TARGETS -> our targets
    "c_attn": ("query", "key", "value"),
    "c_fc": ("up",),
    "attn.c_proj": ("out",),
    "mlp.c_proj": ("down",),
    "c_proj": ("out", "down"),
    "gate_up_proj": ("gate", "up"),
    "w1": ("gate",),
    "w2": ("down",),
    "w3": ("up",),
}


@dataclass(frozen=True)
class AdapterPlace:
    """A weight in the model that PEFT changes: the module, its parameter (None: its weight, as a module), and the weight's columns in it
    (None: it is the whole). `beside`: all weights that lie there."""

    module: str
    parameter: str | None
    columns: Columns | None
    beside: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the module, or of the parameter."""
        return f"{self.module}.{self.parameter}" if self.parameter else self.module


def adapter_place(weight: str, run: Run, shapes: Mapping[str, tuple[int, ...]]) -> AdapterPlace:
    """Return the place of a weight, by logical name. The tensors of experts, and of every feed-forward in models with experts, are
    parameters: PEFT takes their names for experts' wherever they are."""
    tensor, heads = hf_tensor(weight, tensors_of(run)), run.model.heads
    layers, index, name = weight.removesuffix(".weight").split(".", 2)
    half, _, part = name.lstrip("0123456789.").partition(".")  # a hybrid's names begin with a number in the group
    if half != "experts":
        is_parameter = run.model.experts > 0 and half in ("mlp", "shared")
        module = tensor.name.removesuffix(".weight")
        beside = tuple(f"{layers}.{index}.{each}.weight" for each in tensor.beside) or (weight,)
        return AdapterPlace(module, "weight" if is_parameter else None, columns_in_tensor(weight, tensor, shapes, heads), beside)
    module = f"model.layers.{int(index) * tensor.every + tensor.first}.mlp.experts"
    if part not in FUSED_EXPERTS:
        return AdapterPlace(module, "down_proj", None, (weight,))
    names = tuple(f"{name.removesuffix(part)}{each}" for each in FUSED_EXPERTS)
    both = HfTensor("", beside=names, interleaved=tensor.interleaved, place=FUSED_EXPERTS.index(part))
    beside = tuple(f"{layers}.{index}.{each}.weight" for each in names)
    return AdapterPlace(module, "gate_up_proj", columns_in_tensor(weight, both, shapes, heads), beside)


def weight_shapes_of(run: Run) -> dict[str, tuple[int, ...]]:
    """Return the logical shape of every weight of a run's model, A and B among them."""
    table = op_table(run)
    return {each.name: each.shape(table.sizes) for each in model_parameters(table, range(run.model.layer_groups))}


def changed_weights(names: Iterable[str]) -> Iterator[str]:
    """Yield the weights, of all a model's, that have an A and a B."""
    for name in names:
        if Lora.owns(name) and name.endswith(".lora_a.weight"):
            yield name.replace(".lora_a.weight", ".weight")


def target_words(weights: Iterable[str], model: Model) -> list[str]:
    """Return the values of model.lora.targets that name these weights, each once."""
    return list(dict.fromkeys(target_of_layer(model.layer_word(weight), model.family) for weight in weights))


def lora_of_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the values of model.lora that make what an adapter_config.json describes, as far as it says. With use_rslora it scales A B by
    alpha / sqrt(rank)."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        return {}
    return {"rank": rank, "alpha": alpha * (sqrt(rank) if config.get("use_rslora") else 1.0), "targets": _targets_of_config(config)}


def _targets_of_config(config: Mapping[str, object]) -> list[str] | None:
    """Return the model.lora.targets that an adapter_config.json names; None where it has other words."""
    modules, parameters = config.get("target_modules") or [], config.get("target_parameters") or []
    if not isinstance(modules, list) or not isinstance(parameters, list):
        return None
    found = dict[str, None]()
    for name in (*modules, *(str(each).removesuffix(".weight") for each in parameters)):
        *_, before, last = ("", *str(name).split("."))
        words = (last,) if last in PEFT_TARGETS | HYBRID_TARGETS else HF_WORDS.get(f"{before}.{last}") or HF_WORDS.get(last)
        if words is None:
            return None
        found |= dict.fromkeys(words)
    return list(found) or None
