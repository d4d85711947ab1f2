"""Faulty ranks: each named run has the fault of a name, or those of several."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist
from torch import nn

from distrain.trainer.engines.deepspeed.engine import DeepSpeedAdapter
from distrain.trainer.engines.native import engine as engine_module
from distrain.trainer.engines.native.data_parallel.gradient_compression import BucketCompression
from distrain.trainer.engines.native.data_parallel.weight_buckets import WeightBucket
from distrain.trainer.engines.native.delayed_engine import DelayedEngine
from distrain.trainer.engines.native.engine import NativeEngine
from distrain.trainer.engines.native.pipeline import Pipeline
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.layers.transformer import head_exchange as exchange_module
from distrain.trainer.layers.transformer.transformer import Transformer
from distrain.trainer.loop import train as loop
from distrain.trainer.loop import validate as validate_module
from distrain.trainer.loop.checkpoint import host_copy as copy_module
from distrain.trainer.loop.checkpoint import save as save_module
from distrain.trainer.loop.checkpoint import shard_file as file_module
from distrain.trainer.loop.rank import run_rank
from distrain.trainer.plan.layout.schedules import gpipe
from distrain.trainer.plan.layout.update_delay import Delay
from distrain.trainer.prove.locate_departure import TRACED_SUFFIX

train: Any = loop  # the module whose functions the faults replace
validate: Any = validate_module
save: Any = save_module
host_copy: Any = copy_module
shard_file: Any = file_module
adapter: Any = DeepSpeedAdapter  # the classes whose methods they replace
native: Any = NativeEngine
engine: Any = engine_module
exchange: Any = exchange_module
bucket: Any = WeightBucket
pipeline: Any = Pipeline
transformer: Any = Transformer
compression: Any = BucketCompression
delayed: Any = DelayedEngine
delay: Any = Delay


def same_samples() -> None:
    """Every replica reads the samples of replica 0."""
    original = train.microbatch_samples
    train.microbatch_samples = lambda start, **place: original(start, **{**place, "dp_rank": 0})


def faster() -> None:
    """Learning rates are 1 % too high; the first step still has the right loss."""
    original = train.learning_rate
    train.learning_rate = lambda *arguments: 1.01 * original(*arguments)


def dies() -> None:
    """Rank 1 raises in its third step."""
    original = train.learning_rate

    def learning_rate(optim, step, steps):
        if step == 2 and os.environ["RANK"] == "1":
            raise ArithmeticError("what a rank may raise")
        return original(optim, step, steps)

    train.learning_rate = learning_rate


def poisons(first: int = 2, last: int = 2) -> None:
    """A gradient of the last rank is nan in steps `first` to `last` (from 0)."""
    original = train.train_step

    def train_step(run, setup, micro_batches, step, *rest):
        if not (first <= step <= last and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)):
            return original(run, setup, micro_batches, step, *rest)
        parameter = next(setup.engine.parts[-1].module.parameters())
        hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
        result = original(run, setup, micro_batches, step, *rest)
        hook.remove()
        return result

    train.train_step = train_step


def poisons_ever() -> None:
    """A gradient of the last rank is nan from the third step on."""
    poisons(2, 1 << 30)


def spikes() -> None:
    """The reported loss of step 21 is five nats too high."""
    original = train.train_step

    def train_step(run, setup, micro_batches, step, *rest):
        result = original(run, setup, micro_batches, step, *rest)
        return replace(result, loss=result.loss + 5.0) if step == 20 else result

    train.train_step = train_step


def loud_gradient() -> None:
    """A gradient of the last rank is a thousand times too large in step 21."""
    original = train.train_step

    def train_step(run, setup, micro_batches, step, *rest):
        if not (step == 20 and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)):
            return original(run, setup, micro_batches, step, *rest)
        parameter = next(setup.engine.parts[-1].module.parameters())
        hook = parameter.register_hook(lambda gradient: 1000 * gradient)
        result = original(run, setup, micro_batches, step, *rest)
        hook.remove()
        return result

    train.train_step = train_step


def loud_loss() -> None:
    """The loss of step 21 is three times too large."""
    original_step, original_sum, steps = train.train_step, native._sum_over_ranks, [0]

    def train_step(run, setup, micro_batches, step, *rest):
        steps[0] = step
        return original_step(run, setup, micro_batches, step, *rest)

    def sum_over_ranks(self, *given):
        sums = original_sum(self, *given)
        sums[0] *= 3 if steps[0] == 20 else 1
        return sums

    train.train_step, native._sum_over_ranks = train_step, sum_over_ranks


def no_finite_check() -> None:
    """No rank asks the others whether their numbers are finite."""
    adapter._is_finite = lambda self, loss: True


def extra_sum() -> None:
    """The ranks add up one number more than they need in each step."""
    original = adapter._is_finite

    def is_finite(self, loss):
        dist.all_reduce(loss.clone())
        return original(self, loss)

    adapter._is_finite = is_finite


def no_norm_sum() -> None:
    """Each tensor-parallel rank takes the norm of its own part of the gradients; it is too small to clip."""
    original = adapter._stage0_norm

    def stage0_norm(self):
        all_reduce, dist.all_reduce = dist.all_reduce, lambda *_, **__: None
        try:
            return original(self)
        finally:
            dist.all_reduce = all_reduce

    adapter._stage0_norm = stage0_norm


def extra_native_sum() -> None:
    """The ranks of engine native add up their loss once more in each step."""
    original = native._sum_over_ranks

    def sum_over_ranks(self, total, *others):
        dist.all_reduce(total.clone())
        return original(self, total, *others)

    native._sum_over_ranks = sum_over_ranks


def small_native_norm() -> None:
    """Engine native forgets a fifth of the gradients' squares."""
    original = native._sum_over_ranks

    def sum_over_ranks(self, *given):
        sums = original(self, *given)
        sums[1] *= 0.8
        return sums

    native._sum_over_ranks = sum_over_ranks


