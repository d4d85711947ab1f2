"""A causal transformer in torch, with norms around each half of a layer. Its parts follow from `model.*` and the op table's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ...spec.derived.document_kernel import widest_head
from ...spec.run import Run
from ..add_gradient import add_gradient
from ..counter_rng import DropoutKeys
from ..cross_entropy import IGNORED, token_losses
from ..dropout import Dropout
from ..dtypes import rounded
from ..norms import make_norm
from ..parameters_by_prefix import Parameters, sub_parameters
from ..preference_loss import PairInputs, PairResults, preference_loss
from ..rank_group import Group
from ..recompute import recompute
from ..tensor_parallel import Linear, TensorParallel
from .attention import Attention
from .context_parallel import ContextParallel
from .core_attention import window_band
from .document_attention import takes_documents
from .document_bounds import DocumentBounds
from .document_mask import document_mask, document_starts
from .embedding_and_head import Embedding, LMHead, VocabEmbedding
from .feed_forward import FeedForward
from .layer_inputs import LayerInputs as LayerInputs
from .lora_dropout import LoraDropout, add_lora_dropouts
from .multi_token_prediction import FurtherTokenModule
from .rotary import local_rotary, rotary_angles

# B batch, S sequence, H hidden, D head_dim, V vocabulary; under context parallelism S are this rank's tokens


class AttentionHalf(nn.Module):
    """The first half of a layer, x + post_norm1(attention(norm1(x))), with the norms that `model.norm_place` names; with the second half's
    norms and dropout, which all families share. `attention_class` is called as `Attention`."""

    def __init__(
        self, parameters: Parameters, run: Run, layer: int, tp: TensorParallel | None, attention_class: Callable[..., nn.Module] = Attention
    ) -> None:
        super().__init__()
        model, train = run.model, run.train
        self.is_windowed = model.is_windowed(layer)
        selective = run.parallel.recompute == "selective"
        attention = sub_parameters(parameters, "attention")
        before, after = model.norm_place != "after", model.norm_place != "before"
        self.norm1 = make_norm(model, sub_parameters(parameters, "norm1")) if before else None
        self.attention = attention_class(attention, model, layer, train.attention, tp, recompute_core=selective)
        self.post_norm1 = make_norm(model, sub_parameters(parameters, "post_norm1")) if after else None
        self.dropout1 = Dropout(model.dropout, layer, "attention.residual")
        self.norm2 = make_norm(model, sub_parameters(parameters, "norm2")) if before else None
        self.post_norm2 = make_norm(model, sub_parameters(parameters, "post_norm2")) if after else None
        self.dropout2 = Dropout(model.dropout, layer, "mlp.residual")
        self.lora_dropouts: list[LoraDropout] = []  # of this layer's products

    def attend(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [B, S, H] -> x + post_norm1(attention(norm1(x)))."""
        self.take_dropout_states(inputs)
        normed = x if self.norm1 is None else self.norm1(x)
        angles = inputs.local_angles if self.is_windowed and inputs.local_angles is not None else inputs.angles
        output = self.attention(normed, angles, inputs.mask, inputs.dropout_states, inputs.cp, inputs.band, inputs.bounds)
        return self.add(x, output, self.post_norm1, self.dropout1, inputs)

    def take_dropout_states(self, inputs: LayerInputs) -> None:
        """Give the dropouts of LoRA's products the states of the micro-batch that the layer begins to compute."""
        for each in self.lora_dropouts:
            each.take_states(inputs)

    def add(self, x: Tensor, output: Tensor, post_norm: nn.Module | None, dropout: Dropout, inputs: LayerInputs) -> Tensor:
        """Return the hidden states x [B, S, H] with a half's output."""
        output = output if post_norm is None else post_norm(output)
        hidden: Tensor = x + dropout(output, inputs.sharded_dropout_states)
        return hidden

    def second_input(self, x: Tensor) -> Tensor:
        """Return what the second half reads of the hidden states x [B, S, H]."""
        normed: Tensor = x if self.norm2 is None else self.norm2(x)
        return normed


