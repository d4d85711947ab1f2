"""What the ways of summing a bucket's gradients over the data axis have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn


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


class SumUnderWay(NamedTuple):
    """A step's gradients of a bucket while other steps are computed: what autograd added to, and the sum that is under way."""

    gradients: Tensor | None
    held: dict[nn.Parameter, Tensor]
    scattered: Tensor | None
    work: Any

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield what it keeps."""
        yield from (each for each in (self.gradients, self.scattered) if each is not None)
