"""Quantized folders of Hugging Face: any part of any weight is, bit for bit, what its publisher's own dequantization gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file  # noqa: E402

from distrain.tests.fakes.quantized_folders import (  # noqa: E402
    FBGEMM,
    MXFP4,
    PER_BLOCK,
    PER_ROW,
    PER_TENSOR,
    dequantize_folder,
    fp8_config,
    pack_float8,
    pack_mxfp4,
    quantize_folder,
    tensors_in,
)
from distrain.tests.fakes.small_models import CPU, module_of, run_of  # noqa: E402
from distrain.trainer.loop.checkpoint import block_slice  # noqa: E402
from distrain.trainer.loop.checkpoint.shard_positions import slice_values  # noqa: E402
from distrain.trainer.models.build import build_model, load_weights, named_weights  # noqa: E402
from distrain.trainer.models.hf_format.check_folder import check_folder  # noqa: E402
from distrain.trainer.models.hf_format.config import read_hf_config  # noqa: E402
from distrain.trainer.models.hf_format.tensor_reader import dequantize_float8, dequantize_mxfp4  # noqa: E402
from distrain.trainer.models.hf_format.weights import open_hf_weights, read_hf_weights, write_hf_folder  # noqa: E402
from distrain.trainer.spec.problem import Unreadable  # noqa: E402
from distrain.trainer.spec.read import read  # noqa: E402
from distrain.trainer.spec.run import Model, Run  # noqa: E402

V3 = {"model__shared_experts": 1, "model__router__score": "sigmoid", "model__router__bias": True}
# fmt: off
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # a small model, changes of it, its quantization_config
    "mxfp4":                ("gpt-oss", {"model__hidden": 64, "model__expert_ffn": 96}, MXFP4),
    "fp8, blocks":          ("mla",     V3, fp8_config((16, 12))),
    "fp8, blocks of 128":   ("mla",     V3, fp8_config((128, 128))),
    "fp8, experts":         ("moe",     {"model__norm_place": "before"}, fp8_config((8, 8))),
    "fp8, whole tensors":   ("qwen3",   {}, fp8_config(None)),
    "fbgemm":               ("llama",   {}, FBGEMM),
    "compressed, tensors":  ("llama",   {}, PER_TENSOR),
    "compressed, rows":     ("qwen3",   {}, PER_ROW),
    "compressed, blocks":   ("llama",   {}, PER_BLOCK),
}
# fmt: on


def quantized_folder(top: Path, name: str) -> tuple[Path, Run]:
    """Write one of FOLDERS; return it and its run."""
    model, changes, config = FOLDERS[name]
    run = run_of(model, **changes)
    module = module_of(run, torch.float32)
    write_hf_folder(named_weights(module, run), run, top / "source")
    return quantize_folder(top / "source", top / "packed", config), run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Run]]:
    return {name: quantized_folder(tmp_path_factory.mktemp("folder"), name) for name in FOLDERS}


def problems(folder: Path, run: Run) -> str:
    with pytest.raises(Unreadable) as error:
        check_folder(folder, run)
    return "\n".join(map(str, error.value.problems))


def edit(folder: Path, **tensors: Any) -> None:
    """Write tensors, by name with __ for a dot, into a folder; None takes one out."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in (tensors_in(folder) | named).items() if tensor is not None}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(kept, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def full(tensor: Any) -> tuple[slice, ...]:
    return (slice(None),) * tensor.dim()


