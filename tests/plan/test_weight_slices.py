"""Weight shards on the ranks of the tensor axis: their extent, padding, and shared heads, for any sizes and degree."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.trainer.models.families import FAMILIES
from distrain.trainer.models.ops.op_table import OpTable, element_count, model_parameters, round_up
from distrain.trainer.plan.axes.weight_slices import TENSOR_DIMS, DimShard, HeadShards, WeightShard, dim_shard, local_sizes, weight_shard
from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.layout.mesh import Mesh
from distrain.trainer.plan.layout_cost import layout_cost
from distrain.trainer.plan.layout_of_run import layout_of_run
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.spec.run import Cluster, Device, Model, Parallel, Run, Train

OWN = sorted(FAMILIES.keys() - {"hf"})  # whose weights a config.json states, and no axis splits


@st.composite
def heads(draw: st.DrawFn) -> tuple[int, int, int]:
    """Heads, key and value heads that divide them, and a degree: many to one, one to many, and no multiples of each other."""
    kv_heads = draw(st.integers(1, 24))
    return kv_heads * draw(st.integers(1, 12)), kv_heads, draw(st.integers(1, 32))


def elements(row: DimShard) -> range:
    return range(row.offset, row.offset + row.length)


@given(heads())
def test_every_query_head_is_on_one_rank(shape: tuple[int, int, int]) -> None:
    every, kv_heads, degree = shape
    lie = HeadShards(every, kv_heads, degree)
    assert [head for rank in range(degree) for head in elements(lie.query_shard(rank))] == list(range(every))


@given(heads())
def test_each_key_head_serves_the_same_query_heads_as_in_the_whole_model(shape: tuple[int, int, int]) -> None:
    """A module groups what it is given: its i-th query head goes with the key head i // (query heads / key heads)."""
    every, kv_heads, degree = shape
    lie = HeadShards(every, kv_heads, degree)
    for rank in range(degree):
        query, key = lie.query_shard(rank), lie.kv_shard(rank)
        assert query.size % key.size == 0
        for at, head in enumerate(elements(query)):
            served = at // (query.size // key.size)
            assert served < key.length
            assert key.offset + served == head // (every // kv_heads)


@given(heads())
def test_a_key_head_is_held_by_one_rank_or_by_neighbours(shape: tuple[int, int, int]) -> None:
    every, kv_heads, degree = shape
    lie = HeadShards(every, kv_heads, degree)
    assert degree % lie.copies == 0
    held = Counter(head for rank in range(degree) for head in elements(lie.kv_shard(rank)))
    assert held == dict.fromkeys(range(kv_heads), lie.copies)
    for rank in range(degree):
        key, first = lie.kv_shard(rank), lie.kv_shard(rank - rank % lie.copies)
        assert (key.copy, key.copies) == (rank % lie.copies, lie.copies)
        assert replace(key, copy=0) == first


@given(heads())
def test_no_head_is_padded_where_the_degree_divides(shape: tuple[int, int, int]) -> None:
    every, kv_heads, degree = shape
    lie = HeadShards(every, kv_heads, degree)
    if kv_heads % degree == 0 or (degree % kv_heads == 0 and every % degree == 0):
        assert lie.size * degree == every
        assert lie.kv_size * degree == kv_heads * lie.copies


