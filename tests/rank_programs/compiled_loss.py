"""Compiles the passes of the loss for a CPU, and prints as JSON how far they are from the same passes uncompiled, the kernels of the
gradient's code, and what they load and store; then what the loss does where torch's compiler finds no C++ compiler.

The compiler's middle is the same for every device: which operators are in one kernel, and which buffers that kernel reads and writes.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import redirect_stderr
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

from distrain.tests.fakes.compiled_code import code_of_compiler
from distrain.trainer.layers import loss_kernels
from distrain.trainer.layers.cross_entropy import IGNORED, cross_entropy
from distrain.trainer.layers.loss_kernels import row_statistics, row_statistics_by_parts, run_compiled, write_gradient

# Logits of a row, and those that are not padding; of 768 the second part is padding alone.
VOCABULARIES = {torch.float32: ((64, 50), (96, 96)), torch.bfloat16: ((768, 300),)}
ROWS = (6, 9)
Z_LOSS = 0.01


def compare(kind: torch.dtype) -> dict[str, Any]:
    """Run both passes for each vocabulary and number of rows, compiled and as they are written."""
    apart, codes = {"statistics": 0.0, "gradient": 0.0}, dict[str, list[str]](statistics=[], gradient=[])
    for padded, width in VOCABULARIES[kind]:
        with code_of_compiler() as made:
            for rows in ROWS:
                draw = torch.Generator().manual_seed(rows)
                logits = (4 * torch.randn(rows, padded, generator=draw) + 90).to(kind)
                local = torch.randint(-padded // 2, 2 * padded, (rows,), generator=draw)  # some labels are other ranks'
                local[:3] = torch.tensor([0, width - 1, width])
                wanted = row_statistics(logits, local, width)
                found = run_compiled(row_statistics_by_parts, logits, local, width)
                codes["statistics"] += taken(made)
                apart["statistics"] = max([apart["statistics"], *map(difference, found, wanted)])
                log_sum, scale = wanted[1].log() + wanted[0], torch.rand(rows, generator=draw)
                ours, theirs = logits.clone(), logits.clone()
                run_compiled(write_gradient, ours, local, log_sum, scale, width, Z_LOSS)
                codes["gradient"] += taken(made)
                write_gradient(theirs, local, log_sum, scale, width, Z_LOSS)
                apart["gradient"] = max(apart["gradient"], difference(ours, theirs))
    graphs = {name: len(each) for name, each in codes.items()}
    return {"apart": apart, "graphs": graphs, "kernels": [passes_over_logits(code) for code in codes["gradient"]]}


def taken(made: list[str]) -> list[str]:
    """Empty the list, and return what was in it."""
    found = made[:]
    made.clear()
    return found


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, over the size of a number that is more than 1."""
    found, wanted = found.detach(), wanted.detach()
    return float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max())


def passes_over_logits(code: str) -> dict[str, int]:
    """The kernels of some generated C++, and how often their loops load and store each of a row's logits."""
    kernels = re.findall(r'extern "C"\s+void\s+\w+\(.*?\)\s*\{(.*?)\n\}', code, re.DOTALL)
    vectors = "".join(kernels).split("C10_UNLIKELY")[0]  # without the elements left over
    loaded, stored = (re.findall(name + r"\((\w+) \+ static_cast<int64_t>\(x1 \+", vectors) for name in ("loadu", "store"))
    return {"kernels": len(kernels), "loads": len(loaded), "stores": len(stored), "buffers": len({*loaded, *stored})}


def without_a_compiler() -> dict[str, Any]:
    """The loss and the gradient as on a GPU whose compiler does not work, twice, and as in chunks; the lines that it prints."""
    logits, labels = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True), torch.randint(30, (2, 5))
    labels[0, 1] = IGNORED
    wanted = cross_entropy(logits, labels, 30)
    (gradient,) = torch.autograd.grad(wanted, logits)
    tried, said, has_kernels, apart = list[str](), StringIO(), loss_kernels.has_loss_kernels, 0.0

    def run(passes: Any, *given: Any) -> Any:
        tried.append(passes.__name__)
        return run_compiled(passes, *given)

    with (
        patch.object(loss_kernels, "find_spec", lambda name: name == "triton"),
        patch.object(loss_kernels, "has_loss_kernels", lambda device: has_kernels(torch.device("cuda"))),
        patch.object(loss_kernels, "_run", run),
        torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}),
        fresh_cache(),
        redirect_stderr(said),
    ):
        for _ in range(2):
            loss = cross_entropy(logits, labels, 30)
            apart = max(apart, difference(loss, wanted), difference(torch.autograd.grad(loss, logits)[0], gradient))
    return {"apart": apart, "tried": tried, "said": said.getvalue().splitlines()}


if __name__ == "__main__":
    for kind in VOCABULARIES:
        print(json.dumps(compare(kind)), flush=True)
    print(json.dumps(without_a_compiler()), flush=True)
    os._exit(0)
