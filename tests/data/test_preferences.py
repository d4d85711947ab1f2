"""Preferences: the windows of pairs of answers, what a batch says of its pairs, how long ones are cut, what validates, what is refused."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distrain.cli.config.load import load_recipe
from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.answer_pairs import AnswerPairs
from distrain.trainer.loop.data.samples.batches import Batch, Batches
from distrain.trainer.loop.data.samples.corpus import Corpus
from distrain.trainer.loop.data.samples.packing import cut_sizes, pack_examples
from distrain.trainer.loop.data.samples.tokens import MappedExamples
from distrain.trainer.loop.data.survey import AnswerStream, answer
from distrain.trainer.loop.step.model_inputs import model_inputs
from distrain.trainer.parallel.process_groups import Grid
from distrain.trainer.parallel.world import World
from distrain.trainer.plan.mesh_position import mesh_position
from distrain.trainer.spec.derived.answer_room import answer_room
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data

SEQ = 15
Row = tuple[str, str, str]
ROWS: list[Row] = [
    ("ab", "cd", "e"),  # 5 and 4 tokens with the end of each
    ("f", "g", "hi"),  # 3 and 4: they fill the window
    ("j", "klmnopqrstuvwxyz", "A"),  # the long answer is cut to what the short one leaves
    ("B", "CDEFGHIJKL", "MNOPQRSTUV"),  # both are cut to half
    ("wxyzwxyzw", "!", "?"),  # half a window has no token of either answer
    ("X", "Y", "Z"),
]


def write_rows(path: Path, rows: list[Row], names: tuple[str, str, str] = ("prompt", "chosen", "rejected")) -> Path:
    """Write preferences as JSON lines."""
    path.write_text("".join(json.dumps({"id": 7, **dict(zip(names, row, strict=True))}) + "\n" for row in rows))
    return path


def open_rows(path: Path, remarks: list[str] | None = None, **keys: Any) -> Corpus:
    """Prepare the corpus of a file of preferences, without validation unless a key asks for it."""

    def progress(what: str, done: int, total: int) -> None:
        if not total and remarks is not None:
            remarks.append(what)

    data = Data(name="preferences", path=str(path), **{"validation": 0.0, "documents": True, **keys})
    return prepare_corpus(data, vocab=256, seq=SEQ, cache=path.parent / "cache", progress=progress)


def in_order(batches: Batches) -> Batch:
    """Return all windows of the first source as a batch, in their order."""
    windows = np.arange(batches.windows[0])
    return batches.read(windows, 0 * windows, windows)


def pairs_of(batch: Batch) -> AnswerPairs:
    assert batch.pairs is not None
    return batch.pairs


def ids(text: str) -> list[int]:
    """Return the ids of text by data.tokenizer=bytes; 0 is both the end and padding, and . is an ignored label."""
    return [IGNORED if letter == "." else 0 if letter == "0" else ord(letter) for letter in text]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return in_order(Batches(open_rows(write_rows(tmp_path / "a.jsonl", ROWS)), seed=3, seq=SEQ))


# fmt: off
WINDOWS = [
    ("abcd0abe0fg0fhi", ".cd0..e0.g0.hi0", [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
    ("jklmnopqrstuvjA", "klmnopqrstuv.A0", [*[4] * 13, 5, 5]),
    ("BCDEFGHIBMNOPQR", "CDEFGHI.MNOPQRS", [*[6] * 8, *[7] * 7]),
    ("XY0XZ0000000000", "Y0.Z0..........", [*[10] * 3, *[11] * 3, *[-1] * 9]),
]
# fmt: on


def test_the_windows_of_a_small_file_are_these(batch: Batch) -> None:
    assert batch.documents is not None
    rows = zip(batch.tokens.tolist(), batch.labels.tolist(), batch.documents.tolist(), strict=True)
    assert list(rows) == [(ids(tokens), ids(labels), documents) for tokens, labels, documents in WINDOWS]


def test_a_batch_says_where_answers_begin_and_how_many_labels_they_have(batch: Batch) -> None:
    pairs = pairs_of(batch)
    assert pairs.number.tolist() == [0, 1, 2, 3, 5]
    assert pairs.source.tolist() == [0] * 5
    assert pairs.starts.tolist() == [0, 5, 9, 12, 15, 28, 30, 38, 45, 48, 60]
    assert pairs.labels.tolist() == [[3, 2], [2, 3], [12, 2], [7, 7], [2, 2]]
    counted = (batch.labels.flatten() != IGNORED).numpy()
    assert np.add.reduceat(counted, pairs.starts[:-1].numpy()).tolist() == pairs.labels.flatten().tolist()


def test_a_batch_has_the_reference_of_its_pairs(tmp_path: Path) -> None:
    batches = Batches(open_rows(write_rows(tmp_path / "a.jsonl", ROWS)), seed=3, seq=SEQ)
    batches.references = [np.arange(12.0).reshape(6, 2)]
    assert pairs_of(in_order(batches)).reference.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [10, 11]]


def test_a_batch_without_its_last_samples_has_the_pairs_of_the_others(batch: Batch) -> None:
    less = batch.before(2)
    assert (less.labels[:2] == batch.labels[:2]).all()
    assert (less.labels[2:] == IGNORED).all()
    assert pairs_of(less).number.tolist() == [0, 1, 2]
    assert pairs_of(less).starts.tolist() == [0, 5, 9, 12, 15, 28, 30]
    assert pairs_of(batch.before(0)).count == 0


def test_a_window_of_the_shortest_answers_has_no_room_for_more(tmp_path: Path) -> None:
    batch = in_order(Batches(open_rows(write_rows(tmp_path / "a.jsonl", 9 * [("a", "", "")])), seed=3, seq=SEQ))
    assert (pairs_of(batch).starts < SEQ).sum() == answer_room(SEQ) == 8


def test_an_auxiliary_loss_weighs_sequences_by_their_pairs(batch: Batch) -> None:
    run = load_recipe("tiny_full", ["cluster=1x1", "parallel={dp: 1, tp: 1, ep: 1, pp: 1}"])
    grid = Grid(world=World(rank=0, size=1, device=torch.device("cpu")), position=mesh_position(run, 0), groups={}, alone=None)
    assert model_inputs(run, batch, grid, 0)[2]["label_counts"].tolist() == [2, 1, 1, 1]


def test_remarks_count_pairs_that_are_cut_or_left_out(tmp_path: Path) -> None:
    remarks: list[str] = []
    open_rows(write_rows(tmp_path / "a.jsonl", ROWS), remarks)
    (remark,) = (each for each in remarks if "examples" in each)
    assert remark == (
        "3 of 6 examples are longer than train.seq=15 and the token after it: their ends are cut off; "
        "1 of 6 examples are left out: none of a completion's tokens follows another inside train.seq"
    )


Sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=20)


@given(Sizes, st.integers(4, 50))
def test_cut_answers_fit_and_no_shorter_cut_is_needed(sizes: list[tuple[int, int]], length: int) -> None:
    bounds = np.cumsum([0, *(size for pair in sizes for size in pair)])
    tokens = MappedExamples(files=(), starts=bounds[[0, -1]], bounds=bounds, counts=bounds[:0], completions=bounds[:-1], group=2)
    for (one, other), (kept, too) in zip(sizes, cut_sizes(tokens, np.arange(len(sizes)), length).tolist(), strict=True):
        assert kept + too <= length
        if one + other <= length:
            assert (kept, too) == (one, other)
            continue
        most = max(kept, too)
        assert (kept, too) == (min(one, most), min(other, most))  # both at the same length
        assert min(one, most + 1) + min(other, most + 1) > length


@given(Sizes)
def test_windows_hold_whole_pairs_in_order(sizes: list[tuple[int, int]]) -> None:
    bounds = np.cumsum([0, *(size + 1 for pair in sizes for size in pair)])
    files = (np.arange(bounds[-1]),)
    tokens = MappedExamples(files=files, starts=bounds[[0, -1]], bounds=bounds, counts=bounds[:0], completions=bounds[:-1] + 1, group=2)
    packed = pack_examples(tokens, np.arange(len(sizes)), 24)
    held = [packed.examples(window).tolist() for window in range(packed.size)]
    assert max(2 * len(each) for each in held) <= answer_room(23)
    assert list(chain(*held)) == list(range(len(sizes)))
    for window in range(packed.size):
        documents = [document for document, _, _ in packed.documents(window)]
        assert documents == [each for number in held[window] for each in (2 * number, 2 * number + 1)]


def test_whole_pairs_validate(tmp_path: Path) -> None:
    rows = [(f"{index:03}", "a", "bcd") for index in range(40)]
    corpus = open_rows(write_rows(tmp_path / "a.jsonl", rows), validation=0.2)
    train, held = (
        set(pairs_of(in_order(Batches(corpus, seed=0, seq=SEQ, split=split))).number.tolist()) for split in ("train", "validation")
    )
    assert train | held == set(range(40))
    assert not train & held
    assert len(held) == 8
    assert corpus.sources[0].documents == 40


def test_other_keys_are_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS, ("question", "good", "bad"))
    corpus = open_rows(path, prompt_key="question", chosen_key="good", rejected_key="bad")
    assert in_order(Batches(corpus, seed=3, seq=SEQ)).tokens[0].tolist() == ids(WINDOWS[0][0])


def test_the_answers_the_other_way_round_are_other_data(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    assert open_rows(path).key != open_rows(path, chosen_key="rejected", rejected_key="chosen").key


def test_a_look_counts_the_tokens_of_both_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS[:2])
    words = {"name": "preferences", "path": str(path), "documents": True, "validation": 0.0, "cache": str(tmp_path / "cache")}
    request = {"data": words, "vocab": 256, "seq": SEQ, "mode": "look"}
    with open(tmp_path / "out", "wb") as out:
        facts = answer(json.dumps(request).encode(), AnswerStream(out.fileno()))["facts"]
    assert facts["tokens"]["train"] == pytest.approx(16, abs=3)


GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}
MESSAGES = [{"role": "user", "content": "a"}]
# fmt: off
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no rejected answer": ({"prompt": "a", "chosen": "b", "answer": "c"}, {},
        "AT/a.jsonl line 1 has no key rejected: set data.rejected_key to one of answer"),
    "one answer alone": ({"prompt": "a", "chosen": "b"}, {},
        "AT/a.jsonl line 1 has no key rejected, and none but prompt, chosen"),
    "a score": (GOOD | {"rejected": 0.3}, {}, "AT/a.jsonl line 1 has neither text nor messages under rejected but 0.3"),
    "two kinds": (GOOD | {"rejected": MESSAGES}, {},
        "AT/a.jsonl line 1 has text under prompt and messages under rejected: write both as one kind"),
    "messages as bytes": (dict.fromkeys(GOOD, MESSAGES), {},
        ("AT/a.jsonl line 1 holds messages, but data.tokenizer=bytes has no chat template: "
         "name a tokenizer that has one, or write prompt and chosen and rejected as texts")),
    "another kind of file": (GOOD, {"path": "AT/a.txt"},
        ("AT/a.txt is no file of JSON lines by its name, which data=preferences reads: "
         'write an object a line, {"prompt": "...", "chosen": "...", "rejected": "..."}, as .jsonl')),
    "no path": (GOOD, {"path": None},
        "data=preferences reads files, but data.path is not set: set data.path=FILE, a folder or a pattern"),
    "an empty answer of a long prompt": (GOOD | {"prompt": "as long as half a window", "rejected": ""}, {},
        ("train has no example of data=preferences with a token of its completion inside train.seq=15: "
         "give more examples, or a longer train.seq")),
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_each_problem_is_reported_in_one_line(name: str, tmp_path: Path) -> None:
    row, keys, line = WRONG[name]
    for file in ("a.jsonl", "a.txt"):
        (tmp_path / file).write_text(json.dumps(row) + "\n")
    path = keys.get("path", "AT/a.jsonl")
    data = Data(name="preferences", documents=True, validation=0.0, path=path and path.replace("AT", str(tmp_path)))
    with pytest.raises(Unreadable) as refused:
        prepare_corpus(data, vocab=256, seq=SEQ, cache=tmp_path / "cache", progress=lambda *_: None)
    assert str(refused.value).replace(str(tmp_path), "AT") == line
