"""Ranks that train with an added engine, schedule or family."""

from __future__ import annotations

from pathlib import Path

from distrain.tests.rank_programs import added_family, added_schedule, plain_engine
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.loop.rank import run_rank
from distrain.trainer.models.families import FAMILIES
from distrain.trainer.plan.engines import ENGINES
from distrain.trainer.plan.layout.schedules import SCHEDULES


def run_added_rank(path: Path, channel: Channel) -> int:
    """Run a rank whose tables have the added rows."""
    ENGINES[plain_engine.ROW.name] = plain_engine.ROW
    SCHEDULES["eager_1f1b"] = added_schedule.ROW
    FAMILIES["side_by_side"] = added_family.ROW
    return run_rank(path, channel)
