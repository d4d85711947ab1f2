"""The fork server of ranks that train with an added engine, schedule or family. Run by path."""

from __future__ import annotations

from distrain.tests.rank_programs import added_family, added_schedule, plain_engine
from distrain.trainer.loop.forkserver.server import QUESTIONS, serve
from distrain.trainer.loop.rank import run_rank
from distrain.trainer.models.families import FAMILIES
from distrain.trainer.plan.engines import ENGINES
from distrain.trainer.plan.layout.schedules import SCHEDULES

if __name__ == "__main__":
    ENGINES[plain_engine.ROW.name] = plain_engine.ROW
    SCHEDULES["eager_1f1b"] = added_schedule.ROW
    FAMILIES["side_by_side"] = added_family.ROW
    serve(run_rank, QUESTIONS)
