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
    quantize_folder,
    tensors_in,
)
from distrain.tests.fakes.small_models import CPU, module_of, run_of  # noqa: E402
from distrain.trainer.loop.checkpoint import block_slice  # noqa: E402
from distrain.trainer.loop.checkpoint.shard_positions import slice_values  # noqa: E402
from distrain.trainer.models.build import build_model, load_weights, named_weights  # noqa: E402
from distrain.trainer.models.hf_format.check_folder import check_folder  # noqa: E402
from distrain.trainer.models.hf_format.config import read_hf_config  # noqa: E402
from distrain.trainer.models.hf_format.sliced_weight import SlicedWeight  # noqa: E402
from distrain.trainer.models.hf_format.stored_tensors import StoredTensor  # noqa: E402
from distrain.trainer.models.hf_format.tensor_reader import Edges, TensorReader, dequantize_float8, dequantize_mxfp4  # noqa: E402
from distrain.trainer.models.hf_format.weight_files import weight_files  # noqa: E402
from distrain.trainer.models.hf_format.weights import open_hf_weights, read_hf_weights, write_hf_folder  # noqa: E402
from distrain.trainer.spec.problem import Unreadable  # noqa: E402
from distrain.trainer.spec.read import read  # noqa: E402
from distrain.trainer.spec.run import Model, Run  # noqa: E402

V3 = {"model__shared_experts": 1, "model__router__score": "sigmoid", "model__router__bias": True}
# fmt: off
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # a small model, changes of it, its quantization_config
    "mxfp4":                ("gpt-oss", {"model__hidden": 64, "model__expert_ffn": 96}, MXFP4),
    "fp8, blocks":          ("mla",     V3 | {"model__mtp__layers": 1}, fp8_config((16, 12))),
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


def full(tensor: Any) -> Edges:
    return tuple(map(slice, tensor.shape))


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
        @settings(max_examples=40)
        def check(data: st.DataObject) -> None:
            key = data.draw(st.sampled_from(sorted(whole)))
            assert weights[key].dtype == whole[key].dtype
            shape = tuple(whole[key].shape)
            offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
            sizes = tuple(data.draw(st.integers(1, size - first)) for first, size in zip(offset, shape, strict=True))
            block = block_slice(key, "weight", shape, offset, sizes)
            first = data.draw(st.integers(0, block.count - 1))
            part = block.part(first, data.draw(st.integers(1, block.count - first)))
            assert torch.equal(slice_values(weights[key], part), slice_values(whole[key], part))

        check()


class Recorder(TensorReader):
    """A reader that keeps what is asked of it, and how many elements it returned."""

    def __init__(self, folder: Path) -> None:
        super().__init__(weight_files(folder))
        self.asked: list[tuple[str, Edges, int]] = []

    def read(self, stored: StoredTensor, edges: Edges) -> Any:
        part = super().read(stored, edges)
        self.asked.append((stored.values, edges, part.numel()))
        return part


class Watched:
    """A weight, and the elements of each part that was asked of it."""

    def __init__(self, weight: SlicedWeight) -> None:
        self.weight, self.dtype = weight, weight.dtype
        self.parts: list[int] = []

    def __getitem__(self, edges: Edges) -> Any:
        part = self.weight[edges]
        self.parts.append(part.numel())
        return part


@pytest.mark.parametrize(
    ("name", "key", "block", "parts"),
    [
        ("mxfp4", "layers.1.experts.down.weight", ((2, 4), (48, 96), (0, 64)), [48 * 64] * 2),
        ("mxfp4", "layers.1.experts.gate.weight", ((1, 3), (0, 64), (10, 20)), [64 * 10] * 2),
        ("fp8, experts", "layers.1.experts.up.weight", ((0, 2), (0, 48), (20, 40)), [48 * 20] * 2),
        ("fp8, blocks", "layers.1.attention.value.weight", ((0, 12), (8, 24)), [12 * 2 * 18]),
    ],
)
def test_no_more_than_the_part_of_one_expert_is_dequantized_at_once(folders, name: str, key: str, block, parts: list[int]) -> None:
    """Of values that lie beside the keys of each head, the keys too: heads of 10 and 8 elements."""
    folder, run = folders[name]
    (weight,) = (each for each in check_folder(folder, run) if each.name == key)
    offset, sizes = tuple(first for first, _ in block), tuple(last - first for first, last in block)
    with Recorder(folder) as reader:
        sliced = SlicedWeight(weight=weight, reader=reader)
        watched = Watched(sliced)
        slice_values(watched, block_slice(key, "weight", weight.shape, offset, sizes))
        assert [count for _, _, count in reader.asked] == parts
        assert len(watched.parts) == len(parts), "no part is of two experts"
        reader.asked.clear()
        sliced.whole()
        assert max(count for _, _, count in reader.asked) <= torch.Size(weight.shape).numel() * (18 / 8 if name == "fp8, blocks" else 1 / 4)


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


def test_weights_that_are_plain_among_quantized_ones_are_read_as_they_are(folders, tmp_path: Path) -> None:
    """modules_to_not_convert need not be right: the tensors are what counts."""
    folder, run = quantized_folder(tmp_path, "fp8, experts")
    key = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    plain = tensors_in(folder.with_name("source"))[key]
    edit(folder, **{key: plain, f"{key}_scale_inv": None})
    there, before = dict(read_hf_weights(folder, run)), dict(read_hf_weights(folders["fp8, experts"][0], run))
    assert torch.equal(there["layers.0.experts.gate.weight"][1], plain.t())
    assert torch.equal(there["layers.0.experts.gate.weight"][0], before["layers.0.experts.gate.weight"][0])


