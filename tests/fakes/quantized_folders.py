"""Hugging Face folders with quantized weights, written from the published formats, and the same folders with plain weights.

MXFP4 is OCP Microscaling Formats v1.0; 8-bit floats with a scale for each block are arXiv:2412.19437 section 3.3.2.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOAT8_MAX, E2M1_MAX = 448.0, 6.0
LINEAR = r".*(_proj|w[123])(_with_mqa)?\.weight"
EXPERTS = r".*\.mlp\.experts\.(gate_up_proj|down_proj)"


def _groups(strategy: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **weights},
                "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
            }
        },
    }


def fp8_config(block: tuple[int, int] | None) -> dict[str, Any]:
    """A quantization_config as DeepSeek-V3 has it; without a block it is of whole tensors."""
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block) if block else None}


MXFP4: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FBGEMM: dict[str, Any] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
PER_TENSOR, PER_ROW = _groups("tensor", block_structure=None), _groups("channel")
PER_BLOCK = _groups("block", block_structure=[16, 12])


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (blocks [..., outer, inner / 32, 16], exponents [..., outer, inner / 32]), bytes, of a weight [..., inner, outer].

    The shared exponent is that of the largest value, less that of 6.0; values go to the nearest e2m1, the first into the low half.
    """
    groups = torch.unflatten(weight.float().transpose(-1, -2), -1, (-1, 32))
    largest = groups.abs().amax(-1)
    exponents = torch.where(largest > 0, torch.floor(torch.log2(largest)) - 2, 0.0).clamp(-127, 127)
    scaled = (groups / torch.exp2(exponents)[..., None]).clamp(-E2M1_MAX, E2M1_MAX)
    codes = (scaled[..., None].abs() - decode_e2m1(torch.arange(8, dtype=torch.uint8))).abs().argmin(-1).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Return the values of 4-bit floats by their fields: sign, 2 bits of exponent with bias 1, 1 bit of mantissa."""
    sign, exponent, mantissa = codes >> 3, (codes >> 1 & 3).float(), (codes & 1).float()
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * torch.exp2(exponent - 1))
    return torch.where(sign == 1, -size, size)


def unpack_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return the float32 weight [..., inner, outer] of blocks and exponents."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return (decode_e2m1(codes) * torch.exp2(exponents.double() - 127)[..., None]).float().flatten(-2).transpose(-1, -2)


def pack_float8(weight: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return (values in e4m3, scales) of a weight [outer, inner] with a scale for each block of (rows, columns)."""
    rows, columns = (-(-length // size) for length, size in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = weight[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            scales[row, column] = part.abs().max() / FLOAT8_MAX
    scales = scales.to(dtype)
    return (weight / spread(scales.float(), block, weight.shape)).to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Return the scale of every element of a matrix."""
    return scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def quantize_folder(plain: Path, folder: Path, config: dict[str, Any]) -> Path:
    """Write a plain folder's model with the weights that such models' publishers quantize, under a quantization_config; return the
    folder."""
    return _write(folder, plain, {"quantization_config": config}, quantized(tensors_in(plain), config))


def dequantize_folder(packed: Path, folder: Path) -> Path:
    """Write what `quantize_folder` wrote as a folder of plain float32 weights; return the folder."""
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    return _write(folder, packed, {"quantization_config": None}, dequantized(tensors_in(packed), config))


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def quantized(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors with the linear layers, or for MXFP4 the experts, packed."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if config["quant_method"] == "mxfp4" and re.fullmatch(EXPERTS, name):
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = pack_mxfp4(tensor)
        elif config["quant_method"] != "mxfp4" and re.fullmatch(LINEAR, name):
            block = block_of(config, tensor.shape)
            dtype = torch.bfloat16 if config["quant_method"] == "compressed-tensors" else torch.float32
            values, scales = pack_float8(tensor.float(), block, dtype)
            packed[name], packed[name + scale_suffix(config)] = values, scales[0, 0] if is_per_tensor(config) else scales
        else:
            packed[name] = tensor
    return packed


def dequantized(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return packed tensors as plain float32 ones, element by element."""
    suffix, plain = scale_suffix(config), {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            plain[name.removesuffix("_blocks")] = unpack_mxfp4(tensor, tensors[name.removesuffix("_blocks") + "_scales"]).contiguous()
        elif name + suffix in tensors:
            scales = tensors[name + suffix]
            scales = scales if scales.dim() == 2 else scales.view(1, 1)
            product = tensor.to(scales.dtype) * spread(scales, block_of(config, tensor.shape), tensor.shape)
            plain[name] = product.float()
        elif not name.endswith((suffix, "_scales")):
            plain[name] = tensor
    return plain


def scale_suffix(config: dict[str, Any]) -> str:
    """Return what follows a weight's name in that of its scales."""
    return "_scale_inv" if config["quant_method"] == "fp8" else "_scale"


def is_per_tensor(config: dict[str, Any]) -> bool:
    """Whether a weight has one scale."""
    groups = config.get("config_groups")
    return (
        groups["group_0"]["weights"]["strategy"] == "tensor"
        if groups
        else "weight_block_size" in config and not config["weight_block_size"]
    )


def block_of(config: dict[str, Any], shape: torch.Size) -> tuple[int, int]:
    """Return the rows and columns of a scale."""
    if is_per_tensor(config):
        return shape[0], shape[1]
    groups = config.get("config_groups")
    stated = groups["group_0"]["weights"].get("block_structure") if groups else config.get("weight_block_size")
    return (stated[0], stated[1]) if stated else (1, shape[1])


def _write(folder: Path, source: Path, changes: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    names = sorted(tensors)
    weight_map: dict[str, str] = {}  # to two files, some values and their scales in different ones
    for part in range(2):
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name].contiguous() for name in names[part::2]}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[part::2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
