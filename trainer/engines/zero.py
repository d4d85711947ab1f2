"""Engine `zero`: DeepSpeed ZeRO 0 to 3 over the data axis."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..models.families import FAMILIES
from ..models.table import parameters
from ..parallel.world import World
from ..plan.zero import stage_of
from ..spec.run import Run
from .held import Count
from .held import held as held_by
from .partitions import Partition, partitions, share, whole

SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of DeepSpeed's dynamic loss scaler


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """What one optimizer step saw: the mean loss of the global batch (nats a token), the global gradient norm before
    clipping (None where the engine gives none), and whether the step was skipped (fp16 overflow)."""

    loss: float
    grad_norm: float | None
    skipped: bool


def deepspeed() -> Any:
    """DeepSpeed, imported quietly. On a CPU no op is compatible, so that none is compiled behind the user's back."""
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
    return deepspeed


def config(run: Run, dp: int) -> dict[str, Any]:
    """The DeepSpeed JSON of a run."""
    parallel, train = run.parallel, run.train
    offload = parallel.offload
    elements = parameters(FAMILIES[run.model.family](run.model, train), run.model.layers)
    zero: dict[str, Any] = {
        "stage": stage(run),
        "reduce_bucket_size": min(parallel.bucket, elements),  # made in full, however few gradients there are
        "allgather_bucket_size": parallel.bucket,
        "overlap_comm": parallel.overlap.data and run.cluster.device.kind == "cuda",
    }
    if offload.optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload.parameters:
        zero["offload_param"] = {"device": "cpu"}
    said: dict[str, Any] = {
        "train_batch_size": train.batch,
        "train_micro_batch_size_per_gpu": train.microbatch,
        "gradient_accumulation_steps": train.batch // (dp * train.microbatch),
        "gradient_clipping": train.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }
    if train.precision in ("bf16", "fp16"):
        said[train.precision] = {"enabled": True}
    if train.gradients == "fp32" and train.precision != "fp32":
        said["data_types"] = {"grad_accum_dtype": "fp32"}
        if train.precision == "bf16":
            said["bf16"]["immediate_grad_update"] = True  # else a bf16 copy of all gradients stands beside
    return said


def stage(run: Run) -> int:
    """The ZeRO stage that DeepSpeed is told. In half precision stage 0 takes a first step of nothing, which shifts Adam's
    bias correction: stage 1 computes the same and does not."""
    return stage_of(run.parallel.zero, half=run.train.precision != "fp32")


def decayed(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay, norms and biases don't."""
    rows = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [row for row in rows if row.dim() > 1], "weight_decay": weight_decay},
        {"params": [row for row in rows if row.dim() <= 1], "weight_decay": 0.0},
    ]


def optimizer(run: Run, module: nn.Module) -> torch.optim.Optimizer:
    """torch's own optimizer: DeepSpeed's is a compiled op on a CPU."""
    optim = run.optim
    groups = [group for group in decayed(module, optim.weight_decay) if group["params"]]
    match optim.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)


Read = Callable[[str, str, tuple[int, ...], int, int], Tensor]  # of name, kind, shape: so many flat elements from a start
Micro = Callable[[int], tuple[Tensor, Tensor, dict[str, Any]]]  # the i-th micro-batch's tokens, labels, further arguments


