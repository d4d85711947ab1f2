"""Dynamic block-wise quantization to 8 bits: its numbers, the nearest of them, and what widening and quantizing again keeps."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from distrain.tests.fakes.rounded_states import dynamic_numbers, quantize_moment  # noqa: E402
from distrain.trainer.layers.block_quantization import code_numbers, code_tables, nearest_codes, round_in_blocks  # noqa: E402

CPU = torch.device("cpu")
SIGNS = (True, False)

# fmt: off
# torchao 0.18 (torchao.optim.quant_utils.create_dynamic_map, a port of bitsandbytes): number of a code
TORCHAO = {
    True:  {0: -0.9929688, 1: -0.9789063, 64: -0.0985938, 126: -5.5e-7, 127: 0.0, 128: 5.5e-7, 129: 3.25e-6, 190: 0.0985938, 255: 1.0},
    False: {0: 0.0, 1: 3.25e-7, 2: 7.75e-7, 3: 2.125e-6, 126: 0.0992969, 127: 0.1035156, 254: 0.9964844, 255: 1.0},
}
# fmt: on


def draws(*, signed: bool, seed: int = 3) -> Any:
    """Gradients over ten decades, or their squares."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(5000, generator=draw) * 10 ** (-5 * torch.rand(5000, generator=draw))
    return values if signed else values**2


@pytest.mark.parametrize("signed", SIGNS)
def test_the_numbers_are_those_of_the_paper_and_of_torchao(signed: bool) -> None:
    numbers = code_numbers(signed=signed)
    assert numbers == pytest.approx(dynamic_numbers(signed=signed).tolist(), rel=1e-6, abs=1e-12)
    assert {code: numbers[code] for code in TORCHAO[signed]} == pytest.approx(TORCHAO[signed], rel=1e-5)


@pytest.mark.parametrize("signed", SIGNS)
def test_a_code_is_that_of_the_nearest_number(signed: bool) -> None:
    """At random, at each bound and on both sides of it; a square that is not 0 is not 0."""
    tables = code_tables(CPU, signed=signed)
    bounds = tables.bounds[:-1]
    upper = (bounds.view(torch.int32) >> 16) & 0xFFFF
    assert len(upper.unique()) == len(bounds)  # so the table of 16 bits is exact
    below, ends = torch.nextafter(bounds, torch.tensor(-2.0)), torch.tensor([-1.0, -0.0, 0.0, 1e-30, 1.0])
    values = torch.cat([torch.rand(20000, generator=torch.Generator().manual_seed(1)) * 2 - 1, bounds, below, ends])
    values = values if signed else values.abs()
    apart = (values[:, None].double() - tables.numbers.double()).abs()
    found = nearest_codes(values, tables).long()
    nearest = apart.min(1).values
    differs = apart.gather(1, found[:, None])[:, 0] > nearest + 2e-7 * values.abs()
    assert not differs[signed | (values > 2e-7)].any()
    assert signed or ((found == 0) == (values < torch.finfo(torch.float32).tiny)).all()


@pytest.mark.parametrize("signed", SIGNS)
def test_numbers_are_rounded_in_blocks_as_by_a_search_of_all(signed: bool) -> None:
    """5,000 numbers are 19 blocks and 136 more, each at most 1.5 % of its block's largest off, and half of that in the mean."""
    values, tables = draws(signed=signed), code_tables(CPU, signed=signed)
    found = round_in_blocks(values, 256, tables)
    assert torch.allclose(found, quantize_moment(values, signed=signed), rtol=1e-5, atol=0)
    largest = torch.cat([block.abs().max().expand(len(block)) for block in values.split(256)])
    assert float(((found - values).abs() / largest).max()) < 0.0075
    assert float((found - values).abs().max()) > 0


@pytest.mark.parametrize("signed", SIGNS)
def test_widened_numbers_are_quantized_to_the_same_bits(signed: bool) -> None:
    """Also where the largest is negative, of blocks of zeros, of one element, and of numbers near the smallest of float32."""
    tables, values = code_tables(CPU, signed=signed), draws(signed=signed, seed=5)
    values[:256] = 0
    values[256:512] *= 1e-32
    values[512:768] *= 2.0**-99 / values[512:768].abs().max()
    values[768:1024] = -values[768:1024].abs() if signed else values[768:1024]
    once = round_in_blocks(values, 256, tables)
    assert torch.equal(round_in_blocks(once, 256, tables), once)
    assert not once[:512].any()
    assert once[512:768].any()
    assert torch.equal(round_in_blocks(values[:1], 256, tables), values[:1])


def test_blocks_are_torchaos() -> None:
    """Codes and scales of torchao.optim, where the largest number of a block is positive, as of squares; but for squares that would be
    0."""
    quant = pytest.importorskip("torchao.optim.quant_utils")
    for signed in SIGNS:
        values = draws(signed=signed)[:4864]
        shares, scale = quant.scale_tensor(values, 256)
        numbers = torch.tensor(quant.create_dynamic_map(signed=signed))
        theirs = quant.dequant_with_qmap(quant.quantize_8bit_with_qmap(shares, numbers), numbers, scale)
        own = round_in_blocks(values, 256, code_tables(CPU, signed=signed))
        blocks = values.view(-1, 256)
        same = ((blocks.amax(-1) >= -blocks.amin(-1)).repeat_interleave(256)) & (theirs != 0)
        assert float(same.float().mean()) > 0.3
        assert torch.allclose(own[same], theirs[same], rtol=1e-6, atol=0)
