"""Checkpoints, layouts: what was saved in any partition is loaded in any other, bit for bit."""

import json
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distrain.tests.fakes.rank_threads import run_on_ranks
from distrain.trainer.loop.checkpoint import (
    CheckpointReader,
    Gather,
    LoadFailed,
    SaveFailed,
    Shard,
    Slice,
    block_slice,
    find_newest,
    read_slices,
    save_shards,
    whole_slice,
)
from distrain.trainer.loop.checkpoint.save import shards_by_file
from distrain.trainer.loop.checkpoint.slices import boxes, coverage_fault

safetensors = pytest.importorskip("safetensors.torch")

Answer = TypeVar("Answer")
DTYPES = {"weight": [torch.float32, torch.float64], "exp_avg": [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]}


def slice_by_indexing(whole: Tensor, part: Slice) -> Tensor:
    """The values of a slice, by plain indexing."""
    held = whole[tuple(slice(start, start + length) for start, length in zip(part.offset, part.size, strict=True))]
    return held.reshape(-1)[part.flat[0] : part.flat[1]] if part.flat else held


@st.composite
def partitions(draw: st.DrawFn, part: Slice) -> list[Slice]:
    """Slices that cover a tensor: blocks split in two repeatedly, each possibly split into flat ranges."""
    blocks = [part]
    for _ in range(draw(st.integers(0, 4))):
        one = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        dims = [dim for dim, size in enumerate(one.size) if size > 1]
        if not dims:
            blocks.append(one)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, one.size[dim] - 1))
        blocks += [side(one, dim, 0, at), side(one, dim, at, one.size[dim] - at)]
    return [piece for one in blocks for piece in draw(runs(one))]


def side(part: Slice, dim: int, start: int, length: int) -> Slice:
    offset, size = list(part.offset), list(part.size)
    offset[dim] += start
    size[dim] = length
    return block_slice(part.name, part.kind, part.shape, tuple(offset), tuple(size))


@st.composite
def runs(draw: st.DrawFn, part: Slice) -> list[Slice]:
    if draw(st.booleans()):
        return [part]
    edges = sorted({0, part.count, *draw(st.lists(st.integers(0, part.count), max_size=5))})
    return [part.part(first, last - first) for first, last in pairwise(edges)] or [part.part(0, 0)]


shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple) | st.just((0, 3))


@st.composite
def models(draw: st.DrawFn) -> list[tuple[Tensor, list[Slice], list[Slice]]]:
    """Tensors, each with the slices that are stored and the slices that are read."""
    found = []
    for index in range(draw(st.integers(1, 3))):
        shape = draw(shapes)
        kind = draw(st.sampled_from(sorted(DTYPES)))
        values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(index)).to(draw(st.sampled_from(DTYPES[kind])))
        part = whole_slice(f"layers.{index}.weight", kind, shape)
        found.append((values, draw(partitions(part)), draw(partitions(part))))
    return found


