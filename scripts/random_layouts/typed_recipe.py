"""A recipe as words of a command line, and the command that proves it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...cli.verbs.prove_run import RecipeForRanks

CONF = "tiny_2x2x2"


@dataclass(frozen=True, kw_only=True)
class DrawnRecipe:
    """A recipe as words of a command line, by their keys, and how many steps it trains."""

    words: Mapping[str, str]
    steps: int

    @property
    def overrides(self) -> list[str]:
        """The words as they are typed."""
        return [f"{key}={value}" for key, value in self.words.items()]

    @cached_property
    def recipe(self) -> RecipeForRanks:
        """The recipe, which is read once for each number of ranks."""
        return RecipeForRanks(CONF, self.overrides, None)

    def command(self, layouts: Sequence[str], *, checks: bool) -> str:
        """The command that proves it in layouts."""
        asked = [f"steps={self.steps}", f"layouts={','.join(layouts)}", *(["checks=all"] if checks else [])]
        return f"distrain prove conf={CONF} {shlex.join([*self.overrides, *asked])}"

    def with_words(self, words: Mapping[str, str]) -> DrawnRecipe:
        """The recipe with words added; a key that it has takes the new value."""
        return replace(self, words={**self.words, **words})