@pytest.mark.parametrize(("name", "suffix"), [("fp8, blocks of 128", "_scale_inv"), ("compressed, tensors", "_scale")])
def test_scales_that_are_powers_of_two_are_read_as_8_bits(name: str, suffix: str, tmp_path: Path) -> None:
    """scale_fmt=ue8m0, of DeepSeek-V3.1: transformers keeps such scales in float8_e8m0fnu."""
    folder, run = quantized_folder(tmp_path, name)
    key = "model.layers.0.self_attn.o_proj.weight"
    edit(folder, **{f"{key}{suffix}": torch.tensor([[0.25]]).to(torch.float8_e8m0fnu)})
    found = dict(read_hf_weights(folder, run))["layers.0.attention.out.weight"]
    assert torch.equal(found, tensors_in(folder)[key].float().t() * 0.25)


DOWN = "model.layers.0.mlp.experts.down_proj"
OUT = "model.layers.0.self_attn.o_proj.weight"
# fmt: off
DAMAGES: dict[str, tuple[str, dict[str, Any], str]] = {  # a folder, tensors changed (a shape is zeros of a type), what is said of it
    "no exponents":     ("mxfp4", {f"{DOWN}_scales": None}, f"the folder has {DOWN}_blocks, and no {DOWN}_scales"),
    "exponents' shape": ("mxfp4", {f"{DOWN}_scales": ("uint8", 4, 64, 2)}, f"{DOWN}_scales is U8 [4, 64, 2], not U8 [4, 64, 3]"),
    "exponents' type":  ("mxfp4", {f"{DOWN}_scales": ("float32", 4, 64, 3)}, f"{DOWN}_scales is F32 [4, 64, 3], not U8 [4, 64, 3]"),
    "blocks of 8":      ("mxfp4", {f"{DOWN}_blocks": ("uint8", 4, 64, 6, 8)}, f"{DOWN}_blocks is [4, 64, 6, 8], not blocks of 16 bytes"),
    "other blocks":     ("mxfp4", {f"{DOWN}_blocks": ("uint8", 4, 64, 2, 16), f"{DOWN}_scales": ("uint8", 4, 64, 2)},
                         f"{DOWN}_blocks, as plain values, is [4, 64, 64], not [4, 96, 64]"),
    "neither":          ("mxfp4", {f"{DOWN}_scales": None, f"{DOWN}_blocks": None}, f"has no {DOWN}, which is layers.0.experts.down"),
    "no scales":        ("fp8, blocks", {f"{OUT}_scale_inv": None},
                         f"{OUT} is F8_E4M3, and the folder has neither {OUT}_scale_inv nor {OUT}_scale"),
    "scales' shape":    ("fp8, blocks", {f"{OUT}_scale_inv": ("float32", 3, 3)}, f"{OUT}_scale_inv is [3, 3], not [3, 4], where"),
    "scales' type":     ("fp8, blocks", {f"{OUT}_scale_inv": ("int32", 3, 4)}, f"{OUT}_scale_inv is I32, which is not read"),
    "4-bit integers":   ("fp8, blocks", {OUT: ("int8", 48, 24)}, f"{OUT} is I8, and has {OUT}_scale_inv: of scaled"),
    "integers":         ("fp8, blocks", {OUT: ("int32", 48, 48), f"{OUT}_scale_inv": None}, f"{OUT} is I32, which is not read"),
    "another shape":    ("fp8, whole tensors", {OUT: ("float8_e4m3fn", 48, 36)}, f"{OUT} is [48, 36], not [48, 72]"),
    "no row scales":    ("compressed, rows", {f"{OUT}_scale": ("float32", 1, 1)}, f"{OUT}_scale is [1, 1], not [48, 1], where {OUT} is"),
}
# fmt: on


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_with_the_tensor(damage: str, tmp_path: Path) -> None:
    name, tensors, says = DAMAGES[damage]
    folder, run = quantized_folder(tmp_path, name)
    edit(folder, **{key: each and torch.zeros(each[1:], dtype=getattr(torch, each[0])) for key, each in tensors.items()})
    said = problems(folder, run)
    assert says in said
    assert "\n" not in said


def test_scaled_weights_without_their_quantization_config_are_refused(tmp_path: Path) -> None:
    folder, run = quantized_folder(tmp_path, "fp8, blocks")
    edit_config(folder, quantization_config=None)
    said = problems(folder, run)
    assert "is F8_E4M3, and config.json has no quantization_config that says of what blocks its scales are" in said
    assert said.splitlines()[-1].endswith("more tensors are missing or of another shape")


def test_a_folder_of_another_method_is_refused_before_its_tensors_are_read(tmp_path: Path) -> None:
    folder, run = quantized_folder(tmp_path, "fp8, blocks")
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "weights of quant_method=gptq are not read: read are bf16, fp16, fp32, mxfp4, fp8, fbgemm_fp8" in problems(folder, run)


def test_factors_of_fp8_folders_are_multiplied_in_float32_whatever_their_type(tmp_path: Path, transformers: Any) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder, run = quantized_folder(tmp_path, "fp8, whole tensors")
    scale = torch.tensor(0.3, dtype=torch.bfloat16)
    edit(folder, **{f"{OUT}_scale_inv": scale})
    found = dict(read_hf_weights(folder, run))["layers.0.attention.out.weight"]
    assert torch.equal(found, Fp8Dequantize(None)._dequantize_one(tensors_in(folder)[OUT], scale.view(1, 1), torch.float32).t())
