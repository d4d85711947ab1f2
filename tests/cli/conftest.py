"""Fixtures of the tests of the command line: what every command would do again is done once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from distrain.tests.fakes.composition_cache import built_in_recipes_composed_once


@pytest.fixture(scope="package", autouse=True)
def composed_once() -> Iterator[None]:
    """Compose each built-in recipe once."""
    with built_in_recipes_composed_once():
        yield


@pytest.fixture(scope="package", autouse=True)
def collect_garbage_rarely() -> Iterator[None]:
    """Leave imported modules out of garbage collection, which takes a third of the time that Hydra needs to compose a recipe."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
