"""Offloading to the host: what a rank holds in its memory, what a step copies, and how long the optimizer takes there (ZeRO-Offload:
arXiv:2101.06840)."""

from __future__ import annotations

from typing import NamedTuple

from ...spec.run import Run
from ..axes.dp import CONTENTION, HOST, DataMessages

TO_HOST, TO_DEVICE = "to_host", "to_device"

# Share of a host's memory bandwidth with which optimizers step. Published steps reached 0.14 to 0.5 (tests/plan/test_offload.py):
# sockets, bound cores and other work decide.
HOST_STREAMING = 0.25


class HostBytes(NamedTuple):
    """Bytes of a rank's states in its host's memory; `buffers` are those that copies go through, `snapshot` what a checkpoint is written
    from while training goes on."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    snapshot: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class HostRates(NamedTuple):
    """Bytes/s of one rank while all ranks of its node work: in the host's memory, and of copies in one direction."""

    memory: float
    link: float


class GradientCopies(NamedTuple):
    """Copies of a rank's gradients under backward: the direction, bytes of an element, in how many passes of a step."""

    verb: str
    size: int
    passes: int


class HostWork(NamedTuple):
    """The optimizer's step of a rank on its host, in bytes: read and written there, copied to it and back. `exposed` of the copies come
    before the host has begun or after it has ended, the others go on beside it; None: all come before or after."""

    moved: int
    to_host: int = 0
    to_device: int = 0
    exposed: int | None = None

    def seconds(self, rates: HostRates) -> float:
        """The seconds that it takes."""
        stepping, fetching, returning = self.moved / rates.memory, self.to_host / rates.link, self.to_device / rates.link
        if self.exposed is not None:
            return max(stepping, fetching, returning) + self.exposed / rates.link
        return stepping + fetching + returning

    def copies(self, rates: HostRates | None) -> list[DataMessages]:
        """Its copies; the step has their seconds."""
        return [
            copies(verb, size, 1, 1, rates)._replace(least=0.0, in_step=True)
            for verb, size in ((TO_HOST, self.to_host), (TO_DEVICE, self.to_device))
            if size
        ]


def host_rates(run: Run) -> HostRates | None:
    """Return the rates of a rank's host; None: one is not stated, or the device is a CPU, whose memory is the host's."""
    cluster = run.cluster
    if cluster.device.kind == "cpu" or cluster.host.bandwidth is None or cluster.host.link is None:
        return None
    return HostRates(cluster.host.bandwidth * HOST_STREAMING / cluster.gpus, cluster.host.link)


def pinned_bytes(size: int) -> int:
    """Return the bytes that torch pins for `size`: a power of two (aten/src/ATen/core/CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length() if size else 0


def copies(
    verb: str, size: int, parts: int, rounds: int, rates: HostRates | None, *, forward: bool = False, overlap: bool = False
) -> DataMessages:
    """`size` bytes between a device and its host in `parts` copies, `rounds` times a step, each round under a forward or a backward, of
    which all parts but one may hide, or (no `overlap`) under nothing."""
    payload = -(-size // parts)
    seconds = payload * parts / rates.link if rates else 0.0
    least = max(seconds / parts, seconds * CONTENTION) if overlap else seconds
    return DataMessages(verb, payload, parts, rounds, payload, HOST, seconds, least, forward)
