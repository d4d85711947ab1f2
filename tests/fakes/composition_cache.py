"""A cache of composed built-in recipes: the commands of one test process read and compose each of them once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from omegaconf import DictConfig

from distrain.cli.config import library
from distrain.cli.config.composition import Composer
from distrain.cli.config.overrides import Override


@contextmanager
def built_in_recipes_composed_once() -> Iterator[None]:
    """Keep what Hydra composes from built-in files; recipes and folders of the user, which tests change, are composed each time."""
    compose = Composer._compose
    composed: dict[tuple[str, ...], DictConfig] = {}

    def compose_or_recall(composer: Composer, recipe: DictConfig, choices: Sequence[Override], file: Path) -> DictConfig:
        if composer._config_dir is not None or not file.is_relative_to(library.PACKAGE_ROOT):
            return compose(composer, recipe, choices, file)
        key = (str(file), *(each.text for each in choices))
        if key not in composed:
            composed[key] = compose(composer, recipe, choices, file)
        return composed[key].copy()

    with mock.patch.object(Composer, "_compose", compose_or_recall):
        yield
