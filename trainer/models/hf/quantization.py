"""What a config.json's `quantization_config` says of the weights beside it, and which of these forms are read here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...spec.problem import shorten
from ...spec.read import value_text

KEY: Final = "quantization_config"
READ_FORMATS = ("float-quantized", "naive-quantized")  # of compressed-tensors
WHAT_IS_READ: Final = (
    "read are bf16, fp16, fp32, mxfp4, fp8, fbgemm_fp8 and 8-bit floats of compressed-tensors: name a folder of such weights"
)

WHOLE_DIM: Final = 0  # as a block's rows or columns: all of them
TENSOR_BLOCK, ROW_BLOCK = (WHOLE_DIM, WHOLE_DIM), (1, WHOLE_DIM)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a folder stores its quantized weights. Which weights are quantized, its tensors show.

    `blocks`: the (rows, columns) of a matrix [outer, inner] that a scale may belong to. `in_scale_dtype`: the product of value and scale is
    rounded to the scale's type, as compressed-tensors does, and not computed in float32.
    """

    blocks: tuple[tuple[int, int], ...] = ()
    in_scale_dtype: bool = False


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """Return what a config.json without `quantization_problems` says of its folder's weights."""
    stated = config.get(KEY)
    if not isinstance(stated, Mapping):
        return Quantization()
    match stated.get("quant_method"):
        case "fp8":
            block = stated.get("weight_block_size")
            return Quantization(blocks=((block[0], block[1]),) if block else (TENSOR_BLOCK, ROW_BLOCK))
        case "fbgemm_fp8":
            return Quantization(blocks=(ROW_BLOCK,))
        case "compressed-tensors":
            found = (_weight_block(group["weights"]) for group in stated["config_groups"].values())
            return Quantization(blocks=tuple(dict.fromkeys(block for block in found if block)), in_scale_dtype=True)
        case _:
            return Quantization()


def quantization_problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for a `quantization_config` whose weights are not read here."""
    stated = config.get(KEY)
    if not stated:
        return
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    match method:
        case "mxfp4" | "fbgemm_fp8":
            return
        case "fp8":
            block = stated.get("weight_block_size")
            if block and not _is_block(block):
                yield f"{KEY}: weight_block_size={shorten(value_text(block))} is not two whole numbers above 0", ""
        case "compressed-tensors":
            yield from ((f"{KEY} of compressed-tensors: {says}", WHAT_IS_READ) for says in _compressed_problems(stated))
        case str():
            yield f"{KEY}: weights of quant_method={shorten(method)} are not read", WHAT_IS_READ
        case _:
            yield f"{KEY}={shorten(value_text(stated))} names no quant_method", WHAT_IS_READ


def _compressed_problems(stated: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of a quantization_config of compressed-tensors is not read: all but symmetric 8-bit floats."""
    groups, form = stated.get("config_groups"), stated.get("format")
    if form not in READ_FORMATS:
        yield f"weights of format={shorten(value_text(form))} are not read"
        return
    for key in ("sparsity_config", "transform_config"):
        if (value := stated.get(key)) and value != {"format": "dense"}:
            yield f"{key}={shorten(value_text(value))} is not read"
    if not isinstance(groups, Mapping) or not groups:
        yield "it has no config_groups"
        return
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            yield f"{name} names no weights"
        elif (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            yield f"weights of {name} are {weights.get('type')}s of {weights.get('num_bits')} bits, which are not read"
        elif (own := group.get("format") or form) not in READ_FORMATS:
            yield f"weights of {name} have format={shorten(value_text(own))}, which is not read"
        elif not weights.get("symmetric", True):
            yield f"weights of {name} have zero points, which are not read"
        elif _weight_block(weights) is None:
            yield f"weights of {name} have strategy={shorten(value_text(weights['strategy']))}, which is not read"


def _weight_block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block of a scale of a group's weights; None where it is not read."""
    match weights.get("strategy") or "tensor", weights.get("block_structure"):
        case "tensor", _:
            return TENSOR_BLOCK
        case "channel", _:
            return ROW_BLOCK
        case "block", [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
        case _:
            return None


def _is_block(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value)
