"""The planner's style of each sharded weight is the layer that computes with it, in every family that has a module of its own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from distrain.trainer.layers.experts import ExpertLinear  # noqa: E402
from distrain.trainer.layers.norms import AllHeadsNorm  # noqa: E402
from distrain.trainer.layers.tensor_parallel import ColumnLinear, RowLinear  # noqa: E402
from distrain.trainer.layers.transformer.embedding_and_head import LMHead, VocabEmbedding  # noqa: E402
from distrain.trainer.models.build import build_model  # noqa: E402
from distrain.trainer.models.families import FAMILIES, op_table  # noqa: E402
from distrain.trainer.plan.axes.tp import AXIS, split_style  # noqa: E402
from distrain.trainer.spec.run import Cluster, Device, Model, Parallel, Run, Train  # noqa: E402

STYLES = {AllHeadsNorm: "heads", ColumnLinear: "column", RowLinear: "row", VocabEmbedding: "vocab", LMHead: "column"}
OWN = [name for name, family in FAMILIES.items() if family.module and not family.made_by_transformers]

# Weights that attention uses itself, without a layer of their own around them; of linear attention, taps and rates too
OF_ATTENTION = ("sinks", "query_conv.weight", "key_conv.weight", "value_conv.weight", "a_log", "dt_bias")


def run_of(family: str) -> Run:
    latent = dict.fromkeys(FAMILIES[family].needs, 4)
    experts = {"experts": 2, "top_k": 1, "shared_experts": 1, "expert_bias": True} if FAMILIES[family].has_experts else {}
    defaults = {**FAMILIES[family].defaults, "tied": False}
    heads = {} if latent else {"kv_heads": 2, "qk_norm": True, "qk_norm_over": "all", "sinks": True}
    model = Model(family=family, layers=1, hidden=8, heads=4, vocab=16, **defaults, **experts, **latent, **heads)  # type: ignore[arg-type]
    device = Device(name="cpu", memory=1e9, kind="cpu")
    return Run(
        name=family, model=model, cluster=Cluster(nodes=1, gpus=1, device=device), parallel=Parallel(), train=Train(batch=1, seq=4, steps=1)
    )


@pytest.mark.parametrize("family", OWN)
def test_each_weight_is_in_a_layer_of_its_planned_style(family: str) -> None:
    run = run_of(family)
    table, module = op_table(run), build_model(run, device=torch.device("meta"), dtype=torch.float32)
    styles = {}
    for prefix, ops in (("", table.embedding), ("layers.0.", table.layer), ("", table.head)):
        for op in ops:
            for weight in op.weights:
                if weight.name.rpartition("attention.")[2] in OF_ATTENTION:
                    assert split_style(op) == "heads"
                    continue
                layer = module.get_submodule((prefix + weight.name).rpartition(".")[0])
                if not isinstance(layer, ExpertLinear):  # the layer around the experts sends for all of them
                    sharded = op.product is not None or AXIS.split_dim(weight.dims)  # of the embeddings only that of tokens
                    styles[prefix + weight.name] = (split_style(op) if sharded else None, STYLES.get(type(layer)))
    assert {"column", "row", "vocab", None} <= {planned for planned, _ in styles.values()}
    assert {name: planned for name, (planned, _) in styles.items()} == {name: built for name, (_, built) in styles.items()}