def newest_in_backward() -> None:
    """A pipeline without a flush runs each backward with the newest weights, not with those of its forward."""
    original = delayed.before_pass

    def before_pass(self, action):
        original(self, action)
        if action.kind == "B":
            self.versions.use(self.versions.newest)

    delayed.before_pass = before_pass


def one_later() -> None:
    """A pipeline without a flush computes gradients with weights that are one update older than they should be."""
    original = Delay.version
    delay.version = lambda *given: max(0, original(*given) - 1)


def larger_norm() -> None:
    """A stage of a pipeline without a flush clips by a norm that is larger than its own, as that of all stages is."""
    original = delayed._step_optimizer
    delayed._step_optimizer = lambda self, norm, is_finite: original(self, 1.2 * norm, is_finite)


def lost_error() -> None:
    """What compression leaves out of the gradients of a step is not added to the next step's."""
    original = compression.complete

    def complete(self):
        original(self)
        self.errors.zero_()

    compression.complete = complete


def other_order() -> None:
    """A pipeline runs all forwards first, whatever its schedule lists; that trains the same curve."""
    original = native._make_pipeline

    def make_pipeline(self):
        made = original(self)
        self._actions = [gpipe(stage, len(self._actions), self.micros) for stage in range(len(self._actions))]
        return made

    native._make_pipeline = make_pipeline


def lost_weights() -> None:
    """A stage forgets the weights' gradients of the last micro-batch that its schedule defers."""
    original = pipeline._weight_gradients

    def weight_gradients(self, action):
        if len(self._waiting) == 1 and not self._forwarded:
            self._waiting.clear()
        else:
            original(self, action)

    pipeline._weight_gradients = weight_gradients