@given(models(), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_any_slices_are_read_from_any_others(model, world, random) -> None:
    shards = [Shard(slice=part, tensor=slice_by_indexing(values, part)) for values, stored, _ in model for part in stored]
    owners = [random.randrange(world) for _ in shards]
    wanted = [part for _, _, asked in model for part in asked]
    values = {part: tensor for tensor, _, asked in model for part in asked}
    with TemporaryDirectory() as folder:

        def work(rank: int, gather: Gather) -> None:
            own = (shard for shard, owner in zip(shards, owners, strict=True) if owner == rank)
            save_shards(Path(folder), 7, own, extra={}, keep=1, rank=rank, world=world, gather=gather)

        run_on_ranks(world, work)
        found = find_newest(Path(folder))
        assert found.checkpoint, found.passed
        reader = CheckpointReader(found.checkpoint)
        for asked, tensor in read_slices(found.checkpoint, wanted):
            assert torch.equal(reader.read(asked), tensor)
            expected = slice_by_indexing(values[asked], asked)
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
            assert torch.equal(tensor, expected)


@given(st.data())
def test_boxes_make_up_a_slice_in_order(data) -> None:
    shape = data.draw(shapes)
    values = torch.arange(prod(shape)).reshape(shape)
    for part in data.draw(partitions(whole_slice("w", "weight", shape))):
        pieces = list(boxes(part))
        assert len(pieces) <= max(1, 2 * len(shape) - 1)
        blocks = [slice_by_indexing(values, block_slice("w", "weight", shape, box.offset, box.size)).reshape(-1) for box in pieces]
        assert torch.equal(torch.cat(blocks) if blocks else values.new_empty(0), slice_by_indexing(values, part).reshape(-1))


@given(st.data())
def test_a_missing_or_repeated_slice_is_detected(data) -> None:
    shape = data.draw(shapes.filter(prod))
    slices = [part for part in data.draw(partitions(whole_slice("w", "weight", shape))) if part.count]
    assert coverage_fault(slices) == ""
    odd = data.draw(st.sampled_from(slices))
    assert coverage_fault([*slices, odd]) == "two of its slices overlap"
    others = [part for part in slices if part != odd]
    assert coverage_fault(others) == (
        f"{prod(shape) - odd.count} of its {prod(shape)} elements are there" if others else "0 of its 0 elements are there"
    )


def test_slices_of_different_blocks_overlap() -> None:
    left = block_slice("w", "weight", (4, 4), (0, 0), (4, 2))
    assert coverage_fault([left, left.part(0, 2)]) == "two of its slices overlap"
    assert coverage_fault([left, whole_slice("w", "weight", (4, 4)).part(1, 8)]) == "two of its slices overlap"
    assert coverage_fault([left.part(0, 4), whole_slice("w", "weight", (4, 4)).part(8, 8)]) == "12 of its 16 elements are there"


@pytest.mark.parametrize(
    "wrong", [{"offset": (3, 0)}, {"size": (5, 4)}, {"offset": (0,)}, {"offset": (-1, 0)}, {"flat": (3, 99)}, {"kind": "../x"}]
)
def test_a_slice_outside_its_tensor_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="w"):
        Slice(**{"name": "w", "kind": "weight", "shape": (4, 4), "offset": (0, 0), "size": (4, 4), **wrong})


def test_a_shards_tensor_has_the_shape_of_its_slice() -> None:
    with pytest.raises(ValueError, match=r"w is \(4, 4\), and its tensor is \(16,\)"):
        Shard(slice=whole_slice("w", "weight", (4, 4)), tensor=torch.zeros(16))


def test_a_flat_range_is_saved_from_a_tensor_of_any_shape(tmp_path: Path) -> None:
    values = torch.arange(12.0).view(4, 3)
    shards = [
        Shard(slice=part, tensor=values[at : at + 2, :2]) for at in (0, 2) for part in [whole_slice("w", "weight", (4, 2)).part(2 * at, 4)]
    ]
    save_shards(tmp_path, 1, shards, extra={}, keep=1)
    assert torch.equal(read_file(tmp_path, whole_slice("w", "weight", (4, 2))), values[:, :2])
    with pytest.raises(ValueError, match=r"w\(0:4\) is \(4,\), and its tensor is \(4, 3\)"):
        Shard(slice=whole_slice("w", "weight", (4, 2)).part(0, 4), tensor=values)


def test_a_whole_tensor_has_its_own_name_in_its_file(tmp_path: Path) -> None:
    values = torch.randn(3, 5)
    save_shards(tmp_path, 1, [Shard(slice=whole_slice("head.weight", "weight", (3, 5)), tensor=values)], extra={}, keep=1)
    read = safetensors.load_file(tmp_path / "step_1" / "weight.0.0.safetensors")
    assert list(read) == ["head.weight"]
    assert torch.equal(read["head.weight"], values)


def test_a_tensor_that_is_not_contiguous_is_saved_in_order(tmp_path: Path) -> None:
    values = torch.randn(6, 8).t()[::2]
    save_shards(tmp_path, 1, [Shard(slice=whole_slice("w", "weight", (4, 6)), tensor=values)], extra={}, keep=1)
    assert torch.equal(read_file(tmp_path, whole_slice("w", "weight", (4, 6))), values)


