"""A family of models, added by its op table, its module and its row alone.

A layer computes attention and feed-forward in parallel from one norm, as GPT-J does: x + attention(norm(x)) + mlp(norm(x)).
"""

from __future__ import annotations

from torch import Tensor, nn

from distrain.trainer.layers.norms import make_norm
from distrain.trainer.layers.parameters_by_prefix import Parameters, sub_parameters
from distrain.trainer.layers.tensor_parallel import TensorParallel
from distrain.trainer.layers.transformer.attention import Attention
from distrain.trainer.layers.transformer.feed_forward import FeedForward
from distrain.trainer.layers.transformer.transformer import LayerInputs, Transformer
from distrain.trainer.models.families import Family
from distrain.trainer.models.ops.op_table import OpTable, logical_sizes
from distrain.trainer.models.ops.shared_ops import attention, embedding, feed_forward, head, norm, residual
from distrain.trainer.spec.run import Model, Run, Train


def table(model: Model, train: Train) -> OpTable:
    """The op table: one norm and one residual sum in each layer."""
    return OpTable(
        sizes=logical_sizes(model, train),
        embedding=embedding(model, train),
        layer=(norm("norm1", model), *attention(model, train), *feed_forward(model), residual("residual", model)),
        head=(norm("norm", model), *head()),
        tied=model.tied,
    )


class SideBySideLayer(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, parameters: Parameters, run: Run, layer: int, tp: TensorParallel | None) -> None:
        super().__init__()
        model = run.model
        self.norm1 = make_norm(model, sub_parameters(parameters, "norm1"))
        self.attention = Attention(sub_parameters(parameters, "attention"), model, layer, run.train.attention, tp, recompute_core=False)
        self.mlp = FeedForward(sub_parameters(parameters, "mlp"), model, tp)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        normed = self.norm1(x)
        hidden: Tensor = x + self.attention(normed, inputs.angles, inputs.mask, inputs.dropout_states, inputs.cp) + self.mlp(normed)
        return hidden


class SideBySideTransformer(Transformer):
    """A transformer of such layers."""

    def make_layer(self, parameters: Parameters, run: Run, index: int) -> nn.Module:
        return SideBySideLayer(parameters, run, index, self.tp)


ROW = Family(
    table=table,
    axes=("tp", "pp", "cp"),
    defaults={"norm": "rmsnorm", "act": "gelu", "positions": "learned", "bias": False, "tied": True},
    module="distrain.tests.rank_programs.added_family:SideBySideTransformer",
)
