"""What is known of a run's data before any rank is started: asked of a child process that reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..spec.problem import Problem, Unreadable
from ..spec.run import Run

PATIENCE = 60.0  # seconds that a look may take; preparing shows how far it is, and takes what it takes
MODULE = "distrain.trainer.loop.data.survey"

Mode = Literal["look", "prepare"]


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a run's data hold: tokens that train and that validate, documents, None where that is not known yet.

    `key` names the tokens, whatever words name their files. `exact`: nothing of it is an estimate. `sources` are (weight, tokens
    that train) of each. `remarks` are worth a line.
    """

    key: str | None
    train_tokens: int | None
    validation_tokens: int | None
    documents: int | None
    exact: bool
    sources: tuple[tuple[float, int | None], ...]
    remarks: tuple[str, ...]


def names_files(run: Run) -> bool:
    """Whether a run's data section names files of the user's, or is wrong about them."""
    return run.data.path is not None or run.data.name in ("text", "tokens") or run.data.tokenizer != "bytes"


def are_local(run: Run) -> bool:
    """Whether this machine is to have a run's files: those of runs that other hosts train may lie there alone."""
    paths = (run.data.path,) if isinstance(run.data.path, str) else run.data.path or ()
    return run.launch.name == "local" or all(Path(path).expanduser().exists() for path in paths)


def survey_data(run: Run, mode: Mode, progress: Callable[[str], None] = lambda words: None) -> DataFacts:
    """Look at a run's data, or prepare them in the cache; raises Unreadable with all that is wrong with them.

    `progress` is told how far it is, in a line that replaces the one before.
    """
    from msgspec import to_builtins

    from ..system.json_child import ask_json_child

    said: dict[str, Any] = {}
    remarks: list[str] = []

    def hear(line: dict[str, Any]) -> None:
        said.update(line)
        match line:
            case {"progress": [what, done, total]} if total:
                progress(f"{what}: {100 * done / total:.0f} %")
            case {"remark": remark}:
                remarks.append(remark)

    document = {"data": to_builtins(run.data), "vocab": run.model.vocab, "seq": run.train.seq, "mode": mode}
    document["evaluate"] = run.train.evaluate.every > 0
    answer = ask_json_child(MODULE, document, hear, seconds=PATIENCE if mode == "look" else None)
    progress("")
    if problems := said.get("problems"):
        raise Unreadable(Problem(rule=each["rule"], says=each["says"], mend=each["mend"]) for each in problems)
    if "facts" not in said:
        why = answer.complaint or f"the process that read them ended with {answer.status}"
        raise Unreadable([Problem(rule="data", says=f"data={run.data.name} can't be looked at: {why}")])
    facts = said["facts"]
    return DataFacts(
        key=facts["key"],
        train_tokens=facts["tokens"]["train"],
        validation_tokens=facts["tokens"]["validation"],
        documents=facts["documents"],
        exact=facts["exact"],
        sources=tuple((each["weight"], each["train"]) for each in facts["sources"]),
        remarks=tuple(remarks),
    )
