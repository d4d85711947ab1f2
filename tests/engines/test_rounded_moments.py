"""A step of moments in bf16: weights step with the moments as they are before they are rounded, and workers average them in float32."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from distrain.cli.config.load import load_recipe  # noqa: E402
from distrain.tests.fakes.rounded_states import RoundedOptimizer, round_moment  # noqa: E402
from distrain.trainer.engines.held_bytes import tensors_in  # noqa: E402
from distrain.trainer.engines.native.data_parallel import worker_average  # noqa: E402
from distrain.trainer.engines.native.muon import MuonStep  # noqa: E402
from distrain.trainer.engines.native.rounded_moments import MOMENTUM, MomentRounding, step_adamw, step_sgd  # noqa: E402
from distrain.trainer.engines.quantized_moment import QuantizedMoment  # noqa: E402
from distrain.trainer.loop.reference_curves.reference_run import plain_optimizer  # noqa: E402
from distrain.trainer.plan.native.optimizer_step import QUANTIZING_BYTES  # noqa: E402

NAME, ROWS, COLUMNS = "weight", 6, 50


ROUNDINGS = ("nearest", "stochastic", "int8")


def run_of(name: str, rounding: str) -> Any:
    muon = SimpleNamespace(momentum=0.9, nesterov=True)
    moments, rounding = ("int8", "stochastic") if rounding == "int8" else ("bf16", rounding)
    optim = SimpleNamespace(
        name=name, moments=moments, rounding=rounding, lr=0.5, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1, momentum=0.9, muon=muon
    )
    return SimpleNamespace(train=SimpleNamespace(seed=3), optim=optim)


class OneWeight:
    """A bucket of one weight."""

    def __init__(self, values: Any, *, matrices: bool = False) -> None:
        self.master, self.kind = torch.nn.Parameter(values.clone().flatten(), requires_grad=False), SimpleNamespace(matrices=matrices)
        shape = (ROWS, COLUMNS)
        shard = SimpleNamespace(name=NAME, shape=shape, offset=(0, 0), length=shape, size=shape)
        self.pieces = [SimpleNamespace(row=SimpleNamespace(shard=shard), start=0, offset=0, length=ROWS * COLUMNS)]


def kept_values(held: Any) -> Any:
    return held.widen_part(0, ROWS * COLUMNS) if isinstance(held, QuantizedMoment) else held.float()


def differing_share(found: Any, expected: Any) -> float:
    """The share of numbers that are rounded otherwise: neighbours are 4e-3 apart in bf16, and 7e-3 of the largest of a block in 8 bits."""
    return float(((found - expected).abs() > 1e-4 * expected.abs()).float().mean())


def gradients() -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, COLUMNS, generator=draw) for _ in range(4)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_part_steps_as_the_optimizer_of_few_lines(name: str, rounding: str) -> None:
    """At a rate at which a rounded moment's step would be a thousandth off; all moments are equal."""
    run, values = run_of(name, rounding), torch.ones(ROWS, COLUMNS)
    module = torch.nn.ParameterDict({NAME: values.clone()})
    plain, rounded = RoundedOptimizer(run, module), MomentRounding(run)
    bucket: Any = OneWeight(values)
    optimizer: Any = SimpleNamespace(state={bucket.master: {}})
    rounded.make_states(optimizer, [bucket])
    state, group = optimizer.state[bucket.master], vars(run.optim)
    for gradient in gradients():
        module[NAME].grad = gradient
        plain.step()
        for part in rounded.parts(bucket, state["step"] + 1, 64):
            own, divisor = gradient.flatten()[part.place] * 4, torch.tensor(4.0)
            if name == "sgd":
                step_sgd(part, bucket.master.data, own, state, group, divisor)
            else:
                step_adamw(part, bucket.master.data, own, state, group, divisor=divisor, skip=torch.tensor(0.0))
        state["step"] += 1
    assert torch.allclose(bucket.master, module[NAME].flatten(), rtol=0, atol=2e-6)
    for (kind, _), moment in plain.moments().items():
        assert differing_share(kept_values(state[kind]), moment.flatten()) < 0.02
    with torch.no_grad():
        before, kept = bucket.master.clone(), [each.clone() for each in tensors_in(state)]
        if name == "adamw":  # nothing changes where a number is not finite
            for part in rounded.parts(bucket, state["step"] + 1, 64):
                own = torch.full_like(bucket.master.data[part.place], torch.inf)
                step_adamw(part, bucket.master.data, own, state, group, divisor=divisor, skip=torch.tensor(1.0))
            assert torch.equal(bucket.master, before)
            assert all(torch.equal(one, other) for one, other in zip(tensors_in(state), kept, strict=True))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizer_of_simulated_curves_rounds_as_that_of_few_lines(name: str, rounding: str) -> None:
    kept = ("optim.moments=int8",) if rounding == "int8" else (f"optim.rounding={rounding}", "optim.moments=bf16")
    words = (f"optim.name={name}", "optim.momentum=0.9", *kept, "optim.lr=0.5")
    run = load_recipe("quickstart", words)
    values = torch.ones(ROWS, COLUMNS)
    module, weights = torch.nn.ParameterDict({NAME: values.clone()}), {NAME: torch.nn.Parameter(values.clone())}
    plain, optimizer = RoundedOptimizer(run, module), plain_optimizer(run, weights)
    for gradient in gradients():
        module[NAME].grad, weights[NAME].grad = gradient, gradient.clone()
        plain.step()
        optimizer.step()
    for (kind, _), moment in plain.moments().items():
        found = optimizer.state[weights[NAME]][kind]
        assert rounding == "int8" or torch.equal(found, found.bfloat16().float())
        assert differing_share(found, moment) < 0.02
    assert torch.allclose(weights[NAME], module[NAME], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rounding", ["stochastic", "int8"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muons_update_is_that_of_momenta_before_they_are_rounded(nesterov: bool, rounding: str) -> None:
    run = run_of("muon", rounding)
    run.optim.muon.nesterov = nesterov
    bucket: Any = OneWeight(torch.ones(ROWS, COLUMNS), matrices=True)
    optimizer: Any = SimpleNamespace(state={bucket.master: {}})
    rounded = MomentRounding(run)
    rounded.make_states(optimizer, [bucket])
    step: Any = SimpleNamespace(_states=optimizer.state | {bucket: optimizer.state[bucket.master]}, _optim=run.optim)
    momentum = torch.zeros(ROWS, COLUMNS)
    for taken, gradient in enumerate(gradients(), start=1):
        momentum = momentum + 0.1 * (gradient - momentum)
        expected = gradient + 0.9 * (momentum - gradient) if nesterov else momentum
        found = MuonStep._update_in_parts(step, rounded, bucket, gradient.flatten().clone())
        assert torch.allclose(found, expected.flatten(), rtol=0, atol=1e-6)
        momentum = round_moment(run, NAME, momentum, taken, 0)
        found = kept_values(optimizer.state[bucket.master][MOMENTUM]).view_as(momentum)
        assert differing_share(found, momentum) < 0.02
        momentum = found


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, while they live, and their most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(each) for each in tensors_in([args, kwargs])}
        made = operator(*args, **(kwargs or {}))
        for each in tensors_in([made]):
            if (key := id_of(each)) not in given and key not in self.known:
                storage = each.untyped_storage()
                self.known.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.forget, key, storage.nbytes())
        return made

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def id_of(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


@pytest.mark.parametrize(("name", "each"), [("adamw", 8 + QUANTIZING_BYTES), ("sgd", 4 + QUANTIZING_BYTES)])
def test_a_part_in_8_bits_takes_the_planned_bytes_for_a_moment(name: str, each: int) -> None:
    """Beside numbers of a block, which are few."""
    run, weights, length = run_of(name, "int8"), torch.ones(2**14), 2**14
    bucket: Any = OneWeight(weights)
    bucket.pieces = [SimpleNamespace(offset=0, length=length)]
    rounded, optimizer = MomentRounding(run), SimpleNamespace(state={bucket.master: {}})
    rounded.make_states(cast("Any", optimizer), [bucket])
    state, own = optimizer.state[bucket.master], torch.ones(length)
    divisor, skip = torch.tensor(1.0), torch.tensor(0.0)
    for counted in (LiveBytes(), LiveBytes()):  # the first makes the tables
        (part,) = rounded.parts(bucket, state["step"] + 1, length)
        with counted:
            if name == "sgd":
                step_sgd(part, bucket.master.data, own, state, vars(run.optim), divisor)
            else:
                step_adamw(part, bucket.master.data, own, state, vars(run.optim), divisor=divisor, skip=skip)
    assert each * length <= counted.most <= each * length * 1.01


def test_workers_average_moments_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three workers: a sum in bfloat16 would be 3.0 or 3.015625, and its mean 1.0 or 1.0078125."""
    others = torch.tensor([1.0 + 2**-7, 1.0 + 2**-6])

    def add(flat: Any, group: Any) -> None:
        assert flat.dtype == torch.float32
        flat += others.sum()

    monkeypatch.setattr("torch.distributed.all_reduce", add)
    own = [torch.full((3,), 1.0, dtype=torch.bfloat16), torch.full((2,), 1.0, dtype=torch.bfloat16)]
    group: Any = SimpleNamespace(handle=None, size=3)
    worker_average._replace_by_mean(own, group)
    assert torch.cat(own).tolist() == [1 + 2**-7] * 5
    worker_average._replace_by_mean(own[:1], group)
    assert own[0].tolist() == [1 + 2**-7] * 3
