"""Rule of attention sinks: which cores of attention have them."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.families import is_made_by_transformers
from ...models.ops.shared_ops import has_fused_core
from ...spec.derived.document_kernel import MOST_HEAD_DIM, has_flash_attention_2
from ...spec.run import Parallel, Run
from .broken_rule import BrokenRule


def sinks_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Ranks that gather keys have no sinks; the fused kernel with sinks on a GPU takes half precision, narrow heads and no mask."""
    model = run.model
    if not model.sinks or is_made_by_transformers(model):
        return
    if parallel.cp > 1 and parallel.cp_comm == "all_gather":
        says = f"parallel.cp={parallel.cp}: ranks that gather keys have no model.sinks"
        yield BrokenRule("sinks", says, ((("parallel.cp_comm", "all_to_all"),), (("parallel.cp", 1),)))
    if run.cluster.device.kind == "cpu" or not has_fused_core(model, run.train):
        return
    apart = (("train.attention", "math"),)
    if not has_flash_attention_2(run.cluster.device):
        yield BrokenRule("sinks", f"model.sinks=true: {run.cluster.device.name} has no fused kernel for it", (apart,))
        return
    if run.train.precision == "fp32":
        says = "model.sinks=true: the fused kernel of a GPU takes no train.precision=fp32"
        yield BrokenRule("sinks", says, (apart, (("train.precision", "bf16"),)))
    if run.data.documents:
        yield BrokenRule("sinks", "model.sinks=true: the fused kernel of a GPU keeps no data.documents=true apart", (apart,))
    if (size := model.head_dim or model.hidden // model.heads) > MOST_HEAD_DIM:
        yield BrokenRule("sinks", f"model.sinks=true: the fused kernel of a GPU takes no heads of {size} elements", (apart,))
