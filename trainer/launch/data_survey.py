"""Facts about a run's data before any rank starts, from a child process that reads the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..spec.problem import Problem, Unreadable
from ..spec.run import Run

PATIENCE = 60.0  # time limit of a look, in seconds; preparing has no limit, and shows its progress
MODULE = "distrain.trainer.loop.data.survey"

Mode = Literal["look", "prepare"]


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Numbers of tokens to train on and of documents in a run's data; None where that is not known yet.

    `key` identifies the tokens and does not depend on the names of their files. `exact`: none of the numbers is an estimate. `epochs` are
    the tokens that an epoch of each source reads. `remarks` are lines for the user. `lengths`: equally likely tokens of a document; () if
    they are not known.
    """

    key: str | None
    train_tokens: int | None
    documents: int | None
    exact: bool
    epochs: tuple[int | None, ...]
    remarks: tuple[str, ...]
    lengths: tuple[int, ...] = ()


def names_files(run: Run) -> bool:
    """Whether a run's data section names files of the user's, or is wrong about them."""
    return bool(_paths(run)) or run.data.name in ("text", "tokens", "pairs", "preferences") or run.data.tokenizer != "bytes"


def are_local(run: Run) -> bool:
    """Whether a run's files should be on this machine: a run on other hosts may have them only there."""
    return run.launch.name == "local" or all(Path(path).expanduser().exists() for path in _paths(run))


def _paths(run: Run) -> list[str]:
    """Return the files, folders and patterns that a run trains on or validates with."""
    several = [run.data.path or (), *(run.data.validate or {}).values()]
    return [path for each in several for path in ((each,) if isinstance(each, str) else each)]


def survey_data(run: Run, mode: Mode, progress: Callable[[str], None] = lambda line: None) -> DataFacts:
    """Look at a run's data, or prepare them in the cache; raises Unreadable with all that is wrong with them.

    `progress` is called with a line that replaces the one before.
    """
    from msgspec import to_builtins

    from ..system.json_child import ask_json_child

    answers: dict[str, Any] = {}
    remarks: list[str] = []

    def on_message(message: dict[str, Any]) -> None:
        answers.update(message)
        match message:
            case {"progress": [what, done, total]} if total:
                progress(f"{what}: {100 * done / total:.0f} %")
            case {"remark": remark}:
                remarks.append(remark)

    request = {"data": to_builtins(run.data), "vocab": run.model.vocab, "seq": run.train.seq, "mode": mode}
    request["evaluate"] = run.train.evaluate.every > 0
    child = ask_json_child(MODULE, request, on_message, seconds=PATIENCE if mode == "look" else None)
    progress("")
    if problems := answers.get("problems"):
        raise Unreadable(Problem(rule=each["rule"], says=each["says"], mend=each["mend"]) for each in problems)
    if "facts" not in answers:
        why = child.complaint or f"the process that read them ended with {child.status}"
        raise Unreadable([Problem(rule="data", says=f"data={run.data.name} can't be read: {why}")])
    facts = answers["facts"]
    return DataFacts(
        key=facts["key"],
        train_tokens=facts["tokens"]["train"],
        documents=facts["documents"],
        exact=facts["exact"],
        epochs=tuple(each["epoch"] for each in facts["sources"]),
        remarks=tuple(remarks),
        lengths=tuple(facts["lengths"]),
    )
