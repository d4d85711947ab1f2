"""What ranks hold, as slices of logical weights: whatever split saves and whatever split reads, it is the logical tensor, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distrain.cli.config.load import load_recipe
from distrain.trainer.loop.checkpoint import Shard, Slice, whole_slice
from distrain.trainer.loop.checkpoint.manifest import tensor_records
from distrain.trainer.loop.checkpoint.shard_positions import (
    checkpoint_shards,
    is_saved_here,
    logical_slices,
    read_range,
    slice_values,
    weight_shapes,
)
from distrain.trainer.loop.checkpoint.slices import copy_overlap
from distrain.trainer.models.ops.op_table import Parameter
from distrain.trainer.plan.axes.weight_slices import WeightShard, weight_shard
from distrain.trainer.plan.mesh_position import mesh_position

if TYPE_CHECKING:
    from distrain.trainer.spec.run import Run

# What a weight's dims may be: a vector, the embedding, products that are split in columns, in rows, and an expert's three dims.
DIMS = (
    (("hidden",),),
    (("ffn",),),
    (("kv_heads", "head_dim"),),
    (("vocab",), ("hidden",)),
    (("hidden",), ("vocab",)),
    (("hidden",), ("heads", "head_dim")),
    (("hidden",), ("kv_heads", "head_dim")),
    (("heads", "head_dim"), ("hidden",)),
    (("hidden",), ("ffn",)),
    (("ffn",), ("hidden",)),
    (("types",), ("hidden",), ("ffn",)),
    ((),),
)


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    kv_heads = draw(st.integers(1, 5))
    each = {dim: draw(st.integers(1, 7)) for dim in ("hidden", "ffn", "vocab", "head_dim", "types")}
    return each | {"kv_heads": kv_heads, "heads": kv_heads * draw(st.integers(1, 4))}


@st.composite
def splits(draw: st.DrawFn, parameter: Parameter, size: dict[str, int]) -> list[tuple[WeightShard, int, int]]:
    """(weight shard, first element, elements) of every rank of a layout: ranges as ZeRO makes them, or of any length."""
    degree, multiple = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    found = []
    for rank in range(degree):
        held = weight_shard(parameter, size, degree, rank, vocab_multiple=multiple)
        count = prod(held.size)
        edges = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=4))})
        found += [(held, first, last - first) for first, last in pairwise(edges)] or [(held, 0, 0)]
    return found


def local(values: Tensor, held: WeightShard) -> Tensor:
    """A rank's shard, by plain indexing."""
    made = torch.zeros(held.size)
    corner = tuple(map(slice, held.length))
    made[corner] = values[tuple(slice(first, first + many) for first, many in zip(held.offset, held.length, strict=True))]
    return made


class Stored:
    """Slices of one tensor as a checkpoint stores them, and their reader."""

    def __init__(self) -> None:
        self.shards: list[Shard] = []

    def read(self, part: Slice) -> Tensor:
        flat = torch.full((part.count,), torch.nan)
        for shard in self.shards:
            copy_overlap(flat, part, shard.tensor.reshape(-1), shard.slice)
        return flat.view(part.local)


@given(st.data())
@settings(max_examples=300)
def test_weights_saved_under_any_split_are_read_under_any_other(data) -> None:
    size = data.draw(sizes())
    parameter = Parameter("w", data.draw(st.sampled_from(DIMS)))
    values = torch.arange(1.0, 1 + prod(parameter.shape(size))).view(parameter.shape(size))
    stored, turn = Stored(), data.draw(st.integers(0, 9))
    for held, start, length in data.draw(splits(parameter, size)):
        if is_saved_here(held, turn):
            stored.shards += checkpoint_shards(held, "weight", start, local(values, held).reshape(-1)[start : start + length])
    assert tensor_records((shard.slice, "float32", "file") for shard in stored.shards)
    assert torch.equal(stored.read(whole_slice("w", "weight", tuple(values.shape))), values)
    for held, start, length in data.draw(splits(parameter, size)):
        expected = local(values, held).reshape(-1)[start : start + length]
        assert torch.equal(read_range(held, "weight", start, length, read=stored.read), expected)
        assert torch.equal(read_range(held, "weight", start, length, read=lambda part: slice_values(values, part)), expected)


@given(st.data())
def test_a_range_is_one_slice_unless_a_dim_other_than_the_first_is_padded(data) -> None:
    size = data.draw(sizes())
    parameter = Parameter("w", data.draw(st.sampled_from(DIMS)))
    for held, start, length in data.draw(splits(parameter, size)):
        found = list(logical_slices(held, "weight", start, length))
        if held.length[1:] == held.size[1:]:
            assert len(found) <= 1
        if held.length == held.size and length:
            ((part, window),) = found
            assert part.span == (start, start + length)
            assert window.view(torch.arange(start, start + length)).reshape(-1).tolist() == list(range(start, start + length))
        assert len(found) <= 2 * len(held.size) - 1
        assert [one.span[1] for one, _ in found[:-1]] == [other.span[0] for other, _ in found[1:]], "they follow one another"


def test_a_whole_block_is_saved_as_a_block() -> None:
    held = WeightShard(name="w", shape=(4, 6), offset=(0, 3), length=(4, 3), size=(4, 5), copy=0, copies=1, shared=False)
    values = torch.arange(20.0)
    (shard,) = checkpoint_shards(held, "weight", 0, values)
    assert (shard.slice.key, shard.slice.flat) == ("w[0:4,3:6]", None)
    assert shard.tensor.tolist() == [[0, 1, 2], [5, 6, 7], [10, 11, 12], [15, 16, 17]]
    assert shard.tensor.untyped_storage().data_ptr() == values.untyped_storage().data_ptr(), "no copy is made"


