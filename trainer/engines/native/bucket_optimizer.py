"""The optimizer's step of engine `native` over buckets of weights: torch's own optimizer, or one kernel a bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel.process_groups import Grid
from ...plan.costs.muon import MUON
from ...plan.costs.precision import has_moments
from ...plan.native.optimizer_step import stepped_at_once
from ...spec.derived.width_scaling import width_factor
from ...spec.run import Run
from ..held_bytes import tensors_in
from ..torch_optimizer import optimizer_of_groups
from .adamw_kernel import has_kernel, step_weight
from .data_parallel.sharded_weights import ShardedWeight
from .data_parallel.weight_buckets import MASTER_DTYPE, WeightBucket
from .host_optimizer import HostOptimizer
from .muon import MuonStep
from .rounded_moments import TAKEN, MomentRounding, step_adamw, step_sgd
from .weight_average import WeightAverage


class BucketOptimizer:
    """Steps this rank's float32 weights, and gathers those that other ranks step.

    Muon steps buckets of matrices, AdamW those of all other weights. Moments in bfloat16 or 8 bits are stepped part by part
    (rounded_moments.py). AdamW divides its gradients and skips by itself, from numbers on the device: the host need not wait for the norm.
    On a GPU it is one kernel a bucket, elsewhere torch's fused one. Where the optimizer is offloaded, the host steps (host_optimizer.py),
    and waits for the norm.
    """

    def __init__(
        self,
        run: Run,
        grid: Grid,
        buckets: Sequence[WeightBucket | ShardedWeight],
        device: torch.device,
        types: tuple[torch.dtype, torch.dtype],
        warn: Callable[[str], None],
        modules: Sequence[nn.Module],
    ) -> None:
        """`types` are those of forward's weights and of gradients; `modules` are this rank's parts, which have the weights."""
        others = [each for each in buckets if not each.kind.matrices]
        masters = defaultdict[tuple[bool, bool], list[Tensor]](list)
        for each in others:
            masters[each.kind.decays, each.kind.by_width].append(each.master)
        groups = []
        for (decays, by_width), rows in masters.items():
            divisor = width_factor(run) if by_width else 1.0
            decay = run.optim.weight_decay * divisor if decays else 0.0  # rate times decay is that of the narrow model
            groups.append({"params": rows, "weight_decay": decay, "rate_divisor": divisor})
        self.optimizer = optimizer_of_groups(run, groups)
        self._rounding = rounding = MomentRounding(run) if run.optim.moments != "fp32" and has_moments(run.optim) else None
        if rounding:
            rounding.make_states(self.optimizer, others)
        self._group_of = {master: group for group in self.optimizer.param_groups for master in group["params"]}
        self._buckets, self._is_adamw = others, run.optim.name in ("adamw", MUON)
        self._matrices = [each for each in buckets if each.kind.matrices]
        self._muon = MuonStep(run, grid, self._matrices, self.optimizer, rounding) if self._matrices else None
        on_host = [each for each in others if each.on_host]
        gradient = MASTER_DTYPE if any(isinstance(each, ShardedWeight) for each in on_host) else types[1]
        self.host = HostOptimizer(self.optimizer, on_host, device, (types[0], gradient), rounding) if on_host else None
        self._average = WeightAverage(run, buckets, self.optimizer, modules, device) if run.optim.ema else None
        self.steps_in_one_kernel = self._is_adamw and self.host is None and has_kernel(device, *types, rounding, warn)

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the steps to come."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr / group["rate_divisor"]
        if self._muon:
            self._muon.lr = lr

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) of the optimizer's states, and of what copies to and from the host go through."""
        kind = "host" if self.host else "optimizer"
        for state in self.optimizer.state.values():
            yield from ((kind, each) for each in tensors_in(state))
        yield from ((kind, each) for each in self.host.held_tensors()) if self.host else ()

    def step(self, divisor: Tensor, is_finite: Tensor, *, scales: bool) -> None:
        """Step with the gradients over `divisor`, unless a number is not finite; without `scales` it is 1."""
        if self._muon and not is_finite:
            return
        self._step_others(divisor, is_finite, scales=scales)
        if self._muon:
            self._muon.step(divisor.float())
            self._finish(self._matrices)
        if self._average:
            self._average.update(is_finite)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """While the block runs, have forward use the average of the weights, where the run keeps one."""
        return self._average.shown() if self._average else nullcontext()

    def _step_others(self, divisor: Tensor, is_finite: Tensor, *, scales: bool) -> None:
        if self.host:
            if is_finite:
                self.host.step(divisor)
            return
        if self.steps_in_one_kernel:
            self._step_in_one_kernel(divisor.float(), is_finite.float())
            return
        if self._rounding:
            self._step_in_parts(self._rounding, divisor.float(), is_finite)
            return
        optimizer: Any = self.optimizer
        if self._is_adamw:
            optimizer.grad_scale = divisor.float() if scales else None
            optimizer.found_inf = is_finite.logical_not().float()
        elif not is_finite:
            return
        gathers = []
        for buckets in self._stepped_together():
            for bucket in buckets:
                gradient = bucket.shard_gradient.to(bucket.master.dtype)
                bucket.master.grad = gradient.div_(divisor) if scales and not self._is_adamw else gradient
            self.optimizer.step()  # of these buckets alone: no other has a gradient now
            for bucket in buckets:
                bucket.master.grad = None
                bucket.copy_master()
                gathers.append(bucket.gather())
        for work in filter(None, gathers):
            work.wait()

    def _finish(self, buckets: Sequence[WeightBucket | ShardedWeight]) -> None:
        """Give forward the stepped weights of buckets, other ranks' too."""
        for bucket in buckets:
            bucket.copy_master()
        for work in filter(None, [bucket.gather() for bucket in buckets]):
            work.wait()

    def _step_in_one_kernel(self, divisor: Tensor, keep: Tensor) -> None:
        """Step each bucket with AdamW, and gather the others' shards of it; `keep` is 0 where a number is not finite."""
        gathers = []
        for bucket in self._buckets:
            step_weight(self.optimizer, self._group_of[bucket.master], bucket, divisor, keep, self._rounding)
            gathers.append(bucket.gather())
        for work in filter(None, gathers):
            work.wait()

    def _step_in_parts(self, rounding: MomentRounding, divisor: Tensor, is_finite: Tensor) -> None:
        """Step each bucket part by part, so that few moments are there in float32 at once, and gather the others' shards of it."""
        if not self._is_adamw and not is_finite:
            return
        gathers, skip = [], is_finite.logical_not().float()
        for bucket in self._buckets:
            weights, state, group = bucket.master.data, self.optimizer.state[bucket.master], self._group_of[bucket.master]
            most, gradient = stepped_at_once(weights.device.type), bucket.shard_gradient
            for part in rounding.parts(bucket, state[TAKEN] + 1, most):
                own = gradient[part.place].to(weights.dtype)
                if self._is_adamw:
                    step_adamw(part, weights, own, state, group, divisor=divisor, skip=skip)
                else:
                    step_sgd(part, weights, own, state, group, divisor)
            state[TAKEN] += is_finite
            bucket.copy_master()
            gathers.append(bucket.gather())
        for work in filter(None, gathers):
            work.wait()

    def _stepped_together(self) -> list[list[WeightBucket | ShardedWeight]]:
        """Return the buckets, those whose gradients must be cast one by one: their float32 copies are never all there."""
        buckets = list(self._buckets)
        return [buckets] if all(each.shard_gradient.dtype == each.master.dtype for each in buckets) else [[each] for each in buckets]
