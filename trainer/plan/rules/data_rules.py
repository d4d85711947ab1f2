"""Rules of data that change in the course of a run (`data.stages`), and of validation sets (`data.validate`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ...spec.numbers.as_text import plural
from ...spec.read import value_text
from ...spec.run import DataStage, Parallel, Run
from .broken_rule import BrokenRule

STAGES, VALIDATE = "stages", "validate"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")  # of a validation set: a part of keys in logs
WITHOUT_FILES = ("stdlib", "synthetic")  # values of data.name that read no files of the user's


def stages_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Each stage but the last ends at a token of the run, after the one before, and has a weight for each path, not all of them 0."""
    data, stages = run.data, run.data.stages
    if stages is None:
        return
    many = 1 if isinstance(data.path, str) else len(data.path or ())
    if not stages:
        yield BrokenRule(STAGES, "data.stages=[] names no stage", ((("data.stages", None),),))
    elif data.name in WITHOUT_FILES:
        says = f"data.stages blends paths, and data={data.name} has none"
        yield BrokenRule(STAGES, says, ((("data.stages", None),),), fix="set data=text or data=tokens, and data.path to a list")
    elif data.weights is not None:
        says = f"data.weights={value_text(data.weights)} blends the whole run, and data.stages has weights of its own"
        yield BrokenRule(STAGES, says, ((("data.weights", None),),))
    elif many:  # a path that is not set is a problem of the data
        yield from _weight_problems(stages, many)
        yield from _end_problems(stages)


def _weight_problems(stages: Sequence[DataStage], many: int) -> Iterator[BrokenRule]:
    for number, each in enumerate(stages):
        if len(each.weights) != many:
            says = f"data.stages[{number}].weights={_weights_text(each)} has {plural(len(each.weights), 'weight')} for "
            yield BrokenRule(STAGES, says + plural(many, "path"), fix="give each path of data.path one weight; 0 leaves it out of a stage")
            return
        if not any(each.weights):
            yield BrokenRule(STAGES, f"data.stages[{number}].weights={_weights_text(each)} reads no path", fix="set one above 0")
            return
    for path in range(many):
        if not any(each.weights[path] for each in stages):
            says = f"no stage of data.stages reads path {path + 1} of {many} of data.path: its weight is 0 in each"
            yield BrokenRule(STAGES, says, fix="leave the path and its weights out")


def _end_problems(stages: Sequence[DataStage]) -> Iterator[BrokenRule]:
    *others, last = stages
    if last.until is not None:
        says = f"data.stages[{len(others)}].until={_tokens_text(last.until)}: the last stage goes on to the end of the run"
        yield BrokenRule(STAGES, says, fix="leave its until out, or add the stage that follows")
    for number, each in enumerate(others):
        if each.until is None:
            says = f"data.stages[{number}] has no until, and a stage follows it"
            yield BrokenRule(STAGES, says, fix="set until to the tokens of the run that end it, as until: 2e12")
            return
    for number, (one, two) in enumerate(pairwise(others)):
        if (two.until or 0) <= (one.until or 0):
            says = f"data.stages[{number + 1}].until={_tokens_text(two.until)} is not after that of the stage before"
            yield BrokenRule(STAGES, says, fix="put the earlier stage first")
            return


def _weights_text(stage: DataStage) -> str:
    return value_text([f"{weight:g}" for weight in stage.weights])


def _tokens_text(tokens: float | None) -> str:
    return f"{tokens:.10g}".replace("e+", "e")


def validate_rule(run: Run, parallel: Parallel, microbatch: int) -> Iterator[BrokenRule]:
    """Validation sets have names that can be a part of keys in logs, and files."""
    data = run.data
    if data.validate is None:
        return
    if data.name == "synthetic":
        says = "data.validate names files, and a run on data=synthetic has no text like theirs"
        yield BrokenRule(VALIDATE, says, ((("data.validate", None),),), fix="set data=text or data=tokens")
        return
    for name, paths in data.validate.items():
        if not NAME.fullmatch(name):
            says = f"data.validate names a set {name!r}: it becomes a part of keys in logs"
            yield BrokenRule(VALIDATE, says, fix="begin it with a letter, then up to 31 letters, digits, - or _")
        elif not paths or not all(paths if isinstance(paths, tuple) else (paths,)):
            yield BrokenRule(VALIDATE, f"data.validate.{name}={value_text(paths)} names no file", fix=f"set data.validate.{name}=PATH")
