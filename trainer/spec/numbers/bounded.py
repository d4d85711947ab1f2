"""Types of numbers with bounds, so that products and quotients of several stay finite."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST = 10**18  # the largest count: products of several are still exact, and finite as floats
MOST_LAYERS = 100_000  # a search counts them one by one
LEAST_FLOAT, MOST_FLOAT = 1e-30, 1e30  # bounds of a nonzero number: quotients and products of several stay finite

Count = Annotated[int, Meta(ge=1, le=MOST)]
Natural = Annotated[int, Meta(ge=0, le=MOST)]
LayerCount = Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Meta(ge=LEAST_FLOAT, le=MOST_FLOAT)]
AtLeast1 = Annotated[float, Meta(ge=1, le=MOST_FLOAT)]
NotNegative = Annotated[float, Meta(ge=0, le=MOST_FLOAT)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Below1 = Annotated[float, Meta(ge=0, lt=1)]
