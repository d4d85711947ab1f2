"""torch.optim.Muon of a whole model's hidden matrices, and torch's AdamW of its other weights, as one optimizer: the reference of Muon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from distrain.tests.fakes.rounded_states import round_moment
from distrain.trainer.spec.run import Run

MATRICES = re.compile(
    r"layers\.\d+\.(\d+\.)?(attention\.(query|key|value|gate|beta|decay|out|query_down|key_down|rope_key)"
    r"|(mlp|experts|shared)\.(gate|up|down))\.weight"
)


class TorchMuon(torch.optim.AdamW):
    """Torch's matrices are ours transposed, one for each expert. Torch orthogonalises in bfloat16: a float32 run has it keep float32."""

    def __init__(self, run: Run, module: nn.Module) -> None:
        self._matrices: list[tuple[nn.Parameter, nn.Parameter, int]] = []
        self._is_exact = run.train.precision == "fp32"
        self._run, self._taken, self._names = run, 0, {parameter: name for name, parameter in module.named_parameters()}
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": run.optim.weight_decay}, {"params": [], "weight_decay": 0.0}]
        for name, parameter in module.named_parameters():
            if MATRICES.fullmatch(name):
                for at, each in enumerate(_transposed(parameter.data)):
                    self._matrices.append((nn.Parameter(each.clone()), parameter, at))
            else:
                groups[parameter.dim() == 1 or not name.endswith(".weight")]["params"].append(parameter)
        super().__init__(groups, lr=run.optim.lr, betas=run.optim.betas, eps=run.optim.eps)
        muon = run.optim.muon
        self._muon = torch.optim.Muon(
            [each for each, *_ in self._matrices],
            lr=run.optim.lr,
            weight_decay=run.optim.weight_decay,
            momentum=muon.momentum,
            nesterov=muon.nesterov,
            ns_steps=muon.ns_steps,
            adjust_lr_fn=muon.adjust_lr_fn,
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self._muon.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for each, parameter, at in self._matrices:
            assert parameter.grad is not None
            each.grad = _transposed(parameter.grad)[at].clone()
        with _orthogonalise_in_float32() if self._is_exact else nullcontext():
            self._muon.step()
        for each, parameter, at in self._matrices:
            _transposed(parameter.data)[at].copy_(each.data)
        if self._run.optim.moments == "bf16":
            self._round_moments()

    @torch.no_grad()
    def _round_moments(self) -> None:
        """Round all moments: a weight's momenta together, as its logical tensor has them."""
        self._taken += 1
        for (kind, name), views in self._views().items():
            half = int(kind == "exp_avg_sq")
            kept = round_moment(self._run, name, torch.stack(views), self._taken, half)
            for view, value in zip(views, kept, strict=True):
                view.copy_(value)

    def moments(self) -> dict[tuple[str, str], Tensor]:
        """The moments, by their kind in checkpoints and the weight's name."""
        return {key: torch.stack(views).squeeze(0) for key, views in self._views().items()}

    def _views(self) -> dict[tuple[str, str], list[Tensor]]:
        """Each weight's moments of a kind as its logical tensor has them: a matrix for each expert, or all of it."""
        found: dict[tuple[str, str], list[Tensor]] = {}
        for matrix, parameter, _ in self._matrices:
            momentum = self._muon.state[matrix]["momentum_buffer"]
            found.setdefault(("momentum_buffer", self._names[parameter]), []).append(momentum.mT)
        for name, weight in ((self._names[each], each) for group in self.param_groups for each in group["params"]):
            found |= {(kind, name): [self.state[weight][kind]] for kind in ("exp_avg", "exp_avg_sq")}
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for _, parameter, _ in self._matrices:
            parameter.grad = None


@contextmanager
def _orthogonalise_in_float32() -> Iterator[None]:
    """Have torch's Muon copy gradients in float32; since torch 2.15 it names the type."""
    with patch.object(Tensor, "bfloat16", Tensor.clone), patch.object(torch, "bfloat16", torch.float32):
        yield


def _transposed(tensor: Tensor) -> Tensor:
    """Return matrices [inputs, outputs] of a weight, or one for each expert, as torch has them: [matrices, outputs, inputs]."""
    return tensor.mT if tensor.dim() == 3 else tensor.mT[None]