def test_every_4_bit_value_and_every_exponent_is_that_of_transformers(transformers: Any) -> None:
    """Exponent 255, which is no number, gives what transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    exponents = torch.arange(256, dtype=torch.uint8).view(1, 64, 4)
    blocks = torch.randint(0, 256, (1, 64, 4, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    ours = dequantize_mxfp4(blocks, exponents, (slice(None),) * 3)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)
        torch.testing.assert_close(ours.to(dtype), theirs, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ours.signbit(), theirs.signbit())


@pytest.mark.parametrize("block", [(16, 8), (128, 128), (48, 40), (1, 40)])
def test_8_bit_blocks_are_those_of_transformers(transformers: Any, block: tuple[int, int]) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))[: block[0] * 2, : block[1] * 2]
    values, scales = pack_float8(weight, block)
    ours = dequantize_float8(values, scales, block, full(values))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(ours.to(dtype), Fp8Dequantize(None)._dequantize_one(values, scales, dtype))


@pytest.mark.parametrize("config", [PER_TENSOR, PER_ROW, PER_BLOCK], ids=["tensors", "rows", "blocks"])
def test_scales_of_compressed_tensors_are_applied_as_it_applies_them(config: dict[str, Any], tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors, the yardstick, is not installed")
    weights = library.quantization.QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    name = next(name for name, (_, _, each) in FOLDERS.items() if each is config)
    folder, run = quantized_folder(tmp_path, name)
    there, tensors = dict(read_hf_weights(folder, run)), tensors_in(folder)
    key = "model.layers.1.mlp.down_proj.weight"
    theirs = library.quantization.lifecycle.forward.dequantize(tensors[key], tensors[f"{key}_scale"], args=weights)
    assert theirs.dtype == there["layers.1.mlp.down.weight"].dtype == torch.bfloat16
    assert torch.equal(there["layers.1.mlp.down.weight"], theirs.t())


@pytest.mark.parametrize("name", FOLDERS)
def test_a_quantized_folder_is_read_as_its_plain_one(folders, name: str, tmp_path: Path) -> None:
    folder, run = folders[name]
    plain = dict(read_hf_weights(dequantize_folder(folder, tmp_path / "plain"), run))
    there = dict(read_hf_weights(folder, run))
    assert there.keys() == plain.keys()
    assert not [key for key in plain if not torch.equal(there[key].float(), plain[key].float())]
    source = dict(read_hf_weights(folder.with_name("source"), run))
    changed = {key for key in plain if not torch.equal(plain[key].float(), source[key].float())}
    assert {key.split(".")[-2] for key in changed} >= ({"gate", "up", "down"} if name == "mxfp4" else {"out", "down"})


@pytest.mark.parametrize("name", FOLDERS)
def test_any_block_of_any_weight_is_that_of_the_whole(folders, name: str) -> None:
    """Borders of blocks of scales do not matter, nor those of heads and of weights that lie side by side."""
    folder, run = folders[name]
    with open_hf_weights(folder, run) as weights:
        whole = {key: weight.whole() for key, weight in weights.items()}

        @given(st.data())
        @settings(max_examples=60)
        def check(data: st.DataObject) -> None:
            key = data.draw(st.sampled_from(sorted(whole)))
            ends = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in whole[key].shape]
            edges = [
                (first, max(last, first + 1)) if first < size else (size - 1, size) for (first, last), size in zip(ends, whole[key].shape)
            ]
            offset, sizes = tuple(first for first, _ in edges), tuple(last - first for first, last in edges)
            part = block_slice(key, "weight", tuple(whole[key].shape), offset, sizes)
            count = data.draw(st.integers(1, part.count))
            part = part.part(data.draw(st.integers(0, part.count - count)), count)
            assert torch.equal(slice_values(weights[key], part), slice_values(whole[key], part))

        check()


@pytest.mark.parametrize("name", ["mxfp4", "fp8, blocks of 128", "fp8, experts", "fp8, whole tensors"])
def test_logits_are_those_of_transformers_own_dequantized_model(folders, name: str, transformers: Any) -> None:
    folder, _ = folders[name]
    config = FOLDERS[name][2]
    kinds = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
    keys = {"weight_block_size": config["weight_block_size"]} if config["quant_method"] == "fp8" else {}
    dequantize = getattr(transformers, kinds[config["quant_method"]])(dequantize=True, **keys)
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=dequantize, dtype=torch.float32, output_loading_info=True
    )
    assert not said["missing_keys"]
    run = replace(run_of("llama"), model=read(read_hf_config(folder), Model))
    ours = build_model(run, device=CPU, dtype=torch.float32)
    load_weights(ours, read_hf_weights(folder, run))
    tokens = torch.randint(run.model.vocab, (2, 24), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens), theirs.eval()(tokens).logits, rtol=0, atol=1e-5)