def test_every_tensor_of_a_file_is_aligned_for_its_dtype(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.float64, torch.bfloat16, torch.float32]
    owned = [Shard(slice=whole_slice(str(dtype), "state", (3,)), tensor=torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    save_shards(tmp_path, 1, owned, extra={}, keep=1)
    raw = (tmp_path / "step_1" / "state.0.0.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    rows = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert [rows[str(dtype)]["data_offsets"][0] % dtype.itemsize for dtype in dtypes] == [0] * 4


def read_file(folder: Path, part: Slice) -> Tensor:
    found = find_newest(folder)
    assert found.checkpoint
    return next(read_slices(found.checkpoint, [part]))[1]


def test_one_element_of_a_strided_tensor_is_saved(tmp_path: Path) -> None:
    part = whole_slice("w", "weight", (2,)).part(1, 1)
    shards = [
        Shard(slice=part, tensor=torch.arange(8.0)[6::2].as_strided((1,), (2,))),
        Shard(slice=whole_slice("w", "weight", (2,)).part(0, 1), tensor=torch.zeros(1)),
    ]
    save_shards(tmp_path, 1, shards, extra={}, keep=1)
    assert read_file(tmp_path, whole_slice("w", "weight", (2,))).tolist() == [0, 6]


def test_a_rank_writes_a_file_for_each_kind_and_another_above_the_size_limit() -> None:
    def shards() -> Iterator[Shard]:
        for name, elements in (("a", 10), ("b", 10), ("c", 90), ("d", 1)):
            for kind in ("weight", "exp_avg"):
                yield Shard(slice=whole_slice(name, kind, (elements,)), tensor=torch.zeros(elements))

    found = {name: [shard.slice.name for shard in each] for name, each in shards_by_file(2, shards(), most=80)}
    files = [["a", "b"], ["c"], ["d"]]
    assert found == {f"{kind}.2.{index}.safetensors": each for kind in ("exp_avg", "weight") for index, each in enumerate(files)}


REFUSED = {
    "twice": ([whole_slice("w", "weight", (4,)), whole_slice("w", "weight", (4,)).part(0, 2)], "w (weight): two of its slices overlap"),
    "in part": ([whole_slice("w", "weight", (4,)).part(0, 3)], "w (weight): 3 of its 4 elements are there"),
    "same file": ([whole_slice("w", "weight", (4,)), whole_slice("w", "weight", (4,))], "w (weight) is there twice"),
    "shapes": ([whole_slice("w", "weight", (4,)), whole_slice("w", "weight", (5,))], "w (weight) is there twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_incomplete_or_overlapping_tensor_is_not_saved(tmp_path: Path, case: str) -> None:
    slices, says = REFUSED[case]
    with pytest.raises(SaveFailed) as failed:
        save_shards(tmp_path, 3, [Shard(slice=part, tensor=torch.zeros(part.local)) for part in slices], extra={}, keep=1)
    assert str(failed.value) == f"step 3 was not saved: {says}"
    assert list(tmp_path.iterdir()) == []


def test_a_weight_is_saved_as_float32(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match=r"step 3 was not saved: w is torch.bfloat16, and weights are stored as float32"):
        save_shards(
            tmp_path, 3, [Shard(slice=whole_slice("w", "weight", (4,)), tensor=torch.zeros(4, dtype=torch.bfloat16))], extra={}, keep=1
        )


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (whole_slice("v", "weight", (4, 2)), "step_1 holds no weight of v"),
        (whole_slice("w", "exp_avg", (4, 2)), "step_1 holds no exp_avg of w"),
        (whole_slice("w", "weight", (4, 3)), "w (weight) is 4 x 2 in step_1, not 4 x 3"),
        (whole_slice("w", "weight", ()), "w (weight) is 4 x 2 in step_1, not a single number"),
    ],
)
def test_loading_an_absent_slice_names_the_tensor(tmp_path: Path, part: Slice, says: str) -> None:
    save_shards(tmp_path, 1, [Shard(slice=whole_slice("w", "weight", (4, 2)), tensor=torch.zeros(4, 2))], extra={}, keep=1)
    found = find_newest(tmp_path)
    assert found.checkpoint
    with pytest.raises(LoadFailed) as failed:
        read_slices(found.checkpoint, [whole_slice("w", "weight", (4, 2)), part])
    assert str(failed.value) == says
