"""The loss by the passes of a GPU's kernels: its numbers, where it writes, the code that torch's compiler makes, and where that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from distrain.tests.fakes.deadline import LONG_DEADLINE  # noqa: E402
from distrain.tests.fakes.inductor_settings import INDUCTOR  # noqa: E402
from distrain.trainer.layers import cross_entropy as entropy  # noqa: E402
from distrain.trainer.layers import loss_kernels  # noqa: E402
from distrain.trainer.layers.chunked_loss import chunked_token_losses  # noqa: E402
from distrain.trainer.layers.cross_entropy import IGNORED, cross_entropy  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, dtype

PROGRAM = Path(__file__).parents[1] / "rank_programs" / "compiled_loss.py"
KINDS = (torch.float32, torch.bfloat16)
COMPILED = {torch.float32: 2, torch.bfloat16: 1}  # vocabularies, each with two numbers of rows
PASSES = ("row_statistics_by_parts", "write_gradient")
EITHER_KIND = pytest.mark.parametrize("kind", KINDS)
B, S, V = 2, 40, 64
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the compiler is found on Linux")


def logits_and_labels(kind: dtype, width: int) -> tuple[Tensor, Tensor]:
    """Logits of which no exponential is finite in float32, larger ones of padding, and labels of which some are ignored."""
    draw = torch.Generator().manual_seed(width)
    logits = 3 * torch.randn(B, S, V, generator=draw) + 100
    logits[..., width:] += 100
    labels = torch.randint(width, (B, S), generator=draw)
    labels[0, :3] = torch.tensor([0, width - 1, IGNORED])
    labels[1, 20:] = IGNORED
    return logits.to(kind), labels


def loss_and_gradient(logits: Tensor, labels: Tensor, width: int, *, keep_logits: bool = False) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of twice the loss with a z-loss. The logits may change."""
    given = logits.detach().requires_grad_()
    loss = cross_entropy(given, labels, width, z_loss=0.01, keep_logits=keep_logits)
    return loss.detach(), torch.autograd.grad(2 * loss, given)[0]


@EITHER_KIND
@pytest.mark.parametrize("width", [V, V - 1, 33])
@pytest.mark.parametrize("keep_logits", [False, True])
def test_the_kernels_passes_give_the_loss_and_the_gradient_of_the_path_in_chunks(
    keep_logits: bool, width: int, kind: dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = logits_and_labels(kind, width)
    before = logits.clone()
    monkeypatch.setitem(entropy._CHUNK, "cpu", 7 * V)
    wanted, wanted_gradient = loss_and_gradient(logits, labels, width)
    assert torch.equal(logits, before)
    monkeypatch.setattr(loss_kernels, "has_loss_kernels", lambda device: True)
    loss, gradient = loss_and_gradient(logits, labels, width, keep_logits=keep_logits)
    assert loss.dtype == torch.float32
    assert gradient.dtype == kind
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    rounding = 8e-6 if kind == torch.float32 else 2**-7  # the last bit of log sums of 100 is 7.6e-6
    torch.testing.assert_close(gradient, wanted_gradient, rtol=rounding, atol=1e-9)
    assert (gradient[..., width:] == 0).all()
    assert (gradient[labels == IGNORED] == 0).all()
    assert torch.equal(logits, before if keep_logits else gradient)


@EITHER_KIND
@pytest.mark.parametrize("centre", [-90, 0, 90])
def test_rows_by_parts_have_the_statistics_of_whole_rows(centre: int, kind: dtype) -> None:
    """Of 768 logits the second part of 384 is padding alone, or the last third of it."""
    draw = torch.Generator().manual_seed(centre)
    logits = (4 * torch.randn(6, 768, generator=draw) + centre).to(kind)
    labels = torch.randint(-300, 900, (6,), generator=draw)
    for width in (300, 640, 768):
        found, wanted = (passes(logits, labels, width) for passes in (loss_kernels.row_statistics_by_parts, loss_kernels.row_statistics))
        assert torch.equal(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1], rtol=2e-6, atol=0)
        assert torch.equal(found[2], wanted[2])


def test_a_second_backward_pass_over_overwritten_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernels, "has_loss_kernels", lambda device: True)
    logits, labels = logits_and_labels(torch.float32, V)
    loss = cross_entropy(logits.requires_grad_(), labels, V)
    torch.autograd.grad(loss, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits)


