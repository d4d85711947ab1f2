"""Reads the code of a run's compiled layers for an H100 or H200, on a machine without a GPU: of each kernel that torch makes, the
bytes that it moves, the instructions that it executes, and the longer of the seconds of both; their sums, beside what the plan takes.

    python -m distrain.scripts.trace_cuda.layer_code llama3_8b_1node model.layers=1 engine=native [key=value ...]

Run `pip install --no-deps triton==3.7.1` once. The run's layers are rank 0's; one, or one group, has the graphs of all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

from ...cli.config.load import load_recipe
from ...trainer.plan.costs.cost_context import CostContext
from ...trainer.plan.costs.op_seconds import OpSeconds
from ...trainer.plan.layout_cost import layout_split
from ...trainer.plan.layout_of_run import layout_of_run
from ...trainer.spec.run import Run
from ..show_help import show_help
from .device_guard import NoGuard, load_device_guard
from .kernel_calls import ISSUED, Graph


@dataclass(frozen=True, kw_only=True)
class PassSums:
    """Bytes that a layer's kernels bound by memory move in a pass, and their seconds."""

    bytes: float
    seconds: float


def planned_sums(run: Run) -> tuple[PassSums, PassSums, float]:
    """Return what the plan takes for those kernels of a layer, forward and backward, without launches, and the device's bytes/s."""
    context = CostContext(run)
    layout = layout_of_run(context, run.parallel, run.train.microbatch)
    costs = context.split_costs(layout_split(layout), layout.wires)
    assert costs.device is not None
    device, row, total = replace(costs.device, launch=0.0), costs.layer, [0.0, 0.0]
    for op in row.ops:
        parts = costs.op_parts(op, row.local, device)
        own = parts.own if op.product is None else OpSeconds(0.0, 0.0, 0.0)
        total[0] += own.forward + parts.casts.forward
        total[1] += sum(own[1:]) + sum(parts.casts[1:])
        biases = [each for each in op.weights if op.product and each.name.endswith(".bias") and not each.frozen]
        rows = row.local.count(op.product.rows) if op.product else 0
        total[1] += row.local.activation * rows * sum(row.local.count(each.dims) for each in biases) / device.memory
    forward, backward = (PassSums(bytes=each * device.memory, seconds=each) for each in total)
    return forward, backward, device.memory


def pass_lines(name: str, graphs: tuple[Graph, ...], planned: PassSums, bandwidth: float) -> Iterator[str]:
    """Yield a line for each kernel of a pass, and its sums."""
    yield f"{name:<9}{'read MB':>9}{'written':>9}{'load':>6}{'store':>6}{'spills':>7}{'us':>8}{'/ bytes':>9}  kernel"
    calls = [call for graph in graphs for call in graph.calls]
    for call in calls:
        read, written = (sum(each.values()) / 1e6 for each in (call.reads, call.writes))
        seconds, code = call.seconds(bandwidth), call.code
        executed = code.executed / ISSUED / (call.bytes / bandwidth) if call.bytes else 0.0
        widths = f"{code.load:>4} B{code.store:>4} B{code.spills:>7}"
        yield f"{'':<9}{read:>9.1f}{written:>9.1f}{widths}{1e6 * seconds:>8.1f}{executed:>9.2f}  {call.name.removeprefix('triton_')[:60]}"
    moved, again = sum(call.bytes for call in calls), sum(graph.read_again for graph in graphs)
    seconds = sum(call.seconds(bandwidth) for call in calls)
    others = ", ".join(f"{many} {other}" for graph in graphs for other, many in graph.others.items())
    sums = f"{moved / 1e6:,.0f} MB, of which {again / 1e6:,.0f} read again; {1e6 * seconds:,.0f} us"
    yield f"{'':<9}{len(graphs)} graphs, {len(calls)} kernels; {sums}"
    yield f"{'':<9}planned {planned.bytes / 1e6:,.0f} MB, {1e6 * planned.seconds:,.0f} us"
    yield f"{'':<9}calls {others}"


def main() -> int:
    """Print the kernels of a run's layers."""
    if find_spec("triton") is None:
        sys.exit("triton is missing: pip install --no-deps triton==3.7.1")
    if len(sys.argv) < 2:
        print("give a recipe and overrides", file=sys.stderr)
        return 2
    run = load_recipe(sys.argv[1].removeprefix("conf="), ["train.compile=true", *sys.argv[2:]])
    forward, backward, bandwidth = planned_sums(run)
    try:
        load_device_guard()
    except NoGuard as error:
        sys.exit(f"fake CUDA tensors: {error}")
    from .layer_kernels import layer_kernels

    found = layer_kernels(run)
    for line in (*pass_lines("forward", found.forward, forward, bandwidth), *pass_lines("backward", found.backward, backward, bandwidth)):
        print(line)
    sys.stdout.flush()
    os._exit(0)  # threads of autograd abort where fake tensors were on a GPU


if __name__ == "__main__":
    show_help(__doc__)
    raise SystemExit(main())
