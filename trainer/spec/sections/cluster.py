"""The cluster of a run: nodes, their devices and hosts, and the links between them, in SI units."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from ..numbers.bounded import MOST_FLOAT, Count, NotNegative, Positive, PositiveShare, Share

SUSTAINED = 0.75  # share of a GPU's peak that large products keep up, where its file says no other


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator: memory bytes, bandwidth bytes/s, peak dense FLOP/s by precision."""

    name: str
    memory: Annotated[float, Meta(ge=1, le=MOST_FLOAT)] | Literal["auto"]
    bandwidth: Positive | None = None
    peak: dict[Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"], Positive] = field(default_factory=dict)
    kind: Literal["cuda", "cpu"] = "cuda"
    units: Count | None = None
    sustained: Share | None = SUSTAINED  # None: a CPU's, which is measured; until then all of `peak`, as `flash`
    flash: Share | None = 0.4
    streaming: Share = 0.8
    launch: NotNegative = 4e-6
    dispatch: NotNegative | None = 60e-6  # None: a CPU's, which is measured; until then nothing
    context: NotNegative = 0.0

    @property
    def dispatch_seconds(self) -> float:
        """The seconds in which the host dispatches one operator."""
        return self.dispatch or 0.0

    @property
    def product_share(self) -> float:
        """The share of `peak` that large products reach."""
        return 1.0 if self.sustained is None else self.sustained

    @property
    def attention_share(self) -> float:
        """The share of `peak` that fused attention reaches."""
        return 1.0 if self.flash is None else self.flash


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link per device: bytes/s in one direction, seconds per hop; `efficiency` is the share of the bandwidth that data gets."""

    bandwidth: Positive
    latency: NotNegative
    efficiency: PositiveShare = 0.8

    @property
    def rate(self) -> float:
        """Bytes/s of a long message."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, kw_only=True)
class NodeHost:
    """The processors of a node, to which a run may offload: memory bytes, bytes/s at which they read and write it, and bytes/s that a copy
    between one device and it reaches in one direction while all devices copy."""

    memory: Positive | None = None
    bandwidth: Positive | None = None
    link: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes x devices in each, and the two kinds of link: inside a node and between nodes."""

    nodes: Count
    gpus: Count
    device: Device
    inside: Link | None = None
    between: Link | None = None
    host: NodeHost = field(default_factory=NodeHost)
    storage: Positive | None = None
    price: Positive | None = None
    # Llama 3: 419 faults ended a run in 54 days on 16,384 H100s (arXiv:2407.21783 table 5).
    mtbf: Positive = 54 * 86400 * 16384 / 419
