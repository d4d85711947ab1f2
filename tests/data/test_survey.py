"""The survey of data before a run: figures, remarks and every problem, as JSON lines."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrain.tests.fakes.small_tokenizer import LINE, write_tokenizer
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.corpus_stats import corpus_stats
from distrain.trainer.loop.data.samples.document_lengths import few_lengths
from distrain.trainer.loop.data.survey import AnswerStream, ReaderGone, answer
from distrain.trainer.spec.run import Data


def ask(mode: str = "look", vocab: int = 256, seq: int = 8, *, evaluate: bool = False, **data: Any) -> list[dict[str, Any]]:
    """Run the survey in this process and return every line of its answer."""
    reader, writer = os.pipe()
    question = {"data": data, "vocab": vocab, "seq": seq, "mode": mode, "evaluate": evaluate}
    with os.fdopen(reader) as said:
        answers = AnswerStream(writer)
        answers.send(answer(json.dumps(question).encode(), answers))
        os.close(writer)
        return [json.loads(line) for line in said]


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts, which are the last line and come once."""
    assert [list(line) for line in lines if "facts" in line or "problems" in line] == [["facts"]]
    found: dict[str, Any] = lines[-1]["facts"]
    return found


def problems(lines: list[dict[str, Any]]) -> list[str]:
    assert "facts" not in str([list(line) for line in lines])
    return [problem["says"] for problem in lines[-1]["problems"]]


def remarks(lines: list[dict[str, Any]]) -> list[str]:
    return [line["remark"] for line in lines if "remark" in line]


