"""One rank compiles the layers of small models in several layouts, among ranks that send nothing. Prints a line of JSON for each layout:
how far gradients are from uncompiled ones, graph breaks, the operators of autograd functions' forwards that return the tensor of an output
once more, and where no graph breaks, graphs after two training steps and after an evaluation and one more step.

Graphs are traced, those of training are differentiated, and none is lowered to kernels: that takes minutes.
"""

from __future__ import annotations

import gc
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._dynamo.backends.registry import lookup_backend, register_backend
from torch._dynamo.utils import counters
from torch._functorch.autograd_function import autograd_function_apply
from torch.fx import GraphModule
from torch.library import Library
from torch.testing._internal.distributed.fake_pg import FakeStore

from distrain.cli.config.load import load_recipe
from distrain.trainer.layers.joined_products import JoinedWeights
from distrain.trainer.loop.build import build_parts, compile_layers
from distrain.trainer.loop.data.samples.batches import Batch
from distrain.trainer.loop.step.model_inputs import model_inputs
from distrain.trainer.parallel.process_groups import Grid, make_grid
from distrain.trainer.parallel.rank_model import head_shards
from distrain.trainer.parallel.world import World
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.spec.run import Run

SEQ = 32
WORDS = (
    "data=synthetic",
    f"train.seq={SEQ}",
    "train.steps=100",
    "train.microbatch=2",
    "parallel.zero=0",
    "parallel.dp=1",
    "model.layers=3",
)
repeated_outputs: list[str] = []


