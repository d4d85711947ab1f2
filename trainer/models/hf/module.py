"""Family hf in torch: a causal language model of transformers, called as our own models are, with tokens and labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.cross_entropy import IGNORED, cross_entropy
from ...spec.problem import Problem, Unreadable
from ...spec.run import Run
from .inspect_config import load_config, make_model

# B batch, S sequence, V vocabulary

PROBE_TOKENS = 8  # of the sequence that shows whether a model looks ahead
LOGIT_TOLERANCE = 1e-4  # of logits that should be equal


class CausalLM(nn.Module):
    """transformers' model, called as ours. It stays in evaluation mode: its dropout can't be keyed, so it has none."""

    def __init__(self, hf: Any, z_loss: float = 0.0) -> None:
        super().__init__()
        self.hf, self.z_loss = hf, z_loss
        self.train()

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sum of the losses, number of labels that count) of tokens [B, S] and labels [B, S]; -100 labels do not count."""
        logits = self.logits(tokens)
        return cross_entropy(logits, labels, logits.shape[-1], z_loss=self.z_loss, keep_logits=True), (labels != IGNORED).sum()

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, S, V] of the token after each of `tokens`."""
        logits: Tensor = self.hf(input_ids=tokens, use_cache=False).logits
        return logits

    def next_logits(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Return the logits [V] of the token after `tokens` [1, S], and the keys and values of all of them where the model keeps any.

        `cache` is what was returned for the first of `tokens`: they are not computed again.
        """
        seen = 0 if cache is None else cache.get_seq_length()
        result = self.hf(input_ids=tokens[:, seen:], past_key_values=cache, use_cache=True)
        kept = getattr(result, "past_key_values", None)
        return result.logits[0, -1], kept if hasattr(kept, "get_seq_length") else None

    def train(self, mode: bool = True) -> CausalLM:
        super().train(mode)
        self.hf.train(False)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CausalLM:
        """Move and cast, but never cast rotary frequencies: in half precision late positions would be rotated by wrong angles."""
        frequencies = [(each._buffers, name) for each in self.modules() for name in each._buffers if name.endswith("inv_freq")]
        before = [buffers[name] for buffers, name in frequencies]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for (buffers, name), original in zip(frequencies, before, strict=True):
            cast = buffers[name]
            if original is not None and cast is not None and cast.dtype != original.dtype:
                buffers[name] = original.to(cast.device)
        return self


def build_causal_lm(run: Run, *, device: torch.device, dtype: torch.dtype, seed: int | None) -> CausalLM:
    """Build the model of run.model.hf with transformers' own initial values, drawn on the CPU from a seed: the same on every rank.

    Raises Unreadable where it is not the model that was planned, or where it looks ahead.
    """
    assert run.model.hf is not None
    path = Path(run.model.hf)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0 if seed is None else seed)
        try:
            config = load_config(path / "config.json" if path.is_dir() else path)
            hf = make_model(config, **({"attn_implementation": "eager"} if run.train.attention == "math" else {}))
            module = CausalLM(hf, run.train.z_loss)
        except Exception as error:  # versions of transformers raise different errors
            raise _refusal(f"{path}: {' '.join(str(error).split())[:200]}") from error
    shapes = {name: tuple(each.shape) for name, each in module.hf.named_parameters()}
    if shapes != run.model.parameters:
        raise _refusal(f"{path} or transformers has changed since the run was planned: the model has other parameters")
    if not _is_causal(module, min(PROBE_TOKENS, run.train.seq)):
        raise _refusal(f"{path}: its model sees the tokens that it should predict")
    return module.to(device=device, dtype=dtype)


def write_causal_lm(module: CausalLM, folder: Path, dtype: torch.dtype, special: Mapping[str, int | None]) -> None:
    """Write a model as transformers does: safetensors in `dtype`, and config.json with the ids of special tokens that are known."""
    for key, value in special.items():
        if value is not None:
            setattr(module.hf.config, key, value)
    cast: dict[int, Tensor] = {}  # by the place of the memory: a tied weight stays one tensor
    state = module.hf.state_dict()
    for each in state.values():
        cast.setdefault(each.data_ptr(), each.to(dtype) if each.is_floating_point() else each)
    module.hf.save_pretrained(folder, state_dict={name: cast[each.data_ptr()] for name, each in state.items()})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))  # it names the type that the model has here
    stored = {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config | stored, indent=2) + "\n", encoding="utf-8")


def _is_causal(module: CausalLM, length: int) -> bool:
    """Whether the logits before the last token stay the same when the last token changes."""
    tokens = torch.arange(1, length + 1).repeat(2, 1)
    tokens[1, -1] = 0
    with torch.no_grad():
        one, other = module.logits(tokens)[:, :-1]
    return bool(torch.allclose(one, other, rtol=LOGIT_TOLERANCE, atol=LOGIT_TOLERANCE))


def _refusal(says: str) -> Unreadable:
    return Unreadable([Problem(rule="hf", says=says)])
