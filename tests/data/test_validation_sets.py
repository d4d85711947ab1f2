"""Validation sets of files of their own: checked like training data, evaluated whole, their short last window padded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distrain.tests.data.test_survey import ask, figures, problems, remarks
from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.batches import Batches
from distrain.trainer.loop.data.samples.corpus import Corpus
from distrain.trainer.loop.data.validation_sets import evaluates_held_out, prepare_validation_sets
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data

SEQ = 8


def sets_of(data: Data, folder: Path, seq: int = SEQ, said: list[str] | None = None) -> dict[str, Corpus]:
    def progress(what: str, done: int, total: int) -> None:
        if not total and said is not None:
            said.append(what)

    return prepare_validation_sets(data, vocab=3000, seq=seq, cache=folder / "cache", progress=progress)


def counting(path: Path, first: int, size: int) -> str:
    np.arange(first, first + size, dtype=np.uint16).tofile(path)
    return str(path)


@pytest.mark.parametrize("size", [2, SEQ, SEQ + 1, SEQ + 2, 5 * SEQ, 5 * SEQ + 1, 5 * SEQ + 2])
@pytest.mark.parametrize("documents", [False, True])
def test_every_token_after_the_first_is_a_label_once(tmp_path: Path, size: int, documents: bool) -> None:
    path = counting(tmp_path / "val.bin", 1, size)
    data = Data(name="tokens", path="train.bin", end=size, validate={"one": path}, documents=documents)
    batches = Batches(sets_of(data, tmp_path)["one"], seed=0, seq=SEQ, split="validation")
    (many,) = batches.windows
    assert many == -(-(size - 1) // SEQ)
    batch = batches.batch(0, many)
    counts = batch.labels != IGNORED
    assert sorted(batch.labels[counts].tolist()) == list(range(2, size + 1))
    assert torch.equal(batch.labels[counts], batch.tokens[counts] + 1)
    assert (batch.documents is not None) == documents
    if batch.documents is not None:
        assert (batch.documents[counts] == 0).all()
        assert (batch.documents[batch.tokens == 0] == -1).all(), "padding is of no document"


def test_training_windows_are_whole(tmp_path: Path) -> None:
    path = counting(tmp_path / "train.bin", 1, 5 * SEQ + 5)
    data = Data(name="tokens", path=path, validation=0.0)
    corpus = prepare_corpus(data, vocab=3000, seq=SEQ, cache=tmp_path / "cache", progress=lambda *_: None)
    batches = Batches(corpus, seed=0, seq=SEQ)
    assert batches.windows == (5,)
    assert (batches.batch(0, 50).labels != IGNORED).all()


def test_several_files_of_a_set_are_one_text(tmp_path: Path) -> None:
    paths = tuple(counting(tmp_path / f"{first}.bin", first, 20) for first in (100, 200))
    data = Data(name="tokens", path=("a", "b"), weights=(1.0, 2.0), validate={"both": paths, "one": paths[0]})
    found = sets_of(data, tmp_path)
    assert {name: each.size("validation") for name, each in found.items()} == {"both": 40, "one": 20}
    assert [len(each.sources) for each in found.values()] == [1, 1]
    assert [each.size("train") for each in found.values()] == [0, 0]


def test_all_files_of_a_set_count_whatever_their_names(tmp_path: Path) -> None:
    for name in ("val.bin", "other.bin"):
        counting(tmp_path / name, 1, 30)
    said: list[str] = []
    data = Data(name="tokens", path="train.bin", validate={"all": str(tmp_path)})
    assert sets_of(data, tmp_path, said=said)["all"].size("validation") == 60
    assert said == []


def test_text_sets_validate_a_run_on_the_standard_library_and_pairs_one_on_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    found = sets_of(Data(name="stdlib", validate={"abc": str(tmp_path / "a.txt")}), tmp_path)
    assert found["abc"].size("validation") == 4, "with the end of the document"
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "abcd", "completion": "ef"}) + "\n")
    data = Data(name="pairs", path="train.jsonl", documents=True, validate={"pairs": str(tmp_path / "a.jsonl")})
    batch = Batches(sets_of(data, tmp_path)["pairs"], seed=0, seq=SEQ, split="validation").batch(0, 1)
    assert batch.labels[batch.labels != IGNORED].tolist() == [*b"ef", 0]


def test_windows_come_in_one_order_for_every_seed(tmp_path: Path) -> None:
    data = Data(name="tokens", path="a", validate={"one": counting(tmp_path / "a.bin", 1, 500)})
    corpus = sets_of(data, tmp_path)["one"]
    one, other = (Batches(corpus, seed=seed, seq=SEQ, split="validation").batch(0, 62).tokens for seed in (1, 2))
    assert torch.equal(one, other)
    assert one[:, 0].tolist() != sorted(one[:, 0].tolist()), "so that the first ones are a fair sample"


def test_what_is_held_out_is_evaluated_unless_sets_take_its_place(tmp_path: Path) -> None:
    path = counting(tmp_path / "a.bin", 1, 500)

    def corpus(share: float, **keys: Any) -> tuple[Data, Corpus]:
        data = Data(name="tokens", path=path, validation=share, **keys)
        return data, prepare_corpus(data, vocab=3000, seq=SEQ, cache=tmp_path / "cache", progress=lambda *_: None)

    sets = {"validate": {"one": path}}
    assert [evaluates_held_out(*corpus(share, **keys)) for share, keys in ((0.1, {}), (0.1, sets), (0.0, sets), (0.0, {}))] == [
        *(True, True, False, True),
    ]


def test_problems_of_all_sets_name_their_keys(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").touch()
    short = counting(tmp_path / "short.bin", 1, 1)
    sets: dict[str, str | tuple[str, ...]] = {"gone": "nowhere.bin", "empty": str(tmp_path / "empty.bin"), "folder": (short, "neither")}
    with pytest.raises(Unreadable) as found:
        sets_of(Data(name="tokens", path="a", validate=sets), tmp_path)
    assert [str(each) for each in found.value.problems] == [
        "data.validate.gone=nowhere.bin: no such file or folder",
        f"{tmp_path / 'empty.bin'} is empty: name another",
        "data.validate.folder=neither: no such file or folder",
    ]
    with pytest.raises(Unreadable) as found:
        sets_of(Data(name="tokens", path="a", validate={"short": short}), tmp_path)
    assert [str(each) for each in found.value.problems] == [
        f"data.validate.short has no token that counts as a label in train.seq={SEQ}: give it more text"
    ]


@pytest.mark.parametrize("mode", ["look", "prepare"])
def test_a_survey_checks_sets_where_the_run_evaluates(tmp_path: Path, mode: str) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 200)
    (tmp_path / "b.txt").write_text("other text\n" * 20)
    words: dict[str, Any] = {"name": "text", "path": str(tmp_path / "a.txt"), "cache": str(tmp_path / "cache"), "validation": 0.0}
    sets = {"b": str(tmp_path / "b.txt"), "both": [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")]}
    lines = ask(mode, evaluate=True, validate=sets, **words)
    assert figures(lines)["tokens"] == {"train": 2001, "validation": 0}
    assert remarks(lines) == [f"data.validate.both: {tmp_path / 'a.txt'} trains too, as data.path names it: its loss is no validation"]
    lost = {"gone": str(tmp_path / "gone.txt"), "other": str(tmp_path / "gone")}
    assert problems(ask(mode, evaluate=True, validate=lost, **words)) == [
        f"data.validate.{name}={path}: no such file or folder" for name, path in lost.items()
    ]
    assert figures(ask(mode, evaluate=False, validate=lost, **words))


def test_the_tokens_of_a_set_are_tokenized_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 20)
    data = Data(name="text", path="t.txt", validate={"one": str(tmp_path / "a.txt")})
    sets_of(data, tmp_path)
    made = sorted((tmp_path / "cache").iterdir())
    sets_of(replace(data, validate={"renamed": str(tmp_path / "a.txt")}, validation=0.3), tmp_path)
    assert sorted((tmp_path / "cache").iterdir()) == made
