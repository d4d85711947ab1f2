"""Keys of epochs are refused with the steps that they are, where the data are on this machine."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

import pytest

from distrain.cli.config.load import load_recipe
from distrain.tests.data.test_pairs import open_pairs
from distrain.trainer.loop.data.samples.batches import Batches
from distrain.trainer.spec.problem import Unreadable

UNKNOWN = "train.steps or train.tokens sets the length of a run"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The overrides of a run of 7 sequences of 64 tokens a step, on 300 examples that fill windows unevenly."""
    folder = tmp_path_factory.mktemp("epochs")
    rows = [{"prompt": "a" * (index % 50 + 1), "completion": "b" * (index % 30 + 1)} for index in range(300)]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = ["data=pairs", f"data.path={folder / 'a.jsonl'}", f"data.cache={folder / 'cache'}", "data.validation=0"]
    return [*data, "train.seq=64", "train.batch=7", "cluster.gpus=1", "train.microbatch=1", "train.evaluate.every=0"]


def refusal(*words: str) -> str:
    with pytest.raises(Unreadable) as refused:
        load_recipe("quickstart", list(words))
    return str(refused.value)


def windows(pairs: list[str]) -> int:
    """Return the windows of an epoch."""
    corpus = open_pairs(Path(pairs[1].removeprefix("data.path=")))
    return Batches(corpus, seed=0, seq=64).windows[0]


@pytest.mark.parametrize(("word", "epochs", "text"), [("train.epochs=3", 3, "3 epochs"), ("num_train_epochs=0.5", 0.5, "0.5 epochs"),
    ("++train.num-epochs=1", 1, "1 epoch")])  # fmt: skip
def test_epochs_are_refused_with_their_steps(word: str, epochs: float, text: str, pairs: list[str], tmp_path: Path) -> None:
    """Also of data that no cache holds yet."""
    count = windows(pairs)
    key = word.lstrip("+").partition("=")[0]
    steps = ceil(epochs * count / 7)
    wanted = f"no key {key}: set train.steps={steps}, which is {text} of 300 examples; an epoch has {count * 64:,} tokens, with padding"
    assert refusal(*pairs[:2], f"data.cache={tmp_path}", *pairs[3:], word) == wanted


def test_the_examples_of_an_epoch_name_the_share_that_is_held_out(pairs: list[str]) -> None:
    held_out, whole = (refusal(*pairs, f"data.validation={share}", "train.epochs=3") for share in (0.1, 0))
    assert "which is 3 epochs of 300 examples, of which data.validation=0.1 is held out; an epoch has " in held_out
    tokens = [int(each.rpartition("has ")[2].split()[0].replace(",", "")) for each in (held_out, whole)]
    assert 0.8 < tokens[0] / tokens[1] < 0.95


def test_epochs_of_a_recipe_are_refused_so_too(pairs: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\ntrain: {epochs: 2}\n")
    with pytest.raises(Unreadable) as refused:
        load_recipe(str(tmp_path / "mine.yaml"), pairs)
    steps = ceil(2 * windows(pairs) / 7)
    assert str(refused.value).startswith(f"no key train.epochs: set train.steps={steps}, which is 2 epochs of 300 examples; ")


@pytest.mark.parametrize("words", [("train.epochs=many",), ("train.epochs=-1",), ("train.epochs=3", "data=synthetic"),
    ("train.epochs=1e9",), ("train.epochs=2", "data=text", "data.path=/nowhere.txt")])  # fmt: skip
def test_epochs_that_can_not_be_counted_name_the_keys_alone(words: tuple[str, ...]) -> None:
    assert refusal(*words) == f"no key train.epochs: {UNKNOWN}"


def test_sources_with_weights_have_epochs_of_their_own(pairs: list[str]) -> None:
    path = pairs[1].removeprefix("data.path=")
    assert refusal(*pairs, f"data.path=[{path},{path}]", "data.weights=[1,2]", "train.epochs=1").endswith(UNKNOWN)


def test_other_problems_are_said_without_a_look_at_the_data(pairs: list[str]) -> None:
    assert refusal(*pairs, "train.epochs=3", "model.layer=2").startswith(f"no key train.epochs: {UNKNOWN}\nno key model.layer")
