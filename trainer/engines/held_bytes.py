"""What DeepSpeed and torch's optimizer hold on this rank, in bytes by kind: each storage counted once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..parallel.saved_bytes import Saved, counted

# Where the optimizers that DeepSpeed wraps around torch's keep tensors: stage 0 and 1 of bf16 with fp32 gradients, 1 and 2, 3.
# A storage that stands in two rows belongs to the first.
PLACES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("weights", ("bf16_groups_flat", "bit16_groups_flat", "lp_param_buffer")),
    ("optimizer", ("fp32_groups_flat_partition", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")),
    ("gradients", ("fp32_groups_gradients_flat", "averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer")),
    ("buffers", ("ipg_buckets",)),  # and what stage 3 has gathered
)
KINDS = tuple(kind for kind, _ in PLACES)


class Count:
    """The bytes of one step by kind: the most activations after any forward that it is told of, the rest when it is told."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._saved: list[Saved] = []

    @contextmanager
    def forward(self, modules: Sequence[nn.Module], *given: Any) -> Iterator[None]:
        """Around a forward pass: what it and those before it have saved, and hold still, beside weights and what they were given."""
        with counted(_parameters(modules), _inside(given)) as saved:
            yield
        self._saved.append(saved)
        held = sum(each.beside(_parameters(modules)) for each in self._saved)
        self.bytes["activations"] = max(held, self.bytes.get("activations", 0))

    def backward(self, found: Mapping[str, int]) -> None:
        """After the backward pass: what is held then."""
        self.bytes |= found


def held(modules: Sequence[nn.Module], stepper: Any) -> dict[str, int]:
    """Bytes by kind at this moment: weights, their float32 copies and the optimizer's states, gradients, buckets of messages."""
    seen: set[int] = set()
    found = dict.fromkeys(KINDS, 0)
    for kind, tensor in _tensors(modules, stepper):
        storage = tensor.untyped_storage()
        if storage.data_ptr() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[kind] += storage.nbytes()
    return found


def _tensors(modules: Sequence[nn.Module], stepper: Any) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor), one storage perhaps several times: the first names its kind."""
    yield from _of_parameters(modules)
    for kind, names in PLACES:
        for name in names:
            for tensor in _inside(getattr(stepper, name, None)):
                yield kind, tensor
                if tensor.grad is not None:
                    yield "gradients", tensor.grad
    for state in getattr(stepper, "optimizer", stepper).state.values():
        yield from (("optimizer", each) for each in _inside(state))


def _parameters(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    for module in modules:
        yield from module.parameters()


def _of_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for parameter in _parameters(modules):
        whole: Any = parameter
        own = getattr(whole, "ds_tensor", None)  # stage 3: this rank's part; the whole is gathered while it is computed with
        if own is not None:
            yield "weights", own.data
        yield "weights" if own is None else "buffers", parameter.data
        for name in ("grad", "grad_accum"):
            yield from (("gradients", each) for each in _inside(getattr(whole, name, None)))


def _inside(held: Any) -> Iterator[Tensor]:
    """The tensors in lists, tables, buckets and keys."""
    match held:
        case None:
            return
        case Tensor():
            yield held
        case Mapping():
            for each in held.values():
                yield from _inside(each)
        case list() | tuple():
            for each in held:
                yield from _inside(each)
        case _:
            for name in ("buffer", "states"):  # of a bucket of messages; of dropout's keys
                yield from _inside(getattr(held, name, None))
