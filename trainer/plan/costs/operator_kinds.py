"""The kinds of operators into which a step's computing is divided, as an engineer who profiles names them."""

from __future__ import annotations

from ...models.ops.op_table import Op

# What each kind is, in the order of pages among equals.
# fmt: off
OPERATOR_KINDS = {
    "attention_products":     "attention products",
    "attention_kernel":       "attention kernel",
    "linear_attention":       "linear attention",
    "mlp_products":           "mlp products",
    "expert_products":        "experts' products",
    "shared_expert_products": "shared experts",
    "router":                 "router",
    "permutation":            "token permutation",
    "lora":                   "LoRA",
    "head":                   "head's product",
    "loss":                   "loss",
    "embedding":              "embedding",
    "norms":                  "norms",
    "activations":            "activations",
    "rotary":                 "rotary positions",
    "residuals":              "residuals, dropout",
    "casts":                  "casts to 8 or 4 bits",
    "copies":                 "copies round exchanges",
    "gradient_sums":          "gradient sums",
    "gaps":                   "gaps between kernels",
    "host":                   "waiting for the host",
    "slowest_rank":           "waiting for slow ranks",
    "others":                 "other operators",
}
# fmt: on

_BY_FIRST_WORD = {
    "attention": "attention_products",
    "mlp": "mlp_products",
    "experts": "expert_products",
    "shared": "shared_expert_products",
    "shared_gate": "shared_expert_products",
    "router": "router",
    "dispatch": "permutation",
    "combine": "permutation",
    "head": "head",
    "transform": "head",
    "join": "head",
    "loss": "loss",
    "embedding": "embedding",
}
_BY_NAME = {
    "attention.rope": "rotary",
    "attention.conv": "linear_attention",
    "attention.delta": "linear_attention",
    "attention.gate": "activations",
    "shared_gate.sum": "activations",
}


def operator_kind(op: Op) -> str:
    """Return the kind of an op; "others" of one that no row names."""
    name = op.name
    if ".lora_" in name:
        return "lora"
    if op.core:
        return "attention_kernel"
    if "norm" in name:
        return "norms"
    if name.endswith(".act"):
        return "activations"
    if name.endswith(".residual"):
        return "residuals"
    return _BY_NAME.get(name) or _BY_FIRST_WORD.get(name.partition(".")[0], "others")