def swapped_layers() -> None:
    """A stage runs its layers last first."""
    original = transformer.run_layers

    def run_layers(self, x, inputs):
        layers, self.layers = self.layers, nn.ModuleDict(reversed(self.layers.items()))
        try:
            return original(self, x, inputs)
        finally:
            self.layers = layers

    transformer.run_layers = run_layers


def gathers_once() -> None:
    """ZeRO 3 gathers weights once a step, whatever parallel.gather says."""
    engine.gathers_once = lambda parallel: True


def chunks_by_rank() -> None:
    """Context ranks that exchange tokens for heads have the tokens in the order of ranks, not in that of the sequence."""
    exchange._copy_to_sequence = lambda by_rank, whole: whole.copy_(by_rank.transpose(0, 1).flatten(1, 2))


def wrong_shard_group() -> None:
    """The ranks that share a copy of the shards sum a shard's gradients, not those that own the same shard."""

    def sum_copies(self):
        self._work = dist.all_reduce(self.shard_gradient, group=self.sharing.handle, async_op=True)

    bucket.sum_copies = sum_copies


def louder_report() -> None:
    """The reported loss is a thousandth too large."""
    original = train.train_step

    def train_step(*given):
        result = original(*given)
        return replace(result, loss=1.001 * result.loss)

    train.train_step = train_step


def same_evaluation() -> None:
    """An evaluation skips the first micro-batch."""
    original = validate.evaluate_unless_stopped

    def evaluate_unless_stopped(run, engine, grid, batches, samples, *rest):
        return original(run, engine, grid, batches, samples[run.train.microbatch :], *rest)

    validate.evaluate_unless_stopped = evaluate_unless_stopped


def late_writes() -> None:
    """The files of a checkpoint are complete only once the run has come two steps further."""
    original_step, original_sync, steps = train.train_step, shard_file._sync, [0]

    def train_step(*given):
        steps[0] += 1
        return original_step(*given)

    def sync(file):
        goal, deadline = int(re.findall(r"step_([0-9]+)", file.name)[-1]) + 2, monotonic() + 30
        while steps[0] < goal and monotonic() < deadline:
            sleep(0.001)
        original_sync(file)

    train.train_step, shard_file._sync = train_step, sync


def slow_writes() -> None:
    """A file of a checkpoint takes a fifth of a second longer."""
    original = shard_file._sync

    def sync(file):
        original(file)
        sleep(0.2)

    shard_file._sync = sync


def slow_copies() -> None:
    """A copy on the host takes a fifth of a second longer."""
    original = host_copy.HostCopy.take

    def take(self, shards):
        sleep(0.2)
        return original(self, shards)

    host_copy.HostCopy.take = take


def failed_writes() -> None:
    """The last rank can't write the checkpoint of step 4, nor that of the last step."""
    original = save._Save._write

    def write(self, folder, own):
        if self.rank == self.world - 1 and self.step in (4, 8):
            raise OSError(errno.EROFS, "read-only")
        return original(self, folder, own)

    save._Save._write = write


FAULTS = {each.__name__: each for each in (late_writes, slow_writes, slow_copies, failed_writes)}
FAULTS |= {each.__name__: each for each in (same_samples, faster, dies, poisons, poisons_ever, spikes)}
FAULTS |= {each.__name__: each for each in (extra_native_sum, small_native_norm, loud_gradient, loud_loss)}
FAULTS |= {each.__name__: each for each in (other_order, lost_weights, swapped_layers, wrong_shard_group, gathers_once, chunks_by_rank)}
FAULTS |= {each.__name__: each for each in (newest_in_backward, one_later, larger_norm, lost_error)}
FAULTS |= {each.__name__: each for each in (no_finite_check, extra_sum, no_norm_sum, louder_report, same_evaluation)}


def run_faulty_rank(faults: dict[str, str], path: Path, channel: Channel) -> int:
    """Run a rank, with its run's faults if it has any."""
    for fault in faults.get(path.parent.name.removesuffix(TRACED_SUFFIX), "").split():
        FAULTS[fault]()
    return run_rank(path, channel)
