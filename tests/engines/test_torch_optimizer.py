"""Torch's optimizers as engines make them: a step holds no tensor beside weights, gradients and moments."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.scripts.trace_cuda.live_bytes import LiveBytes  # noqa: E402
from distrain.trainer.engines.torch_optimizer import torch_optimizer  # noqa: E402


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_makes_no_tensor_of_the_size_of_a_weight(name: str) -> None:
    """Weight decay of torch's SGD, where it is not fused, adds to a copy of the gradient: on a CPU new memory takes five times the step."""
    run = load_recipe("quickstart", [f"optim.name={name}", "optim.weight_decay=0.1", "optim.momentum=0.9"] if name == "sgd" else [])
    module = torch.nn.Linear(256, 256, bias=False)
    module.weight.grad = torch.ones_like(module.weight)
    optimizer = torch_optimizer(run, module)
    optimizer.step()  # makes the moments
    live = LiveBytes("cpu", block=1)
    with live:
        optimizer.step()
    assert live.peak < module.weight.nbytes