class ZeroEngine:
    """A module trained by DeepSpeed ZeRO; every replica steps together."""

    def __init__(self, run: Run, module: nn.Module, world: World) -> None:
        self.run, self.world, self.module = run, world, module
        self.micros = run.train.batch // (world.size * run.train.microbatch)
        self.clock: dict[str, float] = {}
        ds = deepspeed()
        ds.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)
        self.engine, self.stepper, _, _ = ds.initialize(model=module, optimizer=optimizer(run, module), config=config(run, world.size))

    def step(self, micro: Micro, lr: float, labels: int, count: Count | None = None) -> Stepped:
        """One optimizer step over all micro-batches; `labels` is how many labels of the global batch count.

        `count` is told what the first micro-batch makes this rank hold.
        """
        for group in self.stepper.param_groups:
            group["lr"] = lr
        before = self.engine.skipped_steps
        total = torch.zeros((), device=self.world.device)
        self.clock = dict.fromkeys(("data", "forward", "backward", "step"), 0.0)
        for index in range(self.micros):
            with self._timed("data"):
                tokens, wanted, further = micro(index)
            counting = count if index == 0 else None
            with self._timed("forward"), counting.forward(self.module, tokens, wanted, further) if counting else nullcontext():
                loss, _ = self.engine(tokens, wanted, **further)
                total += loss.detach().float()
            # DeepSpeed takes the mean over micro-batches and ranks; the loss is the mean over the global batch's labels.
            with self._timed("backward"):
                self.engine.backward(loss * (self.micros * self.world.size / labels))
            if counting:
                counting.backward(self.held())
            plain = self._plain_norm() if index == self.micros - 1 else None
            with self._timed("step"):
                self.engine.step()
        dist.all_reduce(total)
        norm = self.engine.get_global_grad_norm() if plain is None else plain
        return Stepped(
            loss=total.item() / labels,
            grad_norm=None if norm is None else float(norm),
            skipped=self.engine.skipped_steps > before,
        )

    def _plain_norm(self) -> Tensor | None:
        """The global gradient norm at stage 0, of which DeepSpeed gives none: every rank holds the whole, averaged gradients."""
        if stage(self.run):
            return None
        return torch.nn.utils.get_total_norm([each.grad for each in self.module.parameters() if each.grad is not None])

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Seconds of a part of the step, where kernels are not merely asked for: on a CPU."""
        start = perf_counter()
        yield
        if self.world.device.type == "cpu":
            self.clock[part] += perf_counter() - start

    def evaluate(self, tokens: Tensor, labels: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
        """(sum of losses, labels counted) of a batch, without gradients."""
        self.engine.eval()
        with torch.no_grad():
            found: tuple[Tensor, Tensor] = self.engine(tokens, labels, **further)
        self.engine.train()
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of each weight."""
        return {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in self.module.named_parameters()}

    def held(self) -> dict[str, int]:
        """Bytes by kind that this rank holds now."""
        return held_by(self.module, self.stepper)

    def partitions(self) -> Iterator[Partition]:
        """What this rank owns of the float32 weights and the optimizer's states."""
        return partitions(self.module, self.stepper, stage(self.run))

    def position(self) -> dict[str, Any]:
        """What the engine must remember beside its shards: steps that were taken, the loss scale of fp16."""
        taken = [int(state["step"]) for state in self._torch_optimizer().state.values() if "step" in state]
        scaler = getattr(self.stepper, "loss_scaler", None)
        scale = {name: getattr(scaler, name) for name in SCALE if isinstance(getattr(scaler, name, None), int | float)}
        return {"optimizer_steps": max(taken, default=0), "skipped": self.engine.skipped_steps, "scale": scale}

    def restore(self, read: Read, position: Mapping[str, Any]) -> None:
        """Take weights and optimizer states as `read` gives them, whatever layout they were saved in."""
        for part in self._mine():
            part.weight.copy_(read(part.name, "weight", part.shape, part.start, part.length))
            for kind, held in part.states():
                held.copy_(read(part.name, kind, part.shape, part.start, part.length))
            if "step" in part.state:
                part.state["step"] = torch.full_like(torch.as_tensor(part.state["step"], dtype=torch.float32), position["optimizer_steps"])
        self._spread(read)
        self.engine.skipped_steps = int(position["skipped"])
        scaler = getattr(self.stepper, "loss_scaler", None)
        for name, value in position["scale"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)

    def _mine(self) -> Iterator[Partition]:
        """What this rank steps: its partitions, or everything where nothing is sharded."""
        if stage(self.run) == 0:
            return (whole(name, each, self.stepper) for name, each in self.module.named_parameters())
        return self.partitions()

    def _spread(self, read: Read) -> None:
        """The weights that forward computes with, cast from float32: all of each, or at stage 3 this rank's."""
        for name, each in self.module.named_parameters():
            if stage(self.run) == 3:
                shape, start, length = share(each)
                target = each.ds_tensor.data.view(-1)[:length]  # type: ignore[attr-defined]
            else:
                shape, start, length, target = tuple(each.shape), 0, each.numel(), each.data.view(-1)
            if length:
                target.copy_(read(name, "weight", shape, start, length))

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = getattr(self.stepper, "optimizer", self.stepper)
        return found