class TransformerLayer(AttentionHalf):
    """x + post_norm1(attention(norm1(x))), then x + post_norm2(mlp(norm2(x))), with the norms that the model has."""

    def __init__(
        self, parameters: Parameters, run: Run, layer: int, tp: TensorParallel | None, attention_class: type[Attention] = Attention
    ) -> None:
        super().__init__(parameters, run, layer, tp, attention_class)
        self.mlp = FeedForward(sub_parameters(parameters, "mlp"), run.model, tp)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        x = self.attend(x, inputs)
        return self.add(x, self.mlp(self.second_input(x)), self.post_norm2, self.dropout2, inputs)


class Transformer(nn.Module):
    """A whole model from tokens to loss, or a pipeline part of it: some of the layers, with the embedding if `first`, the head if `last`.

    Its parameters have the op table's names; a tied head is the embedding's own parameter. `tp`, `cp` and `ep` are the groups that
    split it: tensor parallelism its parameters, context parallelism the sequence, expert parallelism its experts. A family may have
    another `attention_class`.
    """

    attention_class: type[Attention] = Attention
    watch_layer: Callable[[nn.Module, Tensor], None] | None = None  # called with each layer and its input before it runs

    def __init__(
        self,
        parameters: Parameters,
        run: Run,
        tp: TensorParallel | None = None,
        *,
        cp: ContextParallel | None = None,
        ep: Group | None = None,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__()
        model = run.model
        self.model, self.tp, self.cp, self.ep = model, tp, cp, ep
        self.recompute, self.is_fused = run.parallel.recompute == "full", run.train.attention == "flash"
        self.first, self.last = first, last
        self.compute_type: torch.dtype | None = None  # of activations, where it is not that of parameters
        if first:
            self.embedding = VocabEmbedding(sub_parameters(parameters, "embedding"), tp)
            self.positions = Embedding(sub_parameters(parameters, "positions")) if model.positions == "learned" else None
            self.dropout = Dropout(model.dropout, -1, "embedding")
        self.layers = nn.ModuleDict(  # keyed by the layer's number, or its group's, in the whole model: a stage does not begin at 0
            {
                str(index): self.make_layer(sub_parameters(parameters, f"layers.{index}"), run, index)
                for index in (range(model.layer_groups) if layers is None else layers)
            }
        )
        if model.lora.dropout:
            for index, layer in self.numbered_layers():
                layer.lora_dropouts = add_lora_dropouts(layer, model, index, tp)  # type: ignore[assignment]
        if last:
            if model.shares_embedding and not first:  # this part's own copy of the embedding, by the embedding's name
                self.embedding = VocabEmbedding(sub_parameters(parameters, "embedding"), tp)
            self.norm = make_norm(model, sub_parameters(parameters, "norm"))
            head, chunks = sub_parameters(parameters, "embedding" if model.tied else "head"), run.train.loss_chunks
            self.head = LMHead(head, tp, tied=model.tied, vocab=model.vocab, loss_chunks=chunks, z_loss=run.train.z_loss)
            self.mtp = nn.ModuleDict({str(index): self._make_module(parameters, run, index) for index in range(model.mtp.layers)})
            self.preference, self.pair_results = run.train.preference, list[PairResults]()  # of all forwards since they were last taken
            self.further_losses: list[Tensor] = []  # mean of the modules' sums, of all training forwards since the engine last took them
        if run.train.precision == "fp8":
            further: list[Any] = list(self.mtp.values()) if last else []
            within = [*self.layers.values(), *(each.layer for each in further)]
            for linear in (each for layer in within for each in layer.modules() if isinstance(each, Linear)):
                linear.in_fp8 = not linear.stays_wide

    def _make_module(self, parameters: Parameters, run: Run, index: int) -> FurtherTokenModule:
        """Make the module that predicts the token index + 2 further on; dropout knows its layer by the number behind those of the model."""
        own = sub_parameters(parameters, f"mtp.{index}")
        return FurtherTokenModule(own, run.model, self.make_layer(sub_parameters(own, "layer"), run, run.model.layers + index))

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield each layer with its number in the whole model."""
        yield from ((int(index), layer) for index, layer in self.layers.items())

    def make_layer(self, parameters: Parameters, run: Run, index: int) -> nn.Module:
        """Make layer number `index`; a family overrides this to have layers of its own."""
        return TransformerLayer(parameters, run, index, self.tp, self.attention_class)

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
        pairs: PairInputs | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the losses, number of labels that count) of tokens [B, S] and labels [B, S]; -100 labels do not count.

        A part that is not the first starts from the hidden states `stream` [B, S, H]; one that is not the last returns its hidden
        states in place of the loss. `documents` [B, whole sequence] marks each token's document by any number that changes from one
        document to the next: attention and learned positions stay inside a document. Attention's kernel reads their `bounds`; without
        bounds, or where no kernel takes them, it reads a mask. `keys` are those of the whole sequence's tokens; without them there is no
        dropout. `further` [D, 2, B, S] are the tokens and labels of the modules that predict further tokens: their losses are in the
        gradients, not in the loss that is returned. Without them those modules do nothing. With `pairs` of answers the losses and what is
        counted are of these (preference_loss.py).
        """
        inputs = self._layer_inputs(tokens, documents, bounds, keys)
        x = self._hidden_states(tokens, inputs, stream)
        count = (labels != IGNORED).sum()
        if not self.last:
            return x, count
        if pairs is not None:
            return self._preference_loss(x, labels, pairs)
        loss = self._token_losses(x, labels).sum()
        if self.mtp and further is not None:
            loss = self._add_further_losses(loss, x, further, inputs)
        return loss, count

    def _preference_loss(self, x: Tensor, labels: Tensor, pairs: PairInputs) -> tuple[Tensor, Tensor]:
        """Return (sum of the losses, number of pairs) of hidden states x [B, S, H]; 0 and 0 on all ranks of a context axis but one."""
        context = self.cp.group if self.cp else None
        whole = labels.shape[0], labels.shape[1] * (context.size if context else 1)
        loss, results = preference_loss(self._token_losses(x, labels), whole, pairs, self.preference, context)
        self.pair_results.append(results)
        counted = 0 if context is not None and context.rank else len(pairs.labels)
        return loss, torch.tensor(counted, device=loss.device)

    def _token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the losses of tokens [B S] of hidden states x [B, S, H]; 0 of those that don't count."""
        if self.head.loss_chunks > 1:
            chunked: Tensor = self.head(x, labels)
            return chunked
        return token_losses(self.head(x), labels, self.model.vocab, self.tp, z_loss=self.head.z_loss)  # of logits [B, S, V]

    def _add_further_losses(self, loss: Tensor, x: Tensor, further: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the loss, with whose gradient comes that of `model.mtp.weight` times the mean of the modules' losses."""
        losses = []
        for name, (tokens, labels) in zip(self.mtp, further, strict=True):
            x, others = self.mtp[name](x, self.embedding(tokens), lambda layer, joined: self.run_layer(layer, joined, inputs))
            self.take_outputs(f"mtp.{name}.layer", others)
            losses.append(self._token_losses(x, labels).sum())
        mean = torch.stack(losses).mean()
        if self.training:
            self.further_losses.append(mean.detach())
        return add_gradient(loss, mean * self.model.mtp.weight)

    def take_outputs(self, layer: str, outputs: tuple[Tensor | None, ...]) -> None:
        """Take what a layer, by its logical name, returned besides the hidden states: here there is nothing."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, S, V] of the token after each of `tokens`, without vocabulary padding; for a whole model."""
        logits: Tensor = self.head(self.hidden_states(tokens, None, None))
        return logits[..., : self.model.vocab]

    def next_logits(self, tokens: Tensor, cache: None = None) -> tuple[Tensor, None]:
        """Return the logits [V] of the token after `tokens` [1, S], with vocabulary padding; for a whole model, which keeps no cache."""
        return self.head(self.hidden_states(tokens, None, None)[:, -1:])[0, 0], None

    def hidden_states(
        self,
        tokens: Tensor,
        documents: Tensor | None,
        keys: DropoutKeys | None,
        stream: Tensor | None = None,
        bounds: DocumentBounds | None = None,
    ) -> Tensor:
        """Return the hidden states [B, S, H] after the layers and, in the last part, the final norm."""
        return self._hidden_states(tokens, self._layer_inputs(tokens, documents, bounds, keys), stream)

    def _hidden_states(self, tokens: Tensor, inputs: LayerInputs, stream: Tensor | None) -> Tensor:
        x = self._embed(tokens, inputs) if stream is None else stream
        x = self.run_layers(x, inputs)
        return self.norm(x) if self.last else x

    def run_layers(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [B, S, H] -> the hidden states after the layers."""
        for layer in self.layers.values():
            x = self.run_layer(layer, x, inputs)
        return x

    def run_layer(self, layer: nn.Module, x: Tensor, inputs: LayerInputs) -> Any:
        """Return a layer's output; under full recomputation backward runs the layer again."""
        if self.watch_layer:
            self.watch_layer(layer, x)
        if self.recompute:
            tensors = inputs.angles, inputs.local_angles, inputs.mask, inputs.dropout_states, inputs.band, inputs.document_starts
            return recompute(_call_layer, layer, x, inputs, *tensors)
        return layer(x, inputs)

    def _layer_inputs(
        self, tokens: Tensor, documents: Tensor | None, bounds: DocumentBounds | None, keys: DropoutKeys | None
    ) -> LayerInputs:
        model, dtype = self.model, self.compute_type or next(self.parameters()).dtype
        angles, local_angles, positions = None, None, self._positions(tokens)
        if model.positions == "rope":
            size = tokens.shape[1] * (self.cp.group.size if self.cp else 1)
            angles = rotary_angles(model, positions, size, dtype)
            local_angles = rotary_angles(local_rotary(model), positions, size, dtype) if model.has_local_rope else None
        attending = positions  # of the queries of this rank's attention
        if self.cp is not None and self.cp.exchanges_heads:
            attending = torch.arange(len(positions) * self.cp.group.size, device=tokens.device)
        is_fused = self.is_fused and (keys is None or not model.dropout)
        if not (is_fused and bounds is not None and self._takes_documents(tokens.device, dtype)):
            bounds = None
        mask = starts = None
        if documents is not None and (bounds is None or (self.first and self.positions is not None)):
            every_start = document_starts(documents)
            starts = every_start[:, positions]
            if bounds is None:
                mask = document_mask(every_start[:, attending], attending, documents.shape[1], dtype)
        band = None
        gathers_keys = self.cp is not None and not self.cp.exchanges_heads  # whose core has windows of its own
        has_blocks = is_fused and bounds is None and not gathers_keys and not (model.sinks and tokens.is_cuda)
        if has_blocks and (window := model.effective_window(len(attending))):
            band = window_band(window, dtype, tokens.device)
        states = own_states = None if keys is None else keys.states
        if states is not None and self.cp is not None:
            own_states = self.cp.shard(states)
            states = states if self.cp.exchanges_heads else own_states
        return LayerInputs(
            angles=angles,
            local_angles=local_angles,
            mask=mask,
            band=band,
            bounds=bounds,
            starts=starts,
            dropout_states=states,
            sharded_dropout_states=self.tp.shard(own_states) if own_states is not None and self.tp else own_states,
            own_dropout_states=own_states,
            cp=self.cp,
        )

    def _takes_documents(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether attention's kernel takes the bounds of documents in place of a mask."""
        return not self.model.sinks and takes_documents(device, dtype, widest_head(self.model))

    def _positions(self, tokens: Tensor) -> Tensor:
        """Return the positions [S] of tokens [B, S] in the whole sequence."""
        if self.cp is None:
            return torch.arange(tokens.shape[1], device=tokens.device)
        return self.cp.positions(tokens.shape[1] * self.cp.group.size, tokens.device)

    def _embed(self, tokens: Tensor, inputs: LayerInputs) -> Tensor:
        x = self.embedding(tokens)  # [B, S, H]; under sequence parallelism this rank's part of S
        if self.model.scale_embedding:
            x = x * rounded(sqrt(self.model.hidden), self.compute_type or x.dtype)
        if self.positions is not None:
            positions = self._positions(tokens).unsqueeze(0)  # [1, S]
            rows = positions if inputs.starts is None else positions - inputs.starts
            x = x + self.positions(self.tp.shard(rows) if self.tp else rows)
        embedded: Tensor = self.dropout(x, inputs.sharded_dropout_states)
        if self.model.lora.rank and torch.is_grad_enabled():
            embedded.requires_grad_()  # of a frozen embedding: the first layer saves and sends what the others do, as the plan says
        return embedded


def _call_layer(layer: nn.Module, x: Tensor, inputs: LayerInputs, *tensors: Tensor | None) -> Any:
    """Call a layer. `tensors` are those of `inputs`, named again so that recomputation saves them and they are counted as saved."""
    return layer(x, inputs)