def test_a_transposed_tensor_is_read_in_its_own_order() -> None:
    values = torch.arange(12.0).view(3, 4).t()  # [4, 3]
    part = whole_slice("w", "weight", (4, 3)).part(2, 7)
    assert slice_values(values, part).tolist() == values.reshape(-1)[2:9].tolist()


# --- whole models in the planner's layouts

# fmt: off
MODELS = (
    ("model=tiny", "model.tied=true"),
    ("model=tiny", "model.tied=false", "model.vocab=250", "model.vocab_multiple=3", "model.heads=5", "model.head_dim=4", "model.ffn=42"),
    ("model=tiny_llama", "model.heads=6", "model.kv_heads=2", "model.head_dim=4", "model.hidden=24", "model.tied=true"),
)
LAYOUTS = (  # dp, tp, pp, zero
    (1, 1, 1, 0), (3, 1, 1, 0), (2, 2, 1, 0), (2, 4, 1, 3), (3, 3, 1, 1),
    (1, 8, 1, 2), (2, 1, 2, 1), (2, 2, 2, 0), (1, 3, 4, 1), (2, 8, 2, 1),
)
# fmt: on


def run_in(model: tuple[str, ...], dp: int, tp: int, pp: int, zero: int) -> Run:
    parallel = f"parallel={{dp: {dp}, tp: {tp}, pp: {pp}, zero: {zero}}}"
    ranks = f"cluster.gpus={dp * tp * pp}"
    return load_recipe("quickstart", [*model, "model.layers=4", ranks, parallel, f"train.batch={dp * 4}", "train.microbatch=1"])


def held_by(run: Run, rank: int) -> list[tuple[WeightShard, bool]]:
    """(weight shard, whether it is the tied copy of another stage's) of a rank."""
    own = mesh_position(run, rank)
    ((part),) = own.parts
    return [(each, each.name == "embedding.weight" and not part.first) for each in own.weight_shards(run, part)]


def stepped_ranges(run: Run, held: list[WeightShard], replica: int) -> Iterator[tuple[WeightShard, int, int]]:
    """The elements that a data-parallel rank steps under ZeRO: all; a range of all weights concatenated; a range of each."""
    dp = run.parallel.dp
    assert isinstance(dp, int)
    at, every = 0, sum(prod(each.size) for each in held)
    for each in held:
        count = prod(each.size)
        match run.parallel.zero:
            case 0:
                first, last = 0, count
            case 3:
                first, last = (min(count, place * -(-count // dp)) for place in (replica, replica + 1))
            case _:
                first, last = (max(0, min(count, place * -(-every // dp) - at)) for place in (replica, replica + 1))
        at += count
        if first < last:
            yield each, first, last - first


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "dp{} tp{} pp{} zero{}".format(*layout))
@pytest.mark.parametrize("model", MODELS, ids=" ".join)
def test_every_element_of_a_model_is_saved_by_one_rank(model: tuple[str, ...], layout: tuple[int, ...]) -> None:
    dp, tp, pp, zero = layout
    run = run_in(model, *layout)
    names = weight_shapes(run)
    turns = {name: turn for turn, name in enumerate(names)}
    stored: list[tuple[Slice, str, str]] = []
    for rank in range(dp * tp * pp):
        replica = mesh_position(run, rank).coordinates["dp"]
        several = {"replica": replica, "replicas": dp} if zero == 0 else {}
        own = held_by(run, rank)
        lent = {each.name for each, tied in own if tied}
        for held, start, length in stepped_ranges(run, [each for each, _ in own], replica):
            if held.name not in lent and is_saved_here(held, turns[held.name], **several):
                stored += [(shard.slice, "float32", str(rank)) for shard in checkpoint_shards(held, "weight", start, torch.empty(length))]
    assert {row.name: row.shape for row in tensor_records(stored)} == names
    assert names.keys() == weight_shapes(run_in(model, 1, 1, 1, 0)).keys()


@pytest.mark.parametrize("model", MODELS, ids=" ".join)
def test_the_shapes_in_a_checkpoint_have_no_padding(model: tuple[str, ...]) -> None:
    plain = weight_shapes(run_in((*model, "model.vocab_multiple=1"), 1, 1, 1, 0))
    assert weight_shapes(run_in((*model, "model.vocab_multiple=96"), 2, 3, 2, 1)) == plain
    assert plain["embedding.weight"][0] == run_in(model, 1, 1, 1, 0).model.vocab


@pytest.mark.parametrize(("copies", "replicas"), [(1, 1), (1, 3), (4, 1), (2, 4)])
def test_ranks_that_hold_the_same_weights_share_the_saving(copies: int, replicas: int) -> None:
    one = WeightShard(name="w", shape=(3,), offset=(0,), length=(3,), size=(3,), copy=0, copies=copies, shared=False)
    holders = [(replace(one, copy=copy), replica) for copy in range(copies) for replica in range(replicas)]
    turns = range(5 * len(holders))
    each = Counter(holder for turn in turns for holder in holders if is_saved_here(holder[0], turn, replica=holder[1], replicas=replicas))
    assert each == dict.fromkeys(holders, 5)


def test_padding_is_read_as_zeros() -> None:
    held = WeightShard(name="w", shape=(3,), offset=(2,), length=(1,), size=(2,), copy=0, copies=1, shared=False)
    flat = read_range(held, "weight", 0, 2, read=lambda part: torch.full((part.count,), 5.0))
    assert flat.tolist() == [5.0, 0.0]
