"""Seconds and bytes of a fused core of attention that depend on how ranks share a sequence, and which documents it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...models.ops.op_table import Op
from ...models.ops.shared_ops import LOG_SUMS, windowed_share
from ...spec.derived.document_kernel import has_document_kernel
from ...spec.derived.document_pairs import DocumentLengths, document_lengths
from ...spec.run import Run
from .local_tensors import BlockSplit, LocalTensors
from .number_or_array import is_number
from .op_seconds import OpSeconds
from .pass_seconds import RankOp
from .roofline import DeviceRates
from .uneven_documents import SeenKeys, slowest_part


def is_fused_core(op: Op) -> bool:
    """Return whether an op is a fused core of attention."""
    return op.core and op.product is not None and op.product.fused


def with_core_again(op: Op, seconds: OpSeconds, again: int) -> OpSeconds:
    """The seconds of an op, whose backward runs a fused core of attention `again`, 0 or 1 times."""
    return seconds._replace(input_gradients=seconds.input_gradients + again * seconds.forward) if is_fused_core(op) else seconds


def core_seconds(ops: Iterable[Op], ranked: Iterable[RankOp]) -> float:
    """The seconds of the fused cores among a block's ops, in forward, backward and the forward that recomputation runs again."""
    seconds = [each for op, each in zip(ops, ranked, strict=False) if is_fused_core(op)]
    return sum([each.seconds.forward * (1 + each.repeats) + each.seconds.input_gradients for each in seconds])


def log_sum_bytes(op: Op, local: LocalTensors) -> int:
    """The bytes of the log-sum-exp that a fused core of attention saves; 0 for other ops."""
    return local.bytes(LOG_SUMS) if is_fused_core(op) and LOG_SUMS in op.saves_torch else 0


def kernel_documents(run: Run) -> DocumentLengths | None:
    """The documents whose lengths decide what attention's kernel computes; None: they are not stated, or a mask keeps documents apart."""
    return document_lengths(run) if has_document_kernel(run) else None


def wasted_keys(device: DeviceRates) -> float:
    """The keys that a kernel wastes for each query, in forward and in backward, which takes 2.5 times as long."""
    forward, backward = device.flash_tokens
    return (forward + 2.5 * backward) / 3.5


def uneven_parts(run: Run, split: BlockSplit, device: DeviceRates | None) -> float:
    """How much longer the core takes on the slowest of the ranks that share a sequence, each with all heads of its queries: documents
    differ, which several sequences even out, and under a window the first tokens see fewer keys."""
    lengths, windowed = kernel_documents(run), windowed_share(run.model, run.train.seq)
    if (lengths is None and not windowed) or device is None or run.parallel.cp_comm != "all_gather":
        return 1.0
    degree, seen = split.degree("cp"), SeenKeys(wasted_keys(device), run.model.window or 0, windowed)
    if is_number(degree):
        longer: Any = slowest_part(lengths, run.train.seq, degree, seen)
    else:
        import numpy

        numbers, places = numpy.unique(degree, return_inverse=True)
        longer = numpy.array([slowest_part(lengths, run.train.seq, int(each), seen) for each in numbers])[places]
    share: float = 1 + (longer - 1) / (split.microbatch**0.5 if lengths else 1)
    return share
