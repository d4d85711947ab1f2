"""What an engine does not run, and the changes that it names first."""

from __future__ import annotations

import pytest

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.engines import ENGINES
from distrain.trainer.plan.engines.engine_limits import exceeded_limits
from distrain.trainer.spec.changed_run import overrides

NATIVE = ("llama3_8b_1node", "engine=native")
POWER = "parallel.compress.name=powersgd"

# fmt: off
LIMITS = (
    (("parallel.pp=2", "parallel.tp=2", "parallel.scatter=true"),
     "parallel.scatter=true", ("parallel.scatter=false", "parallel.scatter=false parallel.sequence=true")),
    ((POWER, "parallel.zero=0", "parallel.sync.every=4"),
     f"{POWER} with parallel.sync.every=4", ("parallel.sync.every=1", "parallel.compress.name=none")),
    ((POWER, "parallel.zero=1"),
     f"{POWER} with parallel.zero=1", ("parallel.zero=0", "parallel.compress.name=none")),
    (("parallel.reduce=hierarchical", "parallel.zero=0", "parallel.staleness=1"),
     "parallel.reduce=hierarchical with parallel.staleness=1", ("parallel.staleness=0", "parallel.reduce=ring")),
)
# fmt: on


@pytest.mark.parametrize(("words", "value", "candidates"), LIMITS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_limit_names_the_other_key_and_what_gives_either_up(words: tuple[str, ...], value: str, candidates: tuple[str, ...]) -> None:
    run = load_recipe(NATIVE[0], [*NATIVE[1:], *words])
    (limit,) = exceeded_limits(ENGINES["native"], run, run.parallel)
    assert limit.says == f"engine native does not run {value}"
    assert tuple(" ".join(overrides(each)) for each in limit.candidates) == candidates