@given(heads())
def test_padding_adds_less_than_one_group_of_heads_to_a_rank(shape: tuple[int, int, int]) -> None:
    """Less than a group of query heads each, or, where ranks share a key head, less than one head each."""
    every, kv_heads, degree = shape
    lie = HeadShards(every, kv_heads, degree)
    assert lie.size < every / degree + every // kv_heads or lie.copies > 1
    assert lie.size <= -(-(every // kv_heads) // lie.copies) or lie.copies == 1


@given(st.integers(1, 500), st.integers(1, 32), st.sampled_from([1, 8, 128]))
def test_shards_of_a_vocabulary_and_a_feed_forward_cover_them_once(size: int, degree: int, multiple: int) -> None:
    for dim, each in (("ffn", -(-size // degree)), ("vocab", round_up(size, multiple * degree) // degree)):
        rows = [dim_shard(dim, {dim: size}, degree, rank, vocab_multiple=multiple) for rank in range(degree)]
        assert [at for row in rows for at in elements(row)] == list(range(size))
        assert {row.size for row in rows} == {each}
        assert each * degree == size or size % degree or dim == "vocab"


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A small model of any family, sizes divisible by nothing in particular."""
    kv_heads, key_heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Model(
        family=draw(st.sampled_from(OWN)),
        layers=draw(st.integers(1, 2)),
        hidden=draw(st.integers(2, 5)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        ffn=draw(st.integers(1, 9)),
        vocab=draw(st.integers(3, 11)),
        vocab_multiple=draw(st.sampled_from([1, 4])),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        act=draw(st.sampled_from(["gelu", "swiglu"])),
        experts=2,
        top_k=1,
        shared_experts=draw(st.integers(0, 1)),
        q_lora_rank=draw(st.integers(0, 3)),
        kv_lora_rank=draw(st.integers(1, 3)),
        qk_nope_head_dim=draw(st.integers(1, 3)),
        qk_rope_head_dim=draw(st.integers(1, 3)),
        v_head_dim=draw(st.integers(1, 3)),
        full_attention_interval=draw(st.integers(1, 2)),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * draw(st.integers(1, 3)),
        linear_key_head_dim=draw(st.integers(1, 3)),
        linear_value_head_dim=draw(st.integers(1, 3)),
        linear_conv_kernel_dim=draw(st.integers(1, 3)),
    )


def table_of(model: Model) -> OpTable:
    return FAMILIES[model.family].table(model, Train(batch=1, seq=4, steps=1))


def rows_of(model: Model, degree: int) -> dict[str, list[WeightShard]]:
    """What each rank holds of each weight."""
    table = table_of(model)
    return {
        each.name: [weight_shard(each, table.sizes, degree, rank, vocab_multiple=model.vocab_multiple) for rank in range(degree)]
        for each in model_parameters(table, range(model.layer_groups))
    }


@given(models(), st.integers(1, 6))
def test_every_element_of_a_weight_is_on_one_rank_or_on_all_that_share_it(model: Model, degree: int) -> None:
    for name, ranks in rows_of(model, degree).items():
        held = Counter(
            place
            for each in ranks
            for place in product(*(range(offset, offset + length) for offset, length in zip(each.offset, each.length, strict=True)))
        )
        shape, copies = ranks[0].shape, ranks[0].copies
        assert held == dict.fromkeys(product(*map(range, shape)), copies), name
        assert sorted(Counter(each.copy for each in ranks).items()) == [(copy, degree // copies) for copy in range(copies)]
        assert {(each.shape, each.size, each.copies, each.shared) for each in ranks} == {(shape, ranks[0].size, copies, ranks[0].shared)}


@given(models(), st.integers(1, 6))
def test_shards_have_the_local_sizes(model: Model, degree: int) -> None:
    table = table_of(model)
    local = local_sizes(table.sizes, degree, vocab_multiple=model.vocab_multiple)
    for each in model_parameters(table, range(model.layer_groups)):
        split = [dim for dims in each.dims for dim in dims if dim in TENSOR_DIMS]
        assert len(split) <= 1
        for rank in range(degree):
            held = weight_shard(each, table.sizes, degree, rank, vocab_multiple=model.vocab_multiple)
            assert held.size == each.shape(local)
            assert held.is_split == (bool(split) or degree == 1)
            assert all(length <= size for length, size in zip(held.length, held.size, strict=True))


@given(models(), st.integers(2, 6))
def test_nothing_is_padded_where_the_degree_divides(model: Model, degree: int) -> None:
    group = model.heads // (model.kv_heads or 1)
    whole = replace(model, kv_heads=degree, heads=degree * group, ffn=2 * degree, vocab=12 * degree, expert_ffn=None)
    whole = replace(whole, linear_num_key_heads=degree, linear_num_value_heads=2 * degree)
    assert all(each.length == each.size for ranks in rows_of(whole, degree).values() for each in ranks)


CPU = Device(name="cpu", memory=1e12, kind="cpu")


def run_of(model: Model, parallel: Parallel, ranks: int, micros: int) -> Run:
    return Run(
        name="test",
        model=model,
        cluster=Cluster(nodes=1, gpus=ranks, device=CPU),
        parallel=parallel,
        train=Train(batch=micros, seq=4, steps=1),
    )


@given(models(), st.integers(1, 6))
def test_the_plan_counts_the_elements_of_a_ranks_shards(model: Model, degree: int) -> None:
    run = run_of(model, Parallel(tp=degree), degree, 1)
    frame = CostContext(run)
    made = layout_cost(frame, layout_of_run(frame, run.parallel, 1)).blocks
    planned = sum(piece.dense + piece.experts for piece in (made.embedding, made.head)) - made.tied
    planned += model.layer_groups * (made.layer.dense + made.layer.experts)
    ranks = rows_of(model, degree).values()
    assert planned == sum(prod(each[0].size) for each in ranks)
    if degree > 1:
        replicated = sum(prod(each[0].size) for each in ranks if not each[0].is_split)
        assert model.layer_groups * made.layer.replicated + made.embedding.replicated + made.head.replicated == replicated
        assert model.layer_groups * made.layer.shared == sum(prod(each[0].size) for each in ranks if each[0].shared)


@pytest.mark.parametrize(("schedule", "layers"), [("1f1b", 7), ("dualpipev", 7), ("dualpipev", 8), ("gpipe", 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_positions_of_a_mesh_hold_every_weight_once(schedule: str, layers: int, tied: bool) -> None:
    """Except a tied weight: both ends of a straight pipeline have it, and the first stage of a folded one has it once."""
    model = Model(family="gpt", layers=layers, hidden=4, heads=2, vocab=10, tied=tied)
    run = run_of(model, Parallel(pp=3, tp=2, schedule=schedule), 6, 8)
    held: Counter[str] = Counter()
    for rank in range(6):
        own = mesh_position(run, rank)
        names = [each.name for part in own.parts for each in own.weight_shards(run, part)]
        folded = schedule == "dualpipev"
        twice = {"embedding.weight"} if folded and tied and own.coordinates["pp"] == 0 else set()
        assert {name for name, times in Counter(names).items() if times > 1} == twice
        held.update(set(names))
        first, last = own.parts[0].layers, own.parts[-1].layers
        assert (own.coordinates["pp"] == 0) == own.parts[0].first
        assert first.start <= last.start
    whole = {each.name: 2 for each in model_parameters(table_of(model), range(layers))}
    if tied and schedule != "dualpipev":
        whole["embedding.weight"] = 4
    assert held == whole


def test_a_folded_stage_has_a_part_on_the_way_out_and_one_on_the_way_back() -> None:
    run = run_of(Model(family="gpt", layers=8, hidden=4, heads=2, vocab=10), Parallel(pp=4, schedule="dualpipev"), 4, 8)
    parts = [[(part.layers, part.first, part.last) for part in mesh_position(run, rank).parts] for rank in range(4)]
    assert parts == [
        [(range(1), True, False), (range(7, 8), False, True)],
        [(range(1, 2), False, False), (range(6, 7), False, False)],
        [(range(2, 3), False, False), (range(5, 6), False, False)],
        [(range(3, 4), False, False), (range(4, 5), False, False)],
    ]


def test_a_mesh_position_has_the_coordinates_of_its_rank() -> None:
    run = run_of(Model(family="gpt", layers=8, hidden=4, heads=2, vocab=10), Parallel(pp=2, tp=2), 8, 8)
    assert [mesh_position(run, rank).coordinates for rank in range(8)] == [Mesh(pp=2, dp=2, tp=2).coordinates(rank) for rank in range(8)]
    assert element_count(("heads", "head_dim"), table_of(run.model).sizes) == 4
