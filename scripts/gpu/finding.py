"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Measured figures in SI units, as JSON, and what is not as it must be, a line each; none: the check has passed."""

    figures: Mapping[str, Any]
    departures: tuple[str, ...] = field(default=())


class CheckBroken(Exception):
    """A check could not be carried out, with the reason."""


class CheckSkipped(Exception):
    """A check needs another machine than this one, with the reason."""
