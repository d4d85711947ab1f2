"""A tokenizer of 300 ids, trained on one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

LINE = "to be or not to be, that is the question\n"


def write_tokenizer(folder: Path, **model: Any) -> Path:
    """Write tokenizer.json: BPE over bytes, with an alphabet of all bytes unless options of the model are given."""
    tokenizers = pytest.importorskip("tokenizers")
    rules = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = [] if model else tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>", "<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    rules.train_from_iterator([LINE], trainer)
    rules.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
