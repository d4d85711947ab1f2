"""A stage of the data of a run (`data.stages`): a blend of its sources."""

from __future__ import annotations

from dataclasses import dataclass

from ..numbers.bounded import NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class DataStage:
    """The share of the samples for each path of data.path, until so many tokens of the run are read; null: to its end.

    Runs end on better data than they begin with: Llama 3 (arXiv:2407.21783 section 3.4.3), OLMo 2 (arXiv:2501.00656 section 4). nanotron
    calls it data_stages.
    """

    weights: tuple[NotNegative, ...]
    until: Positive | None = None
