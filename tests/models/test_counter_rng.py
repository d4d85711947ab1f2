"""Counter-based random numbers depend only on seed, name and position, not on the layout, and have the stated distributions."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.trainer.layers.counter_rng import (  # noqa: E402
    _chunk,
    dropout,
    dropout_keys,
    dropout_mask,
    hash64,
    high_word,
    low_word,
    normal,
    normal_at,
    splitmix64,
)
from distrain.trainer.layers.dropout import Dropout  # noqa: E402
from distrain.trainer.models.build import build_model  # noqa: E402

WHOLE = 300_000
# Slices that begin and end inside a chunk, cross chunks, have odd bounds, one element or none.
SLICES = [(0, WHOLE), (0, 1), (1, 1), (7, 64), (65_530, 13), (65_536, 65_536), (131_071, 100_003), (WHOLE - 1, 1), (5, 0)]


def states(samples: int = 4, seq: int = 16, *, seed: int = 1, step: int = 3) -> Any:
    return dropout_keys(seed, step, torch.arange(samples), torch.arange(seq)).states


@pytest.fixture(scope="module")
def whole() -> Any:
    return normal(1234, "layers.3.mlp.up.weight", 0, WHOLE)


@pytest.mark.parametrize(("start", "count"), SLICES)
def test_a_slice_of_normals_equals_that_slice_of_the_whole(whole: Any, start: int, count: int) -> None:
    assert torch.equal(normal(1234, "layers.3.mlp.up.weight", start, count), whole[start : start + count])


def test_a_block_of_a_matrix_can_be_drawn_without_the_rest(whole: Any) -> None:
    rows, columns = torch.arange(17, 40)[:, None], torch.arange(33, 50)
    block = normal_at(1234, "layers.3.mlp.up.weight", rows * 1001 + columns)
    assert torch.equal(block, whole[: 299 * 1001].view(299, 1001)[17:40, 33:50])


def test_normals_do_not_depend_on_the_number_of_threads(whole: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        assert torch.equal(normal(1234, "layers.3.mlp.up.weight", 0, WHOLE), whole)
    finally:
        torch.set_num_threads(before)


def test_normals_have_the_moments_of_a_normal(whole: Any) -> None:
    """Each within five of its standard errors: sqrt(1, 2, 15, 96 / n)."""
    z = whole.double()
    for power, (expected, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs(z.pow(power).mean() - expected) < 5 * math.sqrt(variance / WHOLE), power
    assert 4 < z.abs().max() < 6.5


def test_normals_are_distributed_normally(whole: Any) -> None:
    """Kolmogorov-Smirnov: the largest distance of the distributions is under 1.95 / sqrt(n), its 99.9th percentile."""
    ideal = torch.special.ndtr(whole.double().sort().values)
    steps = torch.arange(1, WHOLE + 1, dtype=torch.float64) / WHOLE
    assert (ideal - steps).abs().max() < 1.95 / math.sqrt(WHOLE)


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 768, 65_536])
def test_normals_at_different_positions_are_independent(whole: Any, lag: int) -> None:
    z = whole.double()
    for one, other in ((z[:-lag], z[lag:]), (z[:-lag].square() - 1, z[lag:].square() - 1)):
        assert abs((one * other).mean()) < 5 * 2 / math.sqrt(WHOLE)


@pytest.mark.parametrize("other", [(1235, "layers.3.mlp.up.weight"), (1234, "layers.4.mlp.up.weight"), (1234, "layers.3.mlp.up.weighs")])
def test_another_seed_or_name_draws_independent_normals(whole: Any, other: tuple[int, str]) -> None:
    drawn = normal(*other, 0, WHOLE)
    assert abs((drawn.double() * whole.double()).mean()) < 5 / math.sqrt(WHOLE)


def test_the_hash_is_splitmix64() -> None:
    """The first output of the generator seeded with 0 (https://prng.di.unimi.it/splitmix64.c)."""
    golden = torch.tensor([0x9E3779B97F4A7C15 - 2**64])
    assert splitmix64(golden).item() % 2**64 == 0xE220A8397B1DCDAF


def test_the_numbers_drawn_are_always_the_same() -> None:
    """The numbers of the first version: with others no run could be resumed."""
    assert hash64(1, "embedding.weight") == 8355011001159534486
    drawn = [each.hex() for each in normal(1, "embedding.weight", 0, 4).tolist()]
    assert drawn == ["0x1.e97f320000000p-8", "-0x1.5c19c60000000p+0", "0x1.08fb020000000p+0", "-0x1.f3c57e0000000p-1"]
    mask = dropout_mask(states(1, 2), 32, 0.5).int()[0]
    assert ["".join(map(str, row)) for row in mask.tolist()] == ["10011110100001011001001010000111", "00011101001111100100111111100001"]


def position_of(hashed: int, seed: int, name: str) -> int:
    """The position at which the hash of a name is this: SplitMix64 backwards."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 0x9E3779B97F4A7C15)):
        word = hashed
        for _ in range(64 // shift):
            word = hashed ^ word >> shift
        hashed = (word - (hash64(seed, name) if shift == 30 else 0)) * pow(factor, -1, 2**64) % 2**64
    return hashed - 2**64 if hashed >> 63 else hashed


def test_the_smallest_and_the_largest_normals_are_finite_and_mirrored() -> None:
    """At the multiples 1 and -1, and the first and last, of 2^-53; near 0 the inverse of the distribution is a line."""
    ends = torch.tensor([position_of(hashed % 2**64, 5, "w") for hashed in (0, -1, -(2**63), 2**63 - 1)])
    above, below, first, last = normal_at(5, "w", ends).tolist()
    assert (above, below) == pytest.approx((math.sqrt(math.pi / 2) * 2**-53, -math.sqrt(math.pi / 2) * 2**-53), rel=1e-6)
    assert -first == last == pytest.approx(-torch.special.ndtri(torch.tensor(2**-54, dtype=torch.float64)).item(), rel=1e-6)


def test_a_gpu_draws_more_positions_at_a_time_than_fit_a_cores_cache() -> None:
    assert _chunk(torch.device("cuda")) > _chunk(torch.device("cpu")) == _chunk(None) > 0


def test_splitting_a_batch_does_not_change_the_dropout_mask() -> None:
    x = torch.ones(4, 16, 24)
    whole = dropout(x, 0.3, states())
    for index in range(4):
        alone = dropout_keys(1, 3, torch.tensor([index]), torch.arange(16)).states
        assert torch.equal(dropout(x[:1], 0.3, alone)[0], whole[index])


def test_splitting_a_sequence_does_not_change_the_dropout_mask() -> None:
    x = torch.ones(4, 16, 24)
    part = dropout_keys(1, 3, torch.arange(4), torch.arange(8, 16)).states
    assert torch.equal(dropout(x[:, 8:], 0.3, part), dropout(x, 0.3, states())[:, 8:])


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_drops_elements_with_its_probability(p: float) -> None:
    """Over all elements within five standard errors; in the worst of 1024 rows and of 512 columns within six."""
    mask = dropout_mask(states(16, 64).flatten(), 512, p).double()
    deviation = math.sqrt(p * (1 - p))
    assert abs(mask.mean() - p) < 5 * deviation / math.sqrt(mask.numel())
    assert (mask.mean(1) - p).abs().max() < 6 * deviation / math.sqrt(512)
    assert (mask.mean(0) - p).abs().max() < 6 * deviation / math.sqrt(1024)


def test_the_masks_of_different_rows_are_independent() -> None:
    """Of 1024 rows each two are as alike as chance has it: the mean square of their correlations is 1 / elements to 1 %, which
    a mask of a row's and a column's bits put together by + or ^ would miss; nor is any pair far off."""
    mask = dropout_mask(states(16, 64).flatten(), 2048, 0.5).double() * 2 - 1
    alike = mask @ mask.T / math.sqrt(2048)
    off = alike[~torch.eye(len(alike), dtype=torch.bool)]
    assert abs(off.square().mean() - 1) < 0.01
    assert off.abs().max() < 6


def test_masks_of_different_seeds_steps_layers_and_sites_are_independent() -> None:
    drawn = [dropout_mask(splitmix64(states(8, 64, seed=seed, step=step) + hash64(layer, site)), 256, 0.5)
             for seed, step, layer, site in [(1, 3, 0, "a"), (2, 3, 0, "a"), (1, 4, 0, "a"), (1, 3, 1, "a"), (1, 3, 0, "b")]]  # fmt: skip
    for index, one in enumerate(drawn):
        for other in drawn[:index]:
            assert abs((one == other).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(one.numel())


def test_the_dropout_sites_of_a_model_are_always_the_same() -> None:
    """Those of the first version: with others no run with dropout could be resumed."""
    run = load_recipe("quickstart", ["model.layers=2", "model.dropout=0.1", "cluster=1x1"])
    module = build_model(run, device=torch.device("meta"), dtype=torch.float32, seed=None)
    found = {name: each.address for name, each in module.named_modules() if isinstance(each, Dropout)}
    sites = {"dropout": (-1, "embedding")}
    for layer in range(2):
        sites |= {
            f"layers.{layer}.attention.dropout": (layer, "attention"),
            f"layers.{layer}.dropout1": (layer, "attention.residual"),
            f"layers.{layer}.dropout2": (layer, "mlp.residual"),
        }
    assert found == {name: hash64(*site) for name, site in sites.items()}
    assert hash64(-1, "embedding") == -9042688248722893376


def test_dropout_preserves_the_mean_and_scales_the_gradient_by_its_mask() -> None:
    x = torch.full((4, 16, 256), 3.0, requires_grad=True)
    y = dropout(x, 0.25, states())
    assert set(y.unique().tolist()) == {0.0, 4.0}
    assert abs(y.mean() - 3) < 0.1
    y.sum().backward()
    assert torch.equal(x.grad, y.detach() / 3)


def test_a_state_s_words_are_those_of_its_memory() -> None:
    given = torch.tensor([0, 1, -1, 1 << 31, -(1 << 31), (1 << 32) - 1, 1 << 32, (1 << 63) - 1, -(1 << 63), 0x0123456789ABCDEF])
    words = given[:, None].view(torch.int32)
    assert torch.equal(low_word(given), words[:, 0])
    assert torch.equal(high_word(given), words[:, 1])
