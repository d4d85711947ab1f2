"""A mixture of experts in torch: a transformer whose layers send each token to some of many feed-forwards (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...layers.add_gradient import add_gradient
from ...layers.counter_rng import DropoutKeys
from ...layers.cross_entropy import IGNORED
from ...layers.dtypes import at_least_float32
from ...layers.experts import LoraExpertLinear, combine_rows, copy_rows, dispatch_rows, plan_exchange, return_rows
from ...layers.output_gates import add_gated
from ...layers.parameters_by_prefix import Parameters, sub_parameters
from ...layers.preference_loss import PairInputs
from ...layers.rank_group import Group
from ...layers.tensor_parallel import Linear, TensorParallel, gather_inputs, reduce_outputs
from ...layers.transformer.attention import Attention
from ...layers.transformer.context_parallel import ContextParallel
from ...layers.transformer.document_bounds import DocumentBounds
from ...layers.transformer.feed_forward import FeedForward, make_gate
from ...layers.transformer.transformer import AttentionHalf, LayerInputs, Transformer
from ...spec.run import Model, Run
from .routing import Routing, imbalance, near_tie_count, route, squared_log_sums
from .routing_counts import count_routing

# B batch, S sequence, H hidden, E experts, K experts per token, C copies of tokens that are computed, F expert_ffn


class RouterLayer(nn.Module):
    """Each token's logit for each expert, in float32, with a bias that is trained where experts have biases. `constants` holds the bias [E]
    of the choice, which is no parameter of the module: no engine rounds, shards or steps it."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self.weight, self.logit_bias = parameters["weight"], parameters.get("logit_bias")
        self.constants = {"bias": parameters["bias"].data} if "bias" in parameters else {}

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, E]."""
        logits: Tensor = _Float32Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return logits if self.logit_bias is None else logits + at_least_float32(self.logit_bias)


class _Float32Product(torch.autograd.Function):
    """x W in float32. Saves x, where W is trained, in its own dtype; autograd would save it in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.dtype = x.dtype
        return at_least_float32(x) @ at_least_float32(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_grad = (grad @ at_least_float32(weight).mT).to(ctx.dtype)
        if x is None:
            return x_grad, None
        return x_grad, (at_least_float32(x).flatten(0, -2).mT @ grad.flatten(0, -2)).to(weight.dtype)


class Experts(nn.Module):
    """Gated feed-forwards; each takes the tokens routed to it, and a token's outputs are summed by its routing weights.

    The ranks of `ep` have equally many of them each and exchange rows.
    """

    def __init__(self, parameters: Parameters, model: Model, ep: Group | None, tp: TensorParallel | None = None) -> None:
        super().__init__()
        scale = model.lora.scale
        self.gate, self.up = (LoraExpertLinear(sub_parameters(parameters, part), scale, columns=tp) for part in ("gate", "up"))
        self.down = LoraExpertLinear(sub_parameters(parameters, "down"), scale, rows=tp)
        self.activate, self.ep = make_gate(model.act), ep

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x [B, S, H] -> [B, S, H]; under tensor parallelism this rank's terms of the sum."""
        rows = copy_rows(x.flatten(0, 1), routing.order, routing.weights.shape[-1])  # [C, H]
        if self.ep is None:
            outputs = self.feed_forward(rows, routing.ends)
        else:
            exchange = plan_exchange(routing.ends, self.ep)
            outputs = return_rows(self.feed_forward(dispatch_rows(rows, exchange), exchange.ends), exchange)
        return combine_rows(outputs, routing.weights, routing.order)

    def feed_forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Apply to rows [C, H] their experts; the rows of expert e end at `ends[e]`."""
        activated = self.activate(self.gate(rows, ends), self.up(rows, ends))  # [C, F]
        outputs: Tensor = self.down(activated, ends)
        return outputs


class MoELayer(AttentionHalf):
    """x + attention(norm1(x)), then x + the routed experts of norm2(x) + the shared experts of norm2(x); or with norms of what is added."""

    def __init__(
        self,
        parameters: Parameters,
        run: Run,
        layer: int,
        tp: TensorParallel | None,
        ep: Group | None,
        attention_class: Callable[..., nn.Module] = Attention,
    ) -> None:
        super().__init__(parameters, run, layer, tp, attention_class)
        model = run.model
        self.router = RouterLayer(sub_parameters(parameters, "router"))
        self.experts = Experts(sub_parameters(parameters, "experts"), model, ep, tp)
        self.shared = FeedForward(sub_parameters(parameters, "shared"), model, tp) if model.shared_experts else None
        self.tp, self.top_k, self.rule, self.aux_loss = tp, model.top_k, model.router, model.aux_loss
        self.shared_gate = (
            Linear(sub_parameters(parameters, "shared_gate"), model.lora.scale) if "shared_gate.weight" in parameters else None
        )
        if self.shared_gate is not None:
            self.shared_gate.stays_wide = True
        # tokens of each sequence that an expert takes
        self.capacity = None if model.capacity is None else int(model.capacity * model.top_k * run.train.seq / model.experts)

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return (hidden states [B, S, H], each sequence's losses of the router [B] where there are any, counts of the routing [E + 2])."""
        x = self.attend(x, inputs)
        normed = self.second_input(x)
        mixture, losses, counts = self.mixture(normed, inputs.cp)
        if self.shared is not None:
            shared = self.shared(normed)
            mixture = mixture + shared if self.shared_gate is None else add_gated(mixture, shared, self.shared_gate(normed))
        return self.add(x, mixture, self.post_norm2, self.dropout2, inputs), losses, counts

    def mixture(self, x: Tensor, cp: ContextParallel | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return (the routed experts' output [B, S, H], losses of the router, counts of the routing).

        All ranks of a tensor-parallel group route all tokens alike: each gathers the logits and the tokens whole.
        """
        logits, bias = self.router(x), self.router.constants.get("bias")
        if self.tp is not None:
            logits, x = gather_inputs(logits, self.tp), gather_inputs(x, self.tp)
        routing = route(logits, self.top_k, self.capacity, cp, router=self.rule, bias=bias)
        output = self.experts(x, routing)
        losses = []
        if self.aux_loss:
            balance = imbalance(logits, routing.chosen, cp, router=self.rule, bias=bias, scores=routing.scores)
            losses.append(balance * self.aux_loss)
        if self.rule.z_loss:
            losses.append(squared_log_sums(logits, cp) * self.rule.z_loss)
        near_ties = near_tie_count(logits, self.top_k, x.dtype, self.rule, bias)
        return (
            (output if self.tp is None else reduce_outputs(output, self.tp)),
            torch.stack(losses).sum(0) if losses else None,
            count_routing(routing, near_ties),
        )


def mixture_layers(module: nn.Module) -> dict[str, MoELayer]:
    """Return the layers with experts of a part of the model by logical name."""
    return {name: each for name, each in module.named_modules() if isinstance(each, MoELayer)}


class MoETransformer(Transformer):
    """A transformer of such layers behind the first dense ones. `model.aux_loss` and `model.router.z_loss` add to the gradients, not to
    the loss that is returned.

    A part that is not the last does not see the loss's gradient: the engine sets `loss_gradient` before its backward.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.loss_gradient = 1.0
        self.router_losses: list[Tensor] = []  # [B] of each layer, of the forward under way
        self.routing_counts: dict[str, Tensor] = {}  # [E + 2] by layer, of all training forwards since the engine last took them
        self.added_losses: list[Tensor] = []  # sums over labels of the routers' losses, of the same forwards

    def make_layer(self, parameters: Parameters, run: Run, index: int) -> nn.Module:
        if index < run.model.dense_layers:
            return super().make_layer(parameters, run, index)
        return MoELayer(parameters, run, index, self.tp, self.ep, self.attention_class)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        stream: Tensor | None = None,
        documents: Tensor | None = None,
        bounds: DocumentBounds | None = None,
        keys: DropoutKeys | None = None,
        further: Tensor | None = None,
        label_counts: Tensor | None = None,
        pairs: PairInputs | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Transformer.forward`; `label_counts` [B] are, under context parallelism, the labels of each whole sequence, or of preferences
        its pairs.

        The gradient is of the sum of losses plus the sum, over sequences, of the routers' losses summed over layers times the sequence's
        labels that count: over labels, the mean of each. A router's are aux_loss times its imbalance, and z_loss times the mean square of
        the log-sum-exp of its logits.
        """
        given: dict[str, Any] = {
            "stream": stream,
            "documents": documents,
            "bounds": bounds,
            "keys": keys,
            "further": further,
            "pairs": pairs,
        }
        out, count = super().forward(tokens, labels, **given)
        losses, self.router_losses = self.router_losses, []
        if losses:
            ranks = self.tp.group.size if self.tp else 1  # each computes all of it, and their gradients add up
            counts = (labels != IGNORED).sum(1) if label_counts is None else label_counts
            added = (torch.stack(losses).sum(0) * counts).sum()
            if self.training:
                self.added_losses.append(added.detach())
            out = add_gradient(out, added / ranks, None if self.last else self.loss_gradient)
        return out, count

    def run_layers(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        self.router_losses = []
        for name, layer in self.layers.items():
            if not isinstance(layer, MoELayer):
                x = self.run_layer(layer, x, inputs)
                continue
            x, *outputs = self.run_layer(layer, x, inputs)
            self.take_outputs(f"layers.{name}", tuple(outputs))
        return x

    def take_outputs(self, layer: str, outputs: tuple[Tensor | None, ...]) -> None:
        losses, counts = outputs
        if self.training:
            assert counts is not None
            self.routing_counts[layer] = self.routing_counts.get(layer, 0) + counts
        if losses is not None:
            self.router_losses.append(losses)
