"""Multi-token prediction: a module that predicts a token further on than the model does (arXiv:2412.19437 section 2.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...spec.run import Model
from ..cross_entropy import IGNORED
from ..held_results import take_held
from ..norms import make_norm
from ..parameters_by_prefix import Parameters, sub_parameters
from ..tensor_parallel import Linear
from .document_mask import document_starts

# B batch, S sequence, s this rank's part of it under sequence parallelism, H hidden, D modules


class FurtherTokenModule(nn.Module):
    """norm(layer(W [norm(embedding of a further token); norm(hidden states)])): every tensor-parallel rank has W whole, as it has norms.

    The embedding comes first, as in DeepSeek-V3's weights. The hidden states are those that the head reads: the model's after its final
    norm, or those of the module before.
    """

    def __init__(self, parameters: Parameters, model: Model, layer: nn.Module) -> None:
        super().__init__()
        self.embedding_norm = make_norm(model, sub_parameters(parameters, "embedding_norm"))
        self.hidden_norm = make_norm(model, sub_parameters(parameters, "hidden_norm"))
        self.join = Linear(sub_parameters(parameters, "join"))
        self.layer = layer
        self.norm = make_norm(model, sub_parameters(parameters, "norm"))

    def forward(self, x: Tensor, embedded: Tensor, run_layer: Callable[[nn.Module, Tensor], Any]) -> tuple[Tensor, Any]:
        """x and embedded [B, s, H] -> (what the head reads [B, s, H], what else the layer returns: all of a tuple but its first)."""
        output = run_layer(self.layer, self.join(torch.cat((self.embedding_norm(embedded), self.hidden_norm(x)), dim=-1)))
        hidden, *others = output if isinstance(output, tuple) else (output,)
        return self.norm(hidden), tuple(others)


def further_tokens(tokens: Tensor, labels: Tensor, documents: Tensor | None, modules: int) -> Tensor:
    """Return, for each of D modules, the tokens whose embeddings it reads and its labels, [D, 2, B, S], for whole rows [B, S].

    Module k (from 1) reads at position i the token at i + k, and its label is the model's own at i + k. Past the row's end there is none,
    and where the token at i + k is of another document the label does not count.
    """
    rows, starts = [], None if documents is None else document_starts(documents)
    for far in range(1, modules + 1):
        read, wanted = torch.zeros_like(tokens), torch.full_like(labels, IGNORED)
        read[:, :-far], wanted[:, :-far] = tokens[:, far:], labels[:, far:]
        if starts is not None:
            wanted[:, :-far].masked_fill_(starts[:, far:] != starts[:, :-far], IGNORED)
        rows.append(torch.stack((read, wanted)))
    return torch.stack(rows)


def further_arguments(model: Model, tokens: Tensor, labels: Tensor, documents: Tensor | None) -> dict[str, Tensor]:
    """Return the argument of a model's forward that has its modules predict further tokens, for whole rows [B, S]; none without modules."""
    return {"further": further_tokens(tokens, labels, documents, model.mtp.layers)} if model.mtp.layers else {}


def take_further_losses(module: nn.Module) -> list[Tensor]:
    """Return the mean of its modules' losses in each training forward since they were last taken."""
    return take_held(module, "further_losses")
