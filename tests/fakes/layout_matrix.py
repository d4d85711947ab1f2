"""A matrix of layouts: every combination of choices that a plan takes, and a few of them in which every pair of choices occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

from distrain.cli.config.load import load_recipe
from distrain.trainer.plan.engines import engine_for
from distrain.trainer.plan.rules.rules import broken_rules
from distrain.trainer.prove.trials.covering import Pair, choice_pairs, covering_rows
from distrain.trainer.spec.changed_run import overrides, with_changes
from distrain.trainer.spec.run import Run

Choice = tuple[tuple[str, Any], ...]  # (key, value) pairs that are set together
Words = tuple[str, ...]


class MatrixLayout(NamedTuple):
    """A row of a matrix: the arguments that all share, those of its shape, the shape's name, a choice of each factor, and the sizes that
    such a layout needs."""

    base: Words
    words: Words
    shape: str
    choices: tuple[Choice, ...]
    sizes: Choice

    def __str__(self) -> str:
        degrees = [f"{key.rpartition('.')[2]}{value}" for key, value in self.choices[0] if value != 1]
        others = [str(value).lower() for choice in self.choices[1:] for _, value in choice]
        return " ".join([self.shape, *degrees, *others])

    @property
    def overrides(self) -> Words:
        return (*self.words, *overrides(dict(pair for choice in (*self.choices, self.sizes) for pair in choice).items()))

    @property
    def curve(self) -> Words:
        """The arguments of the run except its layout."""
        return (*self.base, *self.words, *overrides(self.sizes))

    def run(self) -> Run:
        return with_changes(_chosen_run((*self.base, *self.words), self.choices), self.sizes)


@dataclass(frozen=True)
class LayoutMatrix:
    """Shapes of models times choices of factors, of which the first are meshes. `sizes` gives the least sizes that choices need."""

    base: Words
    shapes: tuple[tuple[str, Words], ...]
    factors: tuple[tuple[Choice, ...], ...]
    sizes: Callable[[Mapping[str, Any]], Choice]

    @property
    def meshes(self) -> tuple[Choice, ...]:
        return self.factors[0]

    @cached_property
    def layouts(self) -> tuple[tuple[MatrixLayout, ...], dict[MatrixLayout, list[str]]]:
        """Every layout whose choices all have an effect: (those that run, the others with the reasons why they don't)."""
        legal, illegal = list[MatrixLayout](), dict[MatrixLayout, list[str]]()
        for shape, words in self.shapes:
            for choices in product(*self.factors):
                values = dict(pair for choice in choices for pair in choice)
                if not _has_idle_choice(values):
                    layout = MatrixLayout(self.base, words, shape, choices, self.sizes(values))
                    if wrong := _refusal_reasons(layout.run()):
                        illegal[layout] = wrong
                    else:
                        legal.append(layout)
        return tuple(legal), illegal

    @cached_property
    def trained_layouts(self) -> tuple[MatrixLayout, ...]:
        """A few legal layouts, in which every pair of choices and every mesh occurs."""
        return tuple(covering_rows(self.layouts[0], pairs_of=_pairs_in))


def _pairs_in(layout: MatrixLayout) -> set[Pair]:
    """Every pair of choices in a layout, and its mesh. A choice that goes with dp 2 goes with dp 4, and one that goes with tp 4, where
    there are more ranks than key-value heads, with tp 8."""
    mesh, *others = layout.choices
    gpus, tp, pp, cp, ep = (value for _, value in mesh)
    dp = gpus // (tp * pp * cp)
    return choice_pairs((layout.shape, min(dp, 2), min(tp, 4), pp, cp, ep, *others)) | {(-1, mesh, -1, mesh)}


@cache
def _shape_run(words: Words) -> Run:
    """The run of a shape, in one process."""
    return with_changes(load_recipe(words[0], words[1:]), [("parallel.dp", "auto")])


@lru_cache(maxsize=10_000)
def _chosen_run(words: Words, choices: tuple[Choice, ...]) -> Run:
    """The run of a shape under choices of the first factors; runs that begin with the same choices share the work."""
    return with_changes(_chosen_run(words, choices[:-1]), choices[-1]) if choices else _shape_run(words)


def _has_idle_choice(values: Mapping[str, Any]) -> bool:
    """Whether a choice has no effect: parallel.sequence without a tensor axis, a schedule without stages."""
    return (values["parallel.tp"] == 1 and values["parallel.sequence"] is True) or (
        values["parallel.pp"] == 1 and values["parallel.schedule"] != "1f1b"
    )


def _refusal_reasons(run: Run) -> list[str]:
    """Why a run is refused, in words, without planning it."""
    found = [each.says for each in broken_rules(run, run.parallel, run.train.microbatch)]
    _, limits = engine_for(run, run.parallel)
    return [*found, *(each.says for each in limits)]
