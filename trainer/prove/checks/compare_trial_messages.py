"""Compares the messages that a layout's ranks counted in one step with those that its plan says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ...plan.compare_rank_messages import CONTROL, ComparedMessages, compare_rank_messages
from ...spec.derived.batch_levels import level_of_step, run_at_batch
from ...spec.numbers.as_text import size_text
from ..trials.trial import Trial
from .message_order import order_difference

VERDICTS = ("equal", "explained", "differs")  # from good to bad: a layout's verdict is the worst of its lines'
SHOWN = 3  # differing lines that are put into words
TRACED_STEPS = 2  # of a start, in which DeepSpeed's ZeRO 3 traces the order of weights, and gathers and sends more than later


def compare_trial_messages(trial: Trial) -> dict[str, Any] | None:
    """Compare the messages that a layout counted with its plan; None if it counted none, or other ones in a step that is traced.

    Returns {"verdict", "says": the differences in words, "ranks": the compared lines of each rank}. Orders of collectives that can
    deadlock are a difference too.
    """
    ledger = _read_ledger(trial)
    if ledger is None:
        return None
    run = run_at_batch(trial.run, level_of_step(trial.run.train, ledger["step"] - 1).batch)  # that of the step whose messages are counted
    ranks = [compare_rank_messages(run, rank, rows, averages=ledger["averages"]) for rank, rows in enumerate(ledger["ranks"])]
    is_traced = trial.plan.engine == "zero" and trial.run.parallel.zero == 3 and ledger["step"] - ledger["first"] <= TRACED_STEPS
    verdicts = {line.verdict for lines in ranks for line in lines if line.axis != CONTROL or line.verdict == "differs"}
    if is_traced and VERDICTS[-1] in verdicts:
        return None
    order = order_difference(trial.folder)
    return {
        "verdict": VERDICTS[-1] if order else next((each for each in reversed(VERDICTS) if each in verdicts), VERDICTS[0]),
        "says": order or _sentence(list(_differences(ranks))),
        "ranks": [[asdict(line) for line in lines] for lines in ranks],
    }


def message_differences(messages: Mapping[str, Any] | None) -> str:
    """How the messages of a layout differ from its plan, in words; "" if they don't."""
    return str(messages["says"]) if messages and messages["verdict"] == "differs" else ""


def _read_ledger(trial: Trial) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        ledger: dict[str, Any] = json.loads((trial.folder / "ledger.json").read_text())
        return ledger if ledger.keys() >= {"ranks", "averages", "step", "first"} else None
    return None


def _differences(ranks: Sequence[Sequence[ComparedMessages]]) -> Iterator[str]:
    """Yield each line that differs, of the first rank where it does: `tp all_reduce: counted 24 of 16.0 KiB, planned 26`."""
    seen: set[tuple[str, str, int | None]] = set()
    for lines in ranks:
        for line in lines:
            key = (line.axis, line.verb, line.payload)
            if line.verdict == "differs" and key not in seen:
                seen.add(key)
                yield f"{line.axis} {line.verb}: {_counts(line)}"


def _sentence(differences: Sequence[str]) -> str:
    more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return f"messages differ from the plan: {'; '.join(differences[:SHOWN])}{more}" if differences else ""


def _counts(line: ComparedMessages) -> str:
    if line.payload is not None:
        named = f" ({line.why.partition('; ')[2]})" if line.axis == CONTROL and "; " in line.why else ""
        return f"counted {line.counted_count} of {size_text(line.payload)}, planned {line.planned_count}{named}"
    return f"counted {size_text(line.counted_bytes)}, planned {size_text(line.planned_bytes)}"
