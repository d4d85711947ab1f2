"""Prompts and completions: tokens, labels and examples of every window, which examples validate, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.tests.fakes.small_corpus import documents, small_corpus
from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.batches import Batches
from distrain.trainer.loop.data.samples.corpus import Corpus, Split
from distrain.trainer.loop.data.samples.corpus_stats import corpus_stats
from distrain.trainer.loop.data.samples.document_lengths import few_lengths
from distrain.trainer.loop.data.samples.packing import PADDING, PADDING_DOCUMENT, pack_examples
from distrain.trainer.loop.data.samples.tokens import MappedExamples
from distrain.trainer.loop.data.survey import AnswerStream, answer
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data

SEQ = 7
ROWS = [("ab", "cd"), ("e", "f"), ("gh", ""), ("ij", "klmnopq"), ("rstuvwxyz", "!"), ("A", "B")]
Window = tuple[list[int], list[int], list[int]]


def write_pairs(path: Path, rows: list[tuple[str, str]], prompt: str = "prompt", completion: str = "completion") -> Path:
    """Write pairs of texts as JSON lines."""
    path.write_text("".join(json.dumps({"id": 7, prompt: row[0], completion: row[1]}) + "\n" for row in rows))
    return path


def open_pairs(path: Path, remarks: list[str] | None = None, **keys: Any) -> Corpus:
    """Prepare the corpus of a file of pairs, without validation unless a key asks for it."""
    words = {"validation": 0.0, "documents": True, **keys}

    def progress(what: str, done: int, total: int) -> None:
        if not total and remarks is not None:
            remarks.append(what)

    data = Data(name="pairs", path=str(path), **words)
    return prepare_corpus(data, vocab=256, seq=SEQ, cache=path.parent / "cache", progress=progress)


def read_windows(corpus: Corpus, split: Split = "train") -> list[Window]:
    """Return (tokens, labels, documents) of each window of the first source, in its place."""
    batches = Batches(corpus, seed=3, seq=SEQ, split=split)
    (size,) = batches.windows
    batch, (_, places) = batches.batch(0, size), batches.locate(np.arange(size))
    assert batch.documents is not None
    rows = zip(batch.tokens.tolist(), batch.labels.tolist(), batch.documents.tolist(), strict=True)
    return [row for _, row in sorted(zip(places.tolist(), rows, strict=True))]


def ids(text: str) -> list[int]:
    """Return the ids of text by data.tokenizer=bytes; 0 is both the end and padding, and . is an ignored label."""
    return [IGNORED if letter == "." else 0 if letter == "0" else ord(letter) for letter in text]


# fmt: off
WINDOWS: list[Window] = [
    (ids("abcd0ef"), ids(".cd0.f0"), [0, 0, 0, 0, 0, 1, 1]),
    (ids("gh00000"), ids(".0....."), [2, 2, 2, -1, -1, -1, -1]),
    (ids("ijklmno"), ids(".klmnop"), [3, 3, 3, 3, 3, 3, 3]),  # cut
    (ids("AB00000"), ids("B0....."), [5, 5, 5, -1, -1, -1, -1]),  # after an example whose prompt alone is longer than a window
]
# fmt: on


def test_the_windows_of_a_small_file_are_these(tmp_path: Path) -> None:
    assert read_windows(open_pairs(write_pairs(tmp_path / "a.jsonl", ROWS))) == WINDOWS


def test_an_example_is_a_document_of_prompt_completion_and_end(tmp_path: Path) -> None:
    corpus = open_pairs(write_pairs(tmp_path / "a.jsonl", ROWS))
    assert documents(corpus) == [[*f"{prompt}{completion}".encode(), 0] for prompt, completion in ROWS]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.ndjson", "a.json"])
def test_other_forms_of_json_lines_are_read_alike(name: str, tmp_path: Path) -> None:
    text = write_pairs(tmp_path / "a.jsonl", ROWS).read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert read_windows(open_pairs(tmp_path / name)) == WINDOWS


def test_the_keys_of_prompt_and_completion_can_be_named(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", ROWS, "question", "answer")
    assert read_windows(open_pairs(path, prompt_key="question", completion_key="answer")) == WINDOWS


def test_other_keys_use_another_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": a, "completion": b, "other": b + "?"}) + "\n" for a, b in ROWS))
    one, other = open_pairs(path), open_pairs(path, completion_key="other")
    assert one.key != other.key
    assert documents(other)[0] == [*b"abcd?", 0]


def test_text_and_pairs_of_one_file_do_not_share_a_cache(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", ROWS)
    pairs = open_pairs(path)
    assert documents(small_corpus(tmp_path, path=str(path), text_key="prompt"))[0] == [*b"ab", 0]
    assert read_windows(open_pairs(path)) == read_windows(pairs) == WINDOWS


@pytest.mark.parametrize("processes", [1, 2])
def test_several_processes_tokenize_alike(processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distrain.trainer.loop.data import source_reader
    from distrain.trainer.loop.data.tokenize import text_files

    monkeypatch.setattr(source_reader, "_ONE_PROCESS", (1 << 30, 1 << 30) if processes == 1 else (0, 0))
    monkeypatch.setattr(source_reader, "cpu_count", lambda: processes)
    monkeypatch.setattr(text_files, "SHARE", 100)  # turns of about two lines
    corpus = open_pairs(write_pairs(tmp_path / "a.jsonl", ROWS))
    assert read_windows(corpus) == WINDOWS
    assert corpus.examples[0].empty == 1


def test_each_source_of_a_blend_is_packed_alone(tmp_path: Path) -> None:
    paths = tuple(str(write_pairs(tmp_path / f"{name}.jsonl", [(name, "x"), (name, "yz")])) for name in "ab")
    data = Data(name="pairs", path=paths, weights=(1.0, 1.0), documents=True, validation=0.0)
    batches = Batches(prepare_corpus(data, vocab=256, seq=SEQ, cache=tmp_path / "cache", progress=lambda *_: None), seed=0, seq=SEQ)
    assert batches.windows == (1, 1)
    assert sorted(batches.batch(0, 2).tokens.tolist()) == [ids("ax0ayz0"), ids("bx0byz0")]


def test_an_epoch_has_every_window_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    corpus = open_pairs(write_pairs(tmp_path / "a.jsonl", [(chr(65 + index), "abcde") for index in range(40)]))
    batches = Batches(corpus, seed=0, seq=SEQ)
    assert batches.windows == (40,)
    epochs = [batches.batch(epoch * 40, 40).tokens[:, 0].tolist() for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(65, 105))


def test_one_remark_says_how_many_examples_are_cut_and_left_out(tmp_path: Path) -> None:
    remarks: list[str] = []
    open_pairs(write_pairs(tmp_path / "a.jsonl", ROWS), remarks)
    (remark,) = remarks
    assert remark == (
        "2 of 6 examples are longer than train.seq=7 and the token after it: their ends are cut off; "
        "1 of 6 examples are left out: none of a completion's tokens follows another inside train.seq; "
        "1 of 6 examples have an empty completion: of them the end alone is trained"
    )
    remarks.clear()
    open_pairs(write_pairs(tmp_path / "b.jsonl", ROWS[:2]), remarks)
    assert not remarks


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=40), length=st.integers(2, 10))
def test_a_window_is_the_next_examples_that_fit_whole(sizes: list[int], length: int) -> None:
    bounds = np.cumsum([0, *sizes])
    none: Any = np.zeros(0, np.int64)
    tokens = MappedExamples(files=(), starts=none, bounds=bounds, counts=none, completions=bounds[:-1])
    packed = pack_examples(tokens, np.arange(len(sizes)), length)
    windows, room = list[list[int]](), 0
    for example, size in enumerate(sizes):
        if size == 1:
            continue  # it has no label
        if min(size, length) > room:
            windows.append([])
            room = length
        windows[-1].append(example)
        room -= min(size, length)
    assert [packed.chosen[a:b].tolist() for a, b in zip(packed.firsts[:-1], packed.firsts[1:], strict=True)] == windows


# Validation and figures


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4])
def test_whole_examples_validate(share: float, tmp_path: Path) -> None:
    rows = [(f"p{index}", "c" * (index % 4)) for index in range(30)]
    corpus = open_pairs(write_pairs(tmp_path / "a.jsonl", rows), validation=share)
    (source,) = corpus.sources
    assert isinstance(source.tokens, MappedExamples)
    assert {*source.validation.begins.tolist(), *source.validation.ends.tolist()} <= set(source.tokens.bounds.tolist())
    seen = [
        {example for _, _, row in read_windows(corpus, split) for example in row} - {PADDING_DOCUMENT} for split in ("train", "validation")
    ]
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == set(range(30))
    assert share <= corpus.size("validation") / source.tokens.size <= share + 8 / source.tokens.size


@pytest.mark.parametrize(("examples", "held"), [(1, 0), (2, 1)])
def test_at_least_one_example_trains(examples: int, held: int, tmp_path: Path) -> None:
    corpus = open_pairs(write_pairs(tmp_path / "a.jsonl", [("ab", "c")] * examples), validation=0.9)
    assert (corpus.size("train"), corpus.size("validation")) == (4 * (examples - held), 4 * held)


def test_validation_without_an_example_is_refused(tmp_path: Path) -> None:
    corpus = open_pairs(write_pairs(tmp_path / "a.jsonl", ROWS))
    with pytest.raises(Unreadable) as refused:
        Batches(corpus, seed=0, seq=SEQ, split="validation")
    assert str(refused.value) == (
        "validation has no example of data=pairs with a token of its completion inside train.seq=7: "
        "set a larger data.validation or train.evaluate.every=0"
    )


def test_an_epoch_counts_padding(tmp_path: Path) -> None:
    stats = corpus_stats(open_pairs(write_pairs(tmp_path / "a.jsonl", ROWS)), SEQ)
    assert stats.documents == len(ROWS)
    assert (stats.train, stats.sources[0].epoch) == (5 + 3 + 3 + 10 + 11 + 3, len(WINDOWS) * SEQ)


def survey(mode: str, path: Path, **keys: Any) -> list[dict[str, Any]]:
    """Return the lines that the survey of a file of pairs answers."""
    reader, writer = os.pipe()
    data = {"name": "pairs", "path": str(path), "documents": True, "validation": 0.1, "cache": str(path.parent / "cache"), **keys}
    with os.fdopen(reader) as said:
        answers = AnswerStream(writer)
        answers.send(answer(json.dumps({"data": data, "vocab": 256, "seq": SEQ, "mode": mode}).encode(), answers))
        os.close(writer)
        return [json.loads(line) for line in said]


def test_mode_look_estimates_what_is_not_cached_and_knows_what_is(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", ROWS * 100)
    estimate, prepared, known = (survey(mode, path)[-1]["facts"] for mode in ("look", "prepare", "look"))
    assert (estimate["exact"], known["exact"]) == (False, True)
    size, about = (sum(found["tokens"].values()) for found in (prepared, estimate))
    assert size == 100 * sum(len(prompt) + len(completion) + 1 for prompt, completion in ROWS)
    assert about == pytest.approx(size, rel=0.05)
    assert prepared["lengths"] == list(few_lengths([len(prompt) + len(completion) + 1 for prompt, completion in ROWS * 100]))
    assert {**prepared, "entropy": None} == known


def test_few_lengths_are_means_of_equal_parts_of_the_documents_in_order() -> None:
    lengths = [5, 0, 1000, 3, 4, 2, *([7] * 19)]  # 24 of them hold tokens
    assert few_lengths(lengths) == (2, 4, *[7] * 9, 504)
    assert few_lengths([9, 4]) == (4, 9)
    assert few_lengths([]) == few_lengths([0]) == ()


@pytest.mark.parametrize("mode", ["look", "prepare"])
def test_the_survey_remarks_on_cut_examples_and_refuses_other_rows(mode: str, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", ROWS)
    open_pairs(path)
    assert [line["remark"].partition(":")[0] for line in survey(mode, path) if "remark" in line] == [
        "2 of 6 examples are longer than train.seq=7 and the token after it"
    ]
    (problem,) = survey(mode, path, prompt_key="question")[-1]["problems"]
    assert problem["says"] == f"{path} line 1 has no key question: set data.prompt_key to one of id, prompt"


def test_entropy_is_that_of_the_training_completions(tmp_path: Path) -> None:
    corpus = open_pairs(write_pairs(tmp_path / "a.jsonl", [("prompt", "a"), ("other", "b")]))
    assert corpus.entropy == pytest.approx(1.5 * log(2))  # a, b, and the end twice


def test_padding_is_a_token_of_every_vocabulary() -> None:
    assert PADDING == 0


# Problems


def lines(*rows: Any) -> str:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


GOOD = {"prompt": "a", "completion": "b"}
USER, ASSISTANT = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
# The file, the keys of data (AT: the folder), and the line.
# fmt: off
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no JSON": (lines(GOOD, '{"prompt": "x"'), {},
        "AT/a.jsonl line 2 is not JSON: Expecting ',' delimiter at character 15"),
    "no object": (lines(GOOD, "7"), {}, "AT/a.jsonl line 2 is not a JSON object"),
    "no prompt": (lines({"question": "a", "completion": "b"}), {},
        "AT/a.jsonl line 1 has no key prompt: set data.prompt_key to one of question"),
    "no completion": (lines("", GOOD, {"prompt": "a", "answer": "b"}), {},
        "AT/a.jsonl line 3 has no key completion: set data.completion_key to one of answer"),
    "a prompt alone": (lines({"prompt": "a"}), {}, "AT/a.jsonl line 1 has no key completion, and none but prompt"),
    "a key of another name": (lines(GOOD), {"completion_key": "answer"},
        "AT/a.jsonl line 1 has no key answer: set data.completion_key to one of completion"),
    "a number": (lines({"prompt": 7, "completion": "b"}), {},
        "AT/a.jsonl line 1 has neither text nor messages under prompt but 7"),
    "nothing": (lines({"prompt": "a", "completion": None}), {},
        "AT/a.jsonl line 1 has neither text nor messages under completion but null"),
    "no messages": (lines({"prompt": [], "completion": ASSISTANT}), {},
        "AT/a.jsonl line 1 has neither text nor messages under prompt but []"),
    "a message without role": (lines({"prompt": [{"content": "a"}], "completion": ASSISTANT}), {},
        'AT/a.jsonl line 1 has a message under prompt that is not {"role": "...", "content": "..."} but {"content": "a"}'),
    "a message of parts": (lines({"prompt": USER, "completion": [{"role": "user", "content": []}]}), {},
        ('AT/a.jsonl line 1 has a message under completion that is not {"role": "...", "content": "..."} '
         'but {"role": "user", "content": []}')),
    "one message": (lines({"prompt": USER[0], "completion": ASSISTANT}), {},
        'AT/a.jsonl line 1 has neither text nor messages under prompt but {"role": "user", "content": "a"}'),
    "two kinds": (lines(GOOD, {"prompt": USER, "completion": "b"}), {},
        "AT/a.jsonl line 2 has messages under prompt and text under completion: write both as one kind"),
    "half a character": (lines('{"prompt": "\\ud83d", "completion": "b"}'), {},
        "AT/a.jsonl line 1 holds half of a character (a lone surrogate)"),
    "messages as bytes": (lines({"prompt": USER, "completion": ASSISTANT}), {},
        ("AT/a.jsonl line 1 holds messages, but data.tokenizer=bytes has no chat template: "
         "name a tokenizer that has one, or write prompt and completion as texts")),
    "another kind of file": ("text", {"path": "AT/a.txt"},
        ("AT/a.txt is no file of JSON lines by its name, which data=pairs reads: "
         'write an object a line, {"prompt": "...", "completion": "..."} or {"messages": [...]}, as .jsonl')),
    "a folder without lines": ("text", {"path": "AT/sub"},
        ("data.path=AT/sub has no .jsonl, .json or .ndjson (or one of them as .gz or .zst) in it, only 1 .txt: "
         "name files of prompts and completions, an object a line")),
    "no path": ("", {"path": None},
        "data=pairs reads files, but data.path is not set: set data.path=FILE, a folder or a pattern"),
    "only prompts": (lines({"prompt": "much too long", "completion": "x"}), {},
        ("train has no example of data=pairs with a token of its completion inside train.seq=7: "
         "give more examples, or a longer train.seq")),
    "blank lines": (lines("", " "), {}, "AT/a.jsonl has no text"),
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_each_problem_is_reported_in_one_line(name: str, tmp_path: Path) -> None:
    text, keys, line = WRONG[name]
    (tmp_path / "sub").mkdir()
    for file in ("a.jsonl", "a.txt", "sub/a.txt"):
        (tmp_path / file).write_text(text)
    path = keys.get("path", "AT/a.jsonl")
    words = {**keys, "path": path and path.replace("AT", str(tmp_path))}
    with pytest.raises(Unreadable) as refused:
        prepare_corpus(
            Data(name="pairs", documents=True, validation=0.0, **words),
            vocab=256,
            seq=SEQ,
            cache=tmp_path / "cache",
            progress=lambda *_: None,
        )
    assert str(refused.value).replace(str(tmp_path), "AT") == line
    assert not list((tmp_path / "cache").glob("*.new"))
