"""The yardstick of the tests of models, and ranks that train models of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.tests.fakes.hf_models import NEOX, write_config

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool


@pytest.fixture(scope="session")
def transformers() -> Any:
    """Hugging Face's library, quiet."""
    library = pytest.importorskip("transformers", reason="transformers, the yardstick, is not installed")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@pytest.fixture(scope="session")
def hf_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Return ranks that have already imported transformers."""
    from distrain.tests.fakes.rank_pool import RankPool

    pool = RankPool(tmp_path_factory.mktemp("hf") / "server.log", "distrain.tests.rank_programs.hf_ranks")
    with pool.server:
        yield pool


@pytest.fixture(scope="session")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a GPT-NeoX's config.json."""
    return write_config(tmp_path_factory.mktemp("neox"), NEOX)
