"""Torch's optimizers as engines make them: a step holds no tensor beside weights, gradients and moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.scripts.trace_cuda.live_bytes import LiveBytes  # noqa: E402
from distrain.trainer.engines.rank_parameter import optimizer_state  # noqa: E402
from distrain.trainer.engines.torch_optimizer import optimizer_of_groups, torch_optimizer  # noqa: E402
from distrain.trainer.plan.costs.precision import moment_count  # noqa: E402
from distrain.trainer.rundir.effective_values import moment_kinds  # noqa: E402
from distrain.trainer.spec.sections.optimizer import Optim  # noqa: E402

QUICKSTART = load_recipe("quickstart")


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


def test_the_states_of_an_optimizer_that_a_resume_would_leave_out_are_asked_for() -> None:
    """A resume fills what is there before the first step; what RMSprop creates in it would silently begin anew."""
    weight = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(TypeError, match="the states of RMSprop before its first step"):
        optimizer_state(torch.optim.RMSprop([weight]), weight)


@pytest.mark.parametrize("read", [moment_count, moment_kinds, lambda optim: optimizer_of_groups(replace(QUICKSTART, optim=optim), [])])
def test_an_optimizer_that_is_in_no_table_is_not_taken_for_another(read: Callable[[Optim], object]) -> None:
    with pytest.raises(AssertionError, match="lion"):
        read(Optim(name="lion"))  # type: ignore[arg-type]