@register_backend
def checked_aot_eager(module: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile as torch's aot_eager does, an evaluation's graph not at all; note the repeated outputs."""
    repeated_outputs.extend(find_repeated_outputs(module))
    if not torch.is_grad_enabled():
        return module.forward
    compiled: Callable[..., Any] = lookup_backend("aot_eager")(module, inputs)
    return compiled


def find_repeated_outputs(module: GraphModule) -> Iterator[str]:
    """Yield the operators in autograd functions' forwards that return the very tensor of an output: torch 2.11 loses its gradient."""
    for graph in (each for each in module.modules() if isinstance(each, GraphModule)):
        for applied in graph.graph.find_nodes(op="call_function", target=autograd_function_apply):
            forward: Any = graph.get_submodule(str(applied.args[0].target)).graph
            outputs: Any = forward.output_node().args[0][0]  # beside what is saved
            for index in {user.args[1] for user in applied.users if user.target is operator.getitem}:
                output = outputs[index] if isinstance(outputs, tuple) else outputs
                for node in forward.nodes:
                    if node is not output and node.op != "placeholder" and node.meta.get("example_value") is output.meta["example_value"]:
                        yield f"{node.target} of {output.target}"


def compile_and_train(run: Run, grid: Grid) -> dict[str, Any]:
    """Train a rank's compiled layers, and compare with the same layers uncompiled; evaluate them too where they are whole graphs."""
    torch._dynamo.reset()
    counters.clear()
    repeated_outputs.clear()
    (part,) = build_parts(run, grid)
    module: Any = part.module
    expected = gradients(run, grid, module, 0)
    joined = sum(join_weights(each) for each in module.modules() if isinstance(each, JoinedWeights)) if run.parallel.tp == 1 else 0
    compile_layers(module, backend="checked_aot_eager")
    found = gradients(run, grid, module, 0)
    answer: dict[str, Any] = {
        "breaks": list(counters["graph_break"]),
        "repeated": sorted(set(repeated_outputs)),
        "apart": max((ours - theirs).abs().max().item() / theirs.abs().max().item() for ours, theirs in zip(found, expected, strict=True)),
    }
    if answer["breaks"]:
        return answer
    gradients(run, grid, module, 1)
    trained = counters["stats"]["unique_graphs"]
    module.eval()
    with torch.no_grad():
        tokens, labels, further = model_inputs(run, batch(run, 0), grid, None)
        module(tokens, labels, **further)
    module.train()
    gradients(run, grid, module, 2)
    later = {"breaks": list(counters["graph_break"]), "repeated": sorted(set(repeated_outputs))}
    return {**answer, **later, "trained": trained, "evaluated": counters["stats"]["unique_graphs"], "joined": joined}


def join_weights(module: JoinedWeights) -> bool:
    """Put a module's weights that share an input side by side, as engine native does, if they are alike; return whether they are."""
    weights = [layer.weight for layer in module.column_layers()][::-1]
    if not weights or any(each.shape != weights[0].shape for each in weights):
        return False
    module.joined = torch.stack([each.data for each in weights])
    for each, view in zip(weights, module.joined, strict=True):
        each.data = view
    return True


def gradients(run: Run, grid: Grid, module: Any, step: int) -> list[torch.Tensor]:
    """Return the gradient of each weight."""
    tokens, labels, further = model_inputs(run, batch(run, step), grid, step)
    loss, _ = module(tokens, labels, **further)
    return list(torch.autograd.grad(loss, list(module.parameters())))


def batch(run: Run, step: int) -> Batch:
    """Return a micro-batch, of documents of 20, 13 and 6 tokens at steps 0 to 2 if they are apart: each step has more of them."""
    tokens = torch.arange(2 * SEQ).view(2, SEQ) * 7 % 250
    documents = torch.arange(SEQ).expand(2, SEQ) // (20 - 7 * step) if run.data.documents else None
    return Batch(tokens=tokens, labels=tokens, samples=torch.arange(2), documents=documents)


def receive_what_is_sent() -> Library:
    """Have messages among ranks that send nothing return what this rank sends, as from each rank; until the result is collected.

    Before 2.13 torch leaves what is received as the memory was.
    """

    def done() -> Any:
        future = torch.futures.Future[None]()
        future.set_result(None)
        return _create_work_from_future(future).boxed()

    def all_to_all(received: torch.Tensor, sent: torch.Tensor, *_: Any) -> Any:
        received.copy_(sent)
        return done()

    def all_gather(received: torch.Tensor, sent: torch.Tensor, *_: Any) -> tuple[torch.Tensor, Any]:
        received.view(-1, *sent.shape).copy_(sent)
        return received, done()

    def all_gather_each(received: list[torch.Tensor], sent: list[torch.Tensor], *_: Any) -> Any:
        return [all_gather(*pair)[1] for pair in zip(received, sent, strict=True)][-1]

    def reduce_scatter(received: torch.Tensor, sent: torch.Tensor, *_: Any) -> tuple[torch.Tensor, Any]:
        received.copy_(sent.view(-1, *received.shape)[0])
        return received, done()

    def reduce_scatter_each(received: list[torch.Tensor], sent: list[torch.Tensor], *_: Any) -> Any:
        return [reduce_scatter(*pair)[1] for pair in zip(received, sent, strict=True)][-1]

    library = Library("c10d", "IMPL")
    for name, receive in {
        "alltoall_base_": all_to_all,
        "_allgather_base_": all_gather,
        "allgather_into_tensor_coalesced_": all_gather_each,
        "_reduce_scatter_base_": reduce_scatter,
        "reduce_scatter_tensor_coalesced_": reduce_scatter_each,
    }.items():
        library.impl(name, receive, "CPU", allow_override=True)
    return library


def main() -> None:
    """Answer each argument: a layout's overrides, separated by spaces."""
    gc.disable()  # the compiler makes millions of objects, which a short process can hold
    replaced = receive_what_is_sent()
    for words in sys.argv[1:]:
        run = load_recipe("quickstart", [*WORDS, *words.split()])
        size = run.cluster.nodes * run.cluster.gpus
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        world = World(rank=0, size=size, device=torch.device("cpu"))
        grid = make_grid(world, mesh_position(run, 0), copies=head_shards(run, run.parallel.tp).copies)
        print(json.dumps(compile_and_train(run, grid)), flush=True)
        dist.destroy_process_group()
    del replaced
    os._exit(0)


if __name__ == "__main__":
    main()