def test_a_gpu_with_triton_has_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [True]
    monkeypatch.setattr(loss_kernels, "find_spec", lambda name: found[0] or None)
    assert loss_kernels.has_loss_kernels(torch.device("cuda", 1))
    assert not loss_kernels.has_loss_kernels(torch.device("cpu"))
    found[0] = False
    assert not loss_kernels.has_loss_kernels(torch.device("cuda"))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice between kernels and chunks is that of a GPU with triton, where nothing has failed yet."""
    has_kernels = loss_kernels.has_loss_kernels
    monkeypatch.setattr(loss_kernels, "find_spec", lambda name: name == "triton")
    monkeypatch.setattr(loss_kernels, "has_loss_kernels", lambda device: has_kernels(torch.device("cuda")))
    monkeypatch.setattr(loss_kernels, "_broken", [])


def fail_with(error: Exception, tried: list[object]) -> Any:
    """Return a pass of the loss that raises an error, and notes that it ran."""

    def fails(*_: object) -> None:
        tried.append(error)
        raise error

    return fails


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", PASSES)
def test_where_the_compiler_fails_the_loss_is_made_in_chunks_from_then_on(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logits, labels = logits_and_labels(torch.bfloat16, 50)
    before, tried = logits.clone(), list[object]()
    with monkeypatch.context() as plain:
        plain.setattr(loss_kernels, "has_loss_kernels", lambda device: False)
        wanted = loss_and_gradient(logits, labels, 50)
    monkeypatch.setattr(loss_kernels, name, fail_with(ValueError("no code for this GPU"), tried))
    for _ in range(3):
        found = loss_and_gradient(logits, labels, 50)
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-9)
        assert torch.equal(logits, before)
    assert len(tried) == 1
    said = "torch's compiler can't make the loss's kernels (no code for this GPU): separate kernels move more bytes\n"
    assert tuple(capsys.readouterr()) == ("", said)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", PASSES)
def test_where_the_compiler_fails_a_loss_in_chunks_of_the_vocabulary_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, labels = torch.randn(B, S, 16), torch.randn(16, V), logits_and_labels(torch.float32, 50)[1]

    def gradients() -> tuple[Tensor, ...]:
        given = x.clone().requires_grad_(), weight.clone().requires_grad_()
        found: tuple[Tensor, ...] = torch.autograd.grad(chunked_token_losses(*given, labels, 50, None, 4, transposed=False).sum(), given)
        return found

    with monkeypatch.context() as plain:
        plain.setattr(loss_kernels, "has_loss_kernels", lambda device: False)
        wanted = gradients()
    written, tried = getattr(loss_kernels, name), list[object]()

    def fails_once(*given: Any) -> Any:  # the path without kernels computes the same statistics
        tried.append(given)
        return written(*given) if len(tried) > 1 else fail_with(ValueError("no code for this GPU"), [])()

    monkeypatch.setattr(loss_kernels, name, fails_once)
    torch.testing.assert_close(gradients(), wanted)
    assert tried
    assert loss_kernels._broken == ["no code for this GPU"]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", PASSES)
def test_a_gpu_out_of_memory_is_no_failure_of_the_compiler(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (logits, labels), tried = logits_and_labels(torch.bfloat16, 50), list[object]()
    monkeypatch.setattr(loss_kernels, name, fail_with(torch.OutOfMemoryError("CUDA out of memory"), tried))
    for number in (1, 2):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            loss_and_gradient(logits, labels, 50)
        assert len(tried) == number
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """The answers of a process of its own: the tests' own one has put torch's compiler out of use."""
    known = {**os.environ, **INDUCTOR, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "0"}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=known, capture_output=True, text=True, timeout=LONG_DEADLINE)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(KINDS) + 1, done.stderr[-3000:]
    return lines


@LINUX
@EITHER_KIND
def test_the_compiled_passes_give_what_is_written(kind: dtype, answers: list[dict[str, Any]]) -> None:
    """Numbers of a row, of about 100, in float32; the gradient may round to the other neighbour."""
    apart = answers[KINDS.index(kind)]["apart"]
    assert apart["statistics"] <= 1e-6
    assert apart["gradient"] <= (1e-6 if kind == torch.float32 else 2**-8)


@LINUX
@EITHER_KIND
def test_the_compiled_gradient_is_one_kernel_that_moves_each_logit_once(kind: dtype, answers: list[dict[str, Any]]) -> None:
    kernels = answers[KINDS.index(kind)]["kernels"]
    assert kernels == [{"kernels": 1, "loads": 1, "stores": 1, "buffers": 1}] * COMPILED[kind]


@LINUX
@EITHER_KIND
def test_a_vocabulary_is_compiled_once_for_any_number_of_rows(kind: dtype, answers: list[dict[str, Any]]) -> None:
    assert answers[KINDS.index(kind)]["graphs"] == {"statistics": COMPILED[kind], "gradient": COMPILED[kind]}


@LINUX
def test_without_a_working_compiler_the_loss_says_so_once_and_is_made_in_chunks(answers: list[dict[str, Any]]) -> None:
    found = answers[-1]
    assert found["apart"] == 0
    assert found["tried"] == ["row_statistics_by_parts"]
    assert [line.split(" (")[0] for line in found["said"]] == ["torch's compiler can't make the loss's kernels"]
