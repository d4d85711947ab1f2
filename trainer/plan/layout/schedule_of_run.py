"""The schedule of a run: a row of SCHEDULES, or the action lists of a CSV file."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ...spec.run import Parallel
from .action_csv import ActionLists, read_action_csv
from .schedules import SCHEDULES, Schedule
from .update_delay import Delay

SUFFIX = ".csv"
PIPEDREAM = "pipedream"
# Vertical sync: a micro-batch meets the same version on every stage, the newest one of the first stage (arXiv:1806.03377).
VERTICAL_PIPEDREAM = replace(SCHEDULES[PIPEDREAM], delay=Delay(late=lambda stage, stages: stages - 1, each_micro_batch=True))


def schedule_of(parallel: Parallel) -> Schedule:
    """The schedule that a legal layout names; without stages a file is not read. Raises KeyError where there is no
    such schedule, ValueError for a file that is none."""
    row = SCHEDULES.get(parallel.schedule)  # a plan asks dozens of times
    if row is not None:
        return VERTICAL_PIPEDREAM if parallel.vertical and parallel.schedule == PIPEDREAM else row
    if not is_file(parallel.schedule):
        raise KeyError(parallel.schedule)
    return SCHEDULES["1f1b"] if parallel.pp == 1 else _schedule_of_lists(parallel.actions or "", parallel.pp)


def legal_schedule(parallel: Parallel) -> Schedule | None:
    """The schedule that a layout names; None where it has no stages, or names none that is legal, which is a problem of its own."""
    if parallel.pp == 1:
        return None
    try:
        return schedule_of(parallel)
    except (KeyError, ValueError):
        return None


def delay_of(parallel: Parallel) -> Delay | None:
    """How late a layout updates its weights; None where each step flushes, as it does without stages."""
    schedule = legal_schedule(parallel)
    return schedule.delay if schedule else None


def is_file(schedule: str) -> bool:
    """Whether a schedule is named by a file."""
    return schedule.endswith(SUFFIX)


@lru_cache(maxsize=8)
def read_lists(text: str, stages: int) -> ActionLists:
    """The action lists of a file's text; raises ValueError with one line."""
    return read_action_csv(text, stages)


@lru_cache(maxsize=8)
def _schedule_of_lists(text: str, stages: int) -> Schedule:
    lists = read_lists(text, stages)
    return Schedule(
        actions=lambda stage, stages, micros, chunks: list(lists.actions[stage]),
        folded=lists.folded,
        chunked=lists.chunks > 1 and not lists.folded,
        defers_weight_gradients=any(action.kind == "W" for actions in lists.actions for action in actions),
        simulated=True,
        source="a file",
    )
