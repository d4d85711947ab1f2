"""A run's length in epochs, which is no key here: how many steps they are, where the data are on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

from ...trainer.spec.numbers.as_text import plural
from ...trainer.spec.problem import Problem, Unreadable
from ...trainer.spec.read import read_run
from ...trainer.spec.run import Run
from ..keys.synonyms import EPOCHS, find_synonym

_PREPARED = 50_000_000  # tokens up to which data are tokenized to count them; of more a sample is


def with_steps(problems: Iterable[Problem], config: Mapping[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Return problems, each key of epochs with the steps that they are; as they are where that is not known."""
    problems = list(problems)
    named = [each for each in problems if (found := find_synonym(each.key)) and EPOCHS in found.names]
    if len(problems) > 1 or not named:
        return problems
    key = named[0].key
    with suppress(Unreadable, ValueError, OSError, TypeError, KeyError):
        epochs = float(_value_of(key, config, overrides))
        if 0 < epochs < 1e6:
            return [replace(named[0], mend=_steps_text(epochs, read_run(_without(config, key))))]
    return problems


def _value_of(key: str, config: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    """Return the value of a key as it was typed, or as a file has it; raises KeyError."""
    for each in reversed(overrides):
        name, equals, value = each.lstrip("+-").partition("=")
        if equals and name == key:
            return value
    found: Any = config
    for name in key.split("."):
        found = found[name]
    return found


def _without(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a copy of a config without a key."""
    copy = deepcopy(dict(config))
    node: Any = copy
    *sections, name = key.split(".")
    for section in sections:
        node = node.get(section, {})
    node.pop(name, None)
    return copy


def _steps_text(epochs: float, run: Run) -> str:
    """Return how many steps the epochs of a run's data are; raises Unreadable where the data can't be read, ValueError where what an epoch
    is is not known."""
    from ...trainer.launch.data_survey import are_local, survey_data
    from ...trainer.spec.derived.batch_levels import steps_until

    if run.data.name == "synthetic" or not are_local(run):
        raise ValueError("no data here")
    facts = survey_data(run, "look")
    if not facts.exact and (facts.train_tokens or _PREPARED) < _PREPARED:
        facts = survey_data(run, "prepare")
    if len(facts.epochs) != 1 or not facts.epochs[0]:
        raise ValueError("several sources, each with epochs of its own")
    steps = steps_until(run.train, epochs * facts.epochs[0])
    noun = "pair" if run.data.has_preferences else "example" if run.data.has_prompts else "document"
    held_out = f", of which data.validation={run.data.validation:g} is held out" if run.data.validation else ""
    of = f" of {plural(facts.documents, noun)}{held_out}" if facts.documents else ""
    about, ending, padded = "" if facts.exact else "about ", "s" if epochs != 1 else "", ", with padding" if run.data.has_prompts else ""
    whole = f"set train.steps={steps}, which is {about}{epochs:g} epoch{ending}{of}"
    return f"{whole}; an epoch has {plural(facts.epochs[0], 'token')}{padded}"
