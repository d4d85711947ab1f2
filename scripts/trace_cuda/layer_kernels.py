"""The kernels that torch's compiler makes of a run's compiled layers, with the bytes that each reads and writes and its machine code.

Import this after `load_device_guard`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.dependencies import MemoryDep
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import get_dtype_size
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from ...trainer.engines.native.prepare_layers import joins_weights
from ...trainer.layers.joined_products import JoinedWeights
from ...trainer.loop.build import build_parts
from ...trainer.spec.run import Run
from .kernel_calls import Graph, KernelCall, LayerKernels
from .kernel_code import compiler_of_a_gpu
from .machine_code import KernelCode
from .patch_gpu_kernels import gpu_kernels
from .rank_trace import TracedPasses, fake_grid


def layer_kernels(run: Run) -> LayerKernels:
    """Return the kernels of rank 0's layers, all of which share their graphs: the run is to have one layer, or one group of layers."""
    codes = list[KernelCode]()
    recorder = _Recorder(codes)
    with ExitStack() as stack:
        grid = stack.enter_context(fake_grid(run, 0))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu_kernels(run.train.microbatch * run.train.seq // run.parallel.cp * run.model.top_k, compiled=True))
        parts = [part.module for part in build_parts(run, grid)]
        for part in parts if run.engine == "native" and joins_weights(run) else ():
            _join_weights(part)
        stack.enter_context(compiler_of_a_gpu(codes))
        stack.enter_context(torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True))
        for part in parts:
            layers: Any = part.layers
            for layer in layers.values():
                layer.compile(backend=recorder)
        passes = TracedPasses(run, grid, parts)
        passes.forward(0, 0)
        forward = tuple(recorder.graphs)
        passes.backward(0, 0)
    return LayerKernels(forward=forward, backward=tuple(recorder.graphs[len(forward) :]))


def _join_weights(part: Any) -> None:
    """Join the weights of layers that share an input and are alike."""
    for module in part.modules():
        if isinstance(module, JoinedWeights) and (layers := module.column_layers()):
            weights = [layer.weight for layer in layers]
            if len({each.shape for each in weights}) == 1:
                module.joined = torch.empty(len(weights), *weights[0].shape, dtype=weights[0].dtype, device=weights[0].device)


class _Recorder:
    """A backend for torch.compile that has a graph's code made, appends it to `graphs`, and runs the graph operator by operator. `codes`
    are those of the kernels that were made last."""

    def __init__(self, codes: list[KernelCode]) -> None:
        self.graphs, self.codes = list[Graph](), codes
        self.calls = list[tuple[str, dict[str, int], dict[str, int]]]()
        self.sources = list[str]()

    def __call__(self, module: Any, inputs: Sequence[Any]) -> Any:
        with patch.object(UniformValueConstantFolder, "_deduce_value", _on_cpu(UniformValueConstantFolder._deduce_value)):
            return compile_fx(module, inputs, inner_compile=self._compile_graph)  # type: ignore[arg-type]

    def _compile_graph(self, module: Any, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
        runs = deepcopy(module)  # the compiler changes its graph
        for each in (self.calls, self.codes, self.sources):
            each.clear()
        with (
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(TritonScheduling, "define_kernel", self._define_kernel(TritonScheduling.define_kernel)),
            patch.object(GraphLowering, "save_output_code", staticmethod(self.sources.append)),
        ):
            compile_fx_inner(module, inputs, **options)
        known = {each.name: each for each in self.codes}
        calls = tuple(KernelCall(name=name, reads=reads, writes=writes, code=known[name]) for name, reads, writes in self.calls)
        self.graphs.append(Graph(calls=calls, others=_other_calls("\n".join(self.sources))))

        def call(given: list[Any]) -> Any:
            return runs.forward(*given)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _define_kernel(self, define: Callable[..., str]) -> Callable[..., str]:
        def define_and_record(scheduling: Any, source: str, nodes: Any, kernel: Any) -> str:
            name = define(scheduling, source, nodes, kernel)
            self.calls.append((name, *_accesses(kernel)))
            return name

        return define_and_record


def _on_cpu(deduce: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Have the compiler compute constants on the CPU."""

    def deduce_on_cpu(folder: Any, node: Any) -> Any:
        if node.target is torch.ops.aten.full.default and isinstance(node.args[1], int | float | bool):
            return torch.ops.aten.full.default([1], node.args[1], **{**node.kwargs, "device": "cpu"})
        return deduce(folder, node)

    return deduce_on_cpu


def _accesses(kernel: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that a kernel reads and writes of each tensor: of one that is larger than what it makes, the slices that it reads
    (torch's own estimate_kernel_num_bytes)."""
    hint = V.graph.sizevars.optimization_hint
    definitions, tensors, *_ = kernel.args.python_argdefs()
    accesses = kernel.features.buf_accesses()
    made = 1
    for size in kernel.numels.values():
        made *= hint(size)
    reads, writes = dict[str, int](), dict[str, int]()
    for definition, tensor in zip(definitions, tensors, strict=True):
        if tensor not in accesses:
            continue
        elements = hint(V.graph.get_numel(tensor))
        if elements > made:
            slices = {each.index if isinstance(each, MemoryDep) else number for number, each in enumerate(accesses[tensor])}
            elements = made * len(slices)
        size = elements * get_dtype_size(V.graph.get_dtype(tensor))
        if definition.name.startswith("in"):
            reads[tensor] = size
        if "out" in definition.name:
            writes[tensor] = size
    return reads, writes


def _other_calls(source: str) -> Counter[str]:
    """Count what a graph's code calls that the compiler did not make: products, attention, sums of workspaces."""
    found = re.findall(r"extern_kernels\.(\w+)\(|torch\.ops\.([\w.]+?)(?:\.default)?\(", source)
    return Counter(first or second.removeprefix("aten.") for first, second in found)
