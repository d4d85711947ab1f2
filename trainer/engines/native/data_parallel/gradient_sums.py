"""What the ways of summing a bucket's gradients over the data axis have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from .parameter_servers import ServerMessages


class SumRounds(Protocol):
    """A sum in several messages, each of which needs the one before. Each method returns the message under way, or None."""

    is_on: bool

    def begin(self) -> Any:
        """Begin the first one, once all gradients have arrived."""

    def go_on(self) -> Any:
        """Begin the second one, once the first has arrived."""

    def complete(self) -> Any:
        """Make the gradients whole, once the second has arrived."""

    def held_tensors(self) -> Sequence[Tensor]:
        """Return all that is kept beside the gradients."""


def received_tensors(work: Any) -> Sequence[Tensor]:
    """Return the gradients of other ranks that a message under way brings to a parameter server; none of other messages."""
    return work.added if isinstance(work, ServerMessages) else ()


class SumUnderWay(NamedTuple):
    """A step's gradients of a bucket while other steps are computed: what autograd added to, and the sum that is under way."""

    gradients: Tensor | None
    held: dict[nn.Parameter, Tensor]
    scattered: Tensor | None
    work: Any

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) of all that it keeps."""
        yield from (("gradients", each) for each in (self.gradients, self.scattered) if each is not None)
        yield from (("buffers", each) for each in received_tensors(self.work))
