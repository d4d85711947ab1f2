"""Any causal language model of Hugging Face's as what the loop trains: tokens and labels in, the sum of losses out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.cross_entropy import IGNORED, cross_entropy
from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from .meta import config_of, made

# B batch, S sequence, V vocabulary

ASKED = 8  # tokens by which a model is asked whether it looks ahead
CLOSE = 1e-4


class Causal(nn.Module):
    """transformers' model under our contract. It stays in the mode without dropout, which can't be keyed there."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf
        self.train()

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of the losses, how many labels count) of tokens [B, S] and labels [B, S], -100 where one doesn't."""
        logits = self.logits(tokens)
        return cross_entropy(logits, labels, logits.shape[-1]), (labels != IGNORED).sum()

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] of what follows each token."""
        found: Tensor = self.hf(input_ids=tokens, use_cache=False).logits
        return found

    def train(self, mode: bool = True) -> Causal:
        super().train(mode)
        self.hf.train(False)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Causal:
        """Moves and casts, but never casts rotary frequencies: half precision would turn late positions by wrong angles."""
        kept = [(each._buffers, name) for each in self.modules() for name in each._buffers if name.endswith("inv_freq")]
        before = [buffers[name] for buffers, name in kept]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for (buffers, name), whole in zip(kept, before, strict=True):
            cast = buffers[name]
            if whole is not None and cast is not None and cast.dtype != whole.dtype:
                buffers[name] = whole.to(cast.device)
        return self


def causal(run: Run, *, device: torch.device, dtype: torch.dtype, seed: int | None) -> Causal:
    """The model of run.model.hf with transformers' own initial values, drawn on the CPU from a seed: the same on every rank.

    Raises Unreadable where it is not the model that was planned, or looks ahead.
    """
    assert run.model.hf is not None
    path = Path(run.model.hf)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0 if seed is None else seed)
        try:
            config = config_of(path / "config.json" if path.is_dir() else path)
            module = Causal(made(config, **({"attn_implementation": "eager"} if run.train.attention == "math" else {})))
        except Exception as error:  # whatever a version of transformers may raise
            raise _refused(f"{path}: {' '.join(str(error).split())[:200]}") from error
    shapes = {name: tuple(each.shape) for name, each in module.hf.named_parameters()}
    if shapes != run.model.parameters:
        raise _refused(f"{path} or transformers is not what the run was planned with")
    if not _looks_back(module, min(ASKED, run.train.seq)):
        raise _refused(f"{path}: its model sees the tokens that it is to foretell")
    return module.to(device=device, dtype=dtype)


def _looks_back(module: Causal, length: int) -> bool:
    """Whether the logits of a sequence are the same whatever its last token is."""
    tokens = torch.arange(1, length + 1).repeat(2, 1)
    tokens[1, -1] = 0
    with torch.no_grad():
        one, other = module.logits(tokens)[:, :-1]
    return bool(torch.allclose(one, other, rtol=CLOSE, atol=CLOSE))


def _refused(says: str) -> Unreadable:
    return Unreadable([Problem(rule="hf", says=says)])
