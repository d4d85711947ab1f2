"""Rounding at random to bfloat16: to a neighbour, right on average, by bits that numpy makes too and that no layout changes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from distrain.tests.fakes.rounded_states import random_bits  # noqa: E402
from distrain.trainer.engines.native.data_parallel.weight_buckets import Piece  # noqa: E402
from distrain.trainer.engines.native.shard_rows import ShardRows  # noqa: E402
from distrain.trainer.layers.stochastic_rounding import column_words, random_words, round_at_random, row_words, tensor_key  # noqa: E402
from distrain.trainer.plan.axes.weight_slices import WeightShard  # noqa: E402

NAME, SEED = "layers.1.mlp.up.weight", 7


def words(rows: Any, columns: Any, *, seed: int = SEED, name: str = NAME, step: int = 3) -> Any:
    return random_words(row_words(tensor_key(seed, name), torch.tensor(float(step)), rows), column_words(columns))


def test_the_bits_are_those_that_numpy_makes() -> None:
    found = words(torch.arange(50), torch.arange(33)).numpy().view(np.uint32)
    assert (found == random_bits(SEED, NAME, 3, 50, 33)).all()


def test_bits_depend_on_the_seed_the_name_the_step_and_the_place() -> None:
    """Of two draws of 16 bits that have nothing to do with each other few are equal, and they do not correlate."""
    rows, columns = torch.arange(64), torch.arange(256)
    one = words(rows, columns)
    others = [words(rows, columns, **changed) for changed in ({"seed": 8}, {"name": "a"}, {"step": 4})]
    others += [words(rows + 1, columns), words(rows, columns + 1), one >> 16]
    for other in others:
        low, high = (each.bitwise_and(0xFFFF).double().flatten() for each in (one, other))
        assert (low == high).double().mean() < 1e-3
        assert torch.corrcoef(torch.stack([low, high]))[0, 1].abs() < 5 / 128  # five of its standard errors, 1 / sqrt(64 x 256)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("value", [1.0 + 2**-9, -1.0 - 3 * 2**-10, 3.3e-7, 1.0 - 2**-12, -2.5e-39, 1e-45])
def test_a_value_goes_to_a_neighbour_and_stays_on_average(value: float, half: int) -> None:
    """The mean of 2^18 values is within five of its standard errors, in parts of the neighbours' distance."""
    values = torch.full((512, 512), value)
    found = round_at_random(values, words(torch.arange(512), torch.arange(512)), half).double()
    exact = values[0, 0].view(torch.int32).item()
    lower, upper = (
        torch.tensor(each, dtype=torch.int32).view(torch.float32).double() for each in (exact >> 16 << 16, (exact >> 16 << 16) + 65536)
    )
    assert set(found.unique().tolist()) == {lower.item(), upper.item()}
    share = (values[0, 0].double() - lower) / (upper - lower)
    assert abs((found.mean() - lower) / (upper - lower) - share) < 5 * (share * (1 - share) / 2**18) ** 0.5


def test_a_number_that_bfloat16_has_stays() -> None:
    kept = torch.tensor([[0.0, -0.0, 1.0, -3.140625, 1e30, 2**-126, float("inf"), -float("inf")]]).bfloat16()
    for step in range(50):
        bits = words(torch.arange(1), torch.arange(8), step=step)
        assert all(torch.equal(round_at_random(kept.float(), bits, half), kept) for half in (0, 1))


def shard(shape: tuple[int, ...], offset: tuple[int, ...], length: tuple[int, ...], size: tuple[int, ...]) -> WeightShard:
    return WeightShard(name=NAME, shape=shape, offset=offset, length=length, size=size, copy=0, copies=1, shared=False)


@pytest.mark.parametrize("most", [1, 3, 7, 16, 1000])
@pytest.mark.parametrize(("first", "stop"), [(0, 96), (5, 77), (30, 31)])
def test_each_element_has_the_bits_of_its_place_in_the_logical_tensor(most: int, first: int, stop: int) -> None:
    """Of a bucket with a block of experts' matrices, cut at both ends of this rank's shard, after a vector."""
    experts, vector = shard((6, 8, 10), (2, 4, 5), (3, 4, 5), (3, 4, 5)), shard((64,), (16,), (48,), (48,))
    taken = torch.tensor(2.0)
    of_experts = words(torch.arange(48), torch.arange(10), step=2).view(6, 8, 10)[2:5, 4:8, 5:10].flatten()[6:54]
    expected = torch.cat([words(torch.arange(1), torch.arange(64), step=2)[0, 16:], of_experts])
    pieces = [Piece(SimpleNamespace(shard=each), *place) for each, place in ((vector, (0, 0, 48)), (experts, (6, 48, 48)))]  # type: ignore[arg-type]
    rows, found, at = ShardRows(pieces, SEED, torch.device("cpu")), [], first
    columns = column_words(torch.arange(rows.width))
    for block in rows.cut(first, stop, most):
        assert block.rows * block.columns <= most
        assert block.start == at
        at = block.place.stop
        own = rows.words(taken)[block.row : block.row + block.rows], columns[block.column : block.column + block.columns]
        found.append(random_words(*own).flatten())
        assert torch.equal(random_words(own[0], own[1].view(-1, 1)).flatten(), found[-1])
    assert torch.equal(torch.cat(found), expected[first:stop])


def test_a_second_moment_decays_only_where_it_is_rounded_at_random() -> None:
    """With beta2 0.999, after gradients have fallen tenfold; root mean squares as a share of float32's."""
    draw, sizes = torch.Generator().manual_seed(0), (8, 64)
    wide, nearest, found = (torch.zeros(sizes) for _ in range(3))
    for step in range(3000):
        square = torch.randn(sizes, generator=draw).mul_(1 if step < 500 else 0.1).square_()
        wide, nearest, found = (0.999 * each + 0.001 * square for each in (wide, nearest, found))
        nearest = nearest.bfloat16().float()
        found = round_at_random(found, words(torch.arange(8), torch.arange(64), step=step), 0).float()
    assert found.mean() / wide.mean() == pytest.approx(1, abs=0.03)
    assert nearest.mean() / wide.mean() > 4