def write_lines(path: Path, count: int = 4000) -> Path:
    """Texts that grow longer; packed ones, which are looked into at their start only, do not."""
    lengths = [index // 70 if path.suffix != ".gz" else index * 17 % 57 for index in range(count)]
    rows = [json.dumps({"id": index, "text": f"document {index}\n" + "word " * length}) for index, length in enumerate(lengths)]
    text = "".join(f"{row}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


# Figures


def test_figures_of_a_prepared_corpus_are_exact(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", 500)
    words: dict[str, Any] = {"name": "text", "path": str(path), "cache": str(tmp_path / "cache"), "validation": 0.1}
    lines = ask("prepare", **words)
    corpus = prepare_corpus(Data(**words), vocab=256, seq=8, cache=tmp_path / "cache", progress=lambda *_: None)
    assert figures(lines) == {
        "key": corpus.key,
        "tokens": {"train": corpus.size("train"), "validation": corpus.size("validation")},
        "documents": 500,
        "exact": True,
        "bytes": path.stat().st_size,
        "entropy": corpus.entropy,
        "lengths": list(few_lengths([len(f"document {index}\n") + 5 * (index // 70) + 1 for index in range(500)])),
        "sources": [{"train": corpus.size("train"), "validation": corpus.size("validation"), "epoch": corpus.size("train")}],
    }
    assert {next(iter(line["progress"])) for line in lines if "progress" in line} == {"hash", "tokenize"}
    assert figures(ask("look", **words)) == {**figures(lines), "entropy": None}
    assert corpus_stats(corpus, 8).to_json() == {**figures(lines), "entropy": None}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("by", ["bytes", "tokenizer.json"])
def test_unread_text_is_estimated(by: str, name: str, tmp_path: Path) -> None:
    """Within a quarter, of texts that grow to twenty times their length."""
    path = write_lines(tmp_path / name) if "jsonl" in name else write_table(tmp_path / name)
    if by != "bytes":
        by = str(write_tokenizer(tmp_path))
    words: dict[str, Any] = {"name": "text", "path": str(path), "cache": str(tmp_path / "cache"), "tokenizer": by}
    guess, right = figures(ask("look", 300, **words)), figures(ask("prepare", 300, **words))
    assert (guess["key"], guess["exact"], guess["bytes"]) == (None, False, right["bytes"])
    assert guess["tokens"]["train"] == pytest.approx(right["tokens"]["train"], rel=0.25)
    assert guess["tokens"]["validation"] == pytest.approx(guess["tokens"]["train"] / 99, rel=0.01)
    assert guess["documents"] == pytest.approx(right["documents"], rel=0.25)
    assert guess["lengths"] == []  # a sample has few of the long documents


def write_table(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    rows = pyarrow.table({"text": [f"document {index}\n" + "word " * (index // 70) for index in range(4000)]})
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(rows, path, row_group_size=200)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=200)
    return path


def test_the_size_of_plain_text_as_bytes_is_exact(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(LINE * 1000)
    words: dict[str, Any] = {"name": "text", "path": f"{tmp_path}/*.txt", "cache": str(tmp_path / "cache")}
    guess, right = figures(ask("look", **words)), figures(ask("prepare", **words))
    assert sum(guess["tokens"].values()) == sum(right["tokens"].values()) == 2 * (1000 * len(LINE) + 1)
    assert guess["documents"] == right["documents"] == 2


@pytest.mark.parametrize("end", [None, 7])
def test_sizes_of_token_files_are_exact_before_they_are_read(end: int | None, tmp_path: Path) -> None:
    np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint16).tofile(tmp_path / "a.bin")
    words: dict[str, Any] = {"name": "tokens", "path": str(tmp_path / "a.bin"), "cache": str(tmp_path / "cache"), "end": end}
    look, right = figures(ask("look", **words)), figures(ask("prepare", **words))
    assert look["exact"]
    assert (look["key"], look["documents"]) == (None, None)
    assert sum(look["tokens"].values()) == sum(right["tokens"].values()) == 5000
    if end is None:
        assert look["tokens"] == right["tokens"]
        assert right["documents"] is None
    else:
        assert right["documents"] > 1


def test_files_named_for_validation_are_counted_separately(tmp_path: Path) -> None:
    for name, size in (("train.bin", 900), ("val.bin", 100)):
        np.arange(size, dtype=np.uint16).tofile(tmp_path / name)
    for mode in ("look", "prepare"):
        lines = ask(mode, 1000, name="tokens", path=str(tmp_path), cache=str(tmp_path / "cache"))
        assert figures(lines)["tokens"] == {"train": 900, "validation": 100}


def test_each_source_of_a_blend_is_counted(tmp_path: Path) -> None:
    for name, lines in (("a.txt", 100), ("b.txt", 300)):
        (tmp_path / name).write_text(LINE * lines)
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    found = figures(ask(name="text", path=paths, weights=[1, 3], validation=0.0, cache=str(tmp_path / "cache")))
    assert found["sources"] == [
        {"train": 100 * len(LINE) + 1, "validation": 0, "epoch": 100 * len(LINE) + 1},
        {"train": 300 * len(LINE) + 1, "validation": 0, "epoch": 300 * len(LINE) + 1},
    ]


def test_synthetic_figures_are_exact(tmp_path: Path) -> None:
    found = figures(ask(name="synthetic"))
    assert found["exact"]
    assert sum(found["tokens"].values()) == 1 << 34


def test_mode_look_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE * 1000)
    ask(name="text", path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


# Problems and remarks


@pytest.mark.parametrize("mode", ["look", "prepare"])
def test_all_problems_come_at_once(mode: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n")
    (tmp_path / "b.jsonl").write_text("[1]\n")
    paths = [str(tmp_path / name) for name in ("a.csv", "b.jsonl")]
    lines = ask(mode, name="text", path=paths, weights=[1], tokenizer=str(tmp_path / "no.json"))
    assert problems(lines) == [
        "data.weights has 1 weight for 2 paths",
        f"data.tokenizer={tmp_path}/no.json: No such file or directory",
        f"{tmp_path}/a.csv is a table",
        f"{tmp_path}/b.jsonl is a JSON array",
    ]
    assert lines[-1]["problems"][0] == {
        "rule": "data",
        "says": "data.weights has 1 weight for 2 paths",
        "mend": "give each path of data.path one weight",
    }


def test_mode_look_finds_a_missing_text_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "a"}\n')
    assert problems(ask(name="text", path=str(tmp_path / "a.jsonl"))) == [
        f"{tmp_path}/a.jsonl line 1 has no key text: set data.text_key to one of content"
    ]


@pytest.mark.parametrize("mode", ["look", "prepare"])
@pytest.mark.parametrize("name", ["text", "tokens"])
def test_too_little_to_train_on_is_a_problem(mode: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefgh")
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "a.bin")
    path = tmp_path / ("a.txt" if name == "text" else "a.bin")
    (says,) = problems(ask(mode, seq=64, name=name, path=str(path), cache=str(tmp_path / "cache")))
    assert says.startswith("train has ")
    assert says.endswith(f" tokens of data={name}, fewer than one sequence and the token after it: train.seq=64")


@pytest.mark.parametrize("mode", ["look", "prepare"])
def test_a_validation_share_that_leaves_nothing_to_train_on_is_named(mode: str, tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    lines = ask(mode, name="tokens", path=str(tmp_path / "a.bin"), validation=0.95, cache=str(tmp_path / "cache"))
    assert lines[-1]["problems"][0]["mend"] == "set data.validation to at most 0.455"


@pytest.mark.parametrize("mode", ["look", "prepare"])
def test_every_short_source_is_named(mode: str, tmp_path: Path) -> None:
    for index, size in enumerate((5, 100, 6)):
        np.arange(size, dtype=np.uint16).tofile(tmp_path / f"{index}.bin")
    paths = [str(tmp_path / f"{index}.bin") for index in range(3)]
    says = problems(ask(mode, name="tokens", path=paths, weights=[1, 1, 1], validation=0.0, cache=str(tmp_path / "cache")))
    assert [each.partition(",")[0] for each in says] == [
        f"train has {size} tokens of path {place} of 3 of data=tokens" for place, size in ((1, 5), (3, 6))
    ]


def test_too_little_validation_text_is_a_problem_if_the_run_evaluates(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE * 10)
    words: dict[str, Any] = {"name": "text", "path": str(tmp_path / "a.txt"), "cache": str(tmp_path / "cache"), "validation": 0.01}
    figures(ask("prepare", **words))
    for mode in ("look", "prepare"):
        (says,) = problems(ask(mode, evaluate=True, **words))
        assert says == "validation has 4 tokens of data=text, fewer than one sequence and the token after it: train.seq=8"


def test_malformed_data_keys_are_a_problem() -> None:
    assert problems(ask(name="txt")) == ["data.name=txt is not one of stdlib, text, tokens, pairs, preferences, synthetic"]
    assert problems(ask(nam="text")) == ["no key data.nam"]


@pytest.mark.parametrize("question", [b"", b"[]", b'{"data": {}}', b'{"data": {}, "mode": "read", "vocab": 1, "seq": 1}', b"\xff"])
def test_a_malformed_request_is_answered_with_a_problem(question: bytes) -> None:
    assert list(answer(question, AnswerStream(1))) == ["problems"]


@pytest.mark.parametrize("mode", ["look", "prepare"])
def test_a_tokenizer_that_drops_characters_is_remarked_on(mode: str, tmp_path: Path) -> None:
    by = write_tokenizer(tmp_path, unk_token=None)
    (tmp_path / "a.txt").write_text("TO BE OR NOT TO BE\n" * 100)
    said = remarks(ask(mode, 300, name="text", path=str(tmp_path / "a.txt"), tokenizer=str(by), cache=str(tmp_path / "cache")))
    assert said == ["the tokenizer drops 100 % of the characters in a sample of the text: it was made for other text"]


def test_unknown_tokens_are_remarked_on(tmp_path: Path) -> None:
    by = write_tokenizer(tmp_path, unk_token="<unk>")
    (tmp_path / "a.txt").write_text("to be OR not\n" * 100)
    (says,) = remarks(ask("look", 300, name="text", path=str(tmp_path / "a.txt"), tokenizer=str(by)))
    assert says.startswith("the tokenizer does not know ")


def test_carriage_returns_are_remarked_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"to be\r\n" * 100)
    (tmp_path / "b.txt").write_bytes(b"to be\n" * 100)
    ends = f"lines end with CR LF, as in {tmp_path}/a.txt: the CRs become tokens; dos2unix removes them"
    assert remarks(ask(name="text", path=str(tmp_path / "a.txt"))) == [ends]
    assert remarks(ask(name="text", path=str(tmp_path / "b.txt"))) == []


def test_a_remark_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE * 100)
    lines = ask("prepare", 50257, name="text", path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    says = "data.tokenizer=bytes has 256 ids, but model.vocab=50257: the other ids never occur"
    assert remarks(lines) == [f"{says}; published weights need their own tokenizer: data.tokenizer=FOLDER"]


def test_the_survey_ends_when_its_reader_is_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(ReaderGone):
        AnswerStream(writer).remark("to be")
    os.close(writer)


def test_an_unwritable_cache_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE * 100)
    (tmp_path / "cache").write_text("a file")
    words: dict[str, Any] = {"name": "text", "path": str(tmp_path / "a.txt"), "cache": str(tmp_path / "cache")}
    assert problems(ask("prepare", **words)) == [f"the cache {tmp_path}/cache cannot be written: File exists"]
    figures(ask("look", **words))
