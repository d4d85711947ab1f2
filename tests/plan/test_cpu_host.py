"""What a plan counts of a CPU as its own host: Python and autograd take turns with kernels, in the passes and in the optimizer's step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.models.families import op_table
from distrain.trainer.plan.costs.cost_context import CostContext
from distrain.trainer.plan.layout.mesh import Mesh
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import StepTime
from distrain.trainer.plan.search.split_arrays import merged_wire
from distrain.trainer.spec.run import Device, Run
from distrain.trainer.spec.sections.cluster import Link

DISPATCH = 1e-5
CPU = Device(name="cpu", kind="cpu", memory=8e9, bandwidth=12e9, peak={"fp32": 52e9}, launch=0.0, dispatch=0.0, streaming=1.0)
WORDS = ("model=tiny", "train.seq=16", "train.microbatch=1", "train.batch=8")
TENSORS = 4 * 16 + 2 + 2 + 1  # of the layers, the embedding and the positions, the last norm, the head, which the plan counts with them


def run_on(device: Device, *words: str) -> Run:
    run = load_recipe("quickstart", [*WORDS, *words])
    return replace(run, cluster=replace(run.cluster, device=device, inside=Link(bandwidth=1e9, latency=1e-5, efficiency=1.0)))


def operators(*words: str) -> dict[str, float]:
    """Return the seconds that the host adds to each part of a step, in operators."""
    times: list[StepTime] = []
    for seconds in (0.0, DISPATCH):
        found = make_plan(run_on(replace(CPU, dispatch=seconds), *words)).time
        assert found is not None
        times.append(found)
    without, having = times
    return {part: (getattr(having, part) - getattr(without, part)) / DISPATCH for part in StepTime.__dataclass_fields__}


def test_a_micro_batch_takes_its_kernels_three_times() -> None:
    """Once in forward and twice in backward, each in addition to what it computes; four micro-batches on a rank."""
    table = op_table(run_on(CPU))
    kernels = sum(op.kernels for op in table.embedding + table.head) + 4 * sum(op.kernels for op in table.layer)
    assert operators("engine=native")["compute"] == pytest.approx(4 * 3 * kernels)


def test_deepspeed_s_hooks_take_time_for_each_weight() -> None:
    found = [operators(f"engine={engine}")["compute"] for engine in ("native", "zero")]
    assert found[1] - found[0] == pytest.approx(4 * 3 * TENSORS)


@pytest.mark.parametrize(
    ("words", "once", "each"),
    [
        (("engine=native",), 25, 0.3),
        (("engine=zero", "parallel.zero=0"), 15, 0.5),
        (("engine=zero", "parallel.zero=1"), 55 + 40, 0.8),
        (("engine=zero", "parallel.zero=1", "cluster.gpus=1"), 55, 0.8),
        (("engine=zero", "parallel.zero=3"), 50 + 40, 2.4),
    ],
)
def test_an_optimizer_step_takes_python_once_and_for_each_tensor(words: tuple[str, ...], once: float, each: float) -> None:
    found = operators(*words)
    assert found["optimizer"] == pytest.approx(once + each * TENSORS)
    assert found["host"] == pytest.approx(30)
    assert found["step"] == pytest.approx(sum(found.values()) - found["step"])


def test_a_gpu_s_optimizer_step_does_not_wait_for_its_host() -> None:
    """What is not hidden there is planned once a step."""
    run = load_recipe("gpt2_124m_1gpu")
    device = run.cluster.device
    slow, fast = (make_plan(replace(run, cluster=replace(run.cluster, device=replace(device, dispatch=each)))).time for each in (6e-5, 0.0))
    assert slow is not None
    assert fast is not None
    assert slow.optimizer == fast.optimizer
    assert slow.host == pytest.approx(200 * 6e-5)
    assert fast.host == 0


def test_gloo_s_messages_are_planned_between_cpus_alone() -> None:
    """A ring takes as long for the gradients as for the weights, of as many bytes; torch's messages over gloo don't."""
    on_cpus, on_gpus = run_on(CPU, "engine=native"), load_recipe("llama3_8b_1node", ["engine=native", "parallel.zero=1"])
    shares = []
    for run in (on_cpus, on_gpus):
        seconds = {each.verb: each.seconds for each in make_plan(run).traffic if each.axis == "dp"}
        assert seconds["reduce_scatter"]
        assert seconds["all_gather"]
        shares.append(seconds["reduce_scatter"] / seconds["all_gather"])
    assert shares == [pytest.approx(3.3 / 1.3, rel=0.15), pytest.approx(1.0, rel=0.15)]  # each with its hop
    wires = [CostContext(run).wires(Mesh(dp=2)).data for run in (on_cpus, on_gpus)]
    assert [merged_wire([each, each]).by_gloo for each in wires] == [True, False]
