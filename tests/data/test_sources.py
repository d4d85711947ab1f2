"""Every kind of source yields its files' tokens, in order, with their documents."""

from __future__ import annotations

import gzip
import json
import sys
import sysconfig
from collections import Counter
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrain.tests.fakes.small_corpus import documents, mapped_tokens, small_corpus, split_tokens
from distrain.trainer.loop.data.check_data import TEXT_SEARCH
from distrain.trainer.loop.data.files.find import DataFile, find_files, library_files
from distrain.trainer.loop.data.prepare import cache_folder
from distrain.trainer.loop.data.samples import corpus as corpus_module
from distrain.trainer.loop.data.tokenize.text_files import SHARE, split_turns
from distrain.trainer.loop.data.tokenize.workers import tokenize_turns
from distrain.trainer.spec.derived.data_blends import Blend
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.read import read
from distrain.trainer.spec.run import Data

TEXTS = ["to be,\nor not to be", "Ünïcödé 字 \U0001f600", "a", 'quotes " and \\ and \t'] * 4


def of_bytes(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), 0] for text in texts]


def write_jsonl(path: Path, key: str = "text") -> None:
    lines = [json.dumps({"id": index, key: text}, ensure_ascii=index % 2 == 0) for index, text in enumerate(TEXTS)]
    text = "\n".join([*lines[:3], "", *lines[3:], json.dumps({key: ""})]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


# Text


def test_a_text_file_is_its_bytes_and_an_end_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[1])
    corpus = small_corpus(tmp_path, name="text", path=str(tmp_path / "a.txt"))
    assert documents(corpus) == of_bytes(TEXTS[1:2])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("key", ["text", "content"])
def test_each_json_line_is_a_document_and_blank_lines_are_skipped(name: str, key: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / name, key)
    assert documents(small_corpus(tmp_path, name="text", path=str(tmp_path / name), text_key=key)) == of_bytes(TEXTS)


def test_a_compressed_text_is_one_document(tmp_path: Path) -> None:
    text = "".join(f"line {index}\n" for index in range(5000)) + "and no line end"
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert documents(small_corpus(tmp_path, name="text", path=str(tmp_path / "a.txt.gz"))) == of_bytes([text])


def test_a_folder_is_its_text_files_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "c.txt", "ignored.pdf", ".hidden/x.txt", "a/.x.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    assert documents(small_corpus(tmp_path, name="text", path=str(tmp_path / "in"))) == of_bytes(["a/z.txt", "b.txt", "c.txt"])


def test_a_pattern_takes_files_of_any_suffix(tmp_path: Path) -> None:
    for name in ("b.md", "a/z.md", "c.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    assert documents(small_corpus(tmp_path, name="text", path=f"{tmp_path}/in/**/*.md")) == of_bytes(["a/z.md", "b.md"])


def test_several_paths_are_one_text_in_their_order(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("b.txt", "a.txt")]
    for path in paths:
        path.write_text(path.name)
    corpus = small_corpus(tmp_path, name="text", path=tuple(map(str, paths)))
    assert documents(corpus) == of_bytes(["b.txt", "a.txt"])


def test_each_of_several_paths_with_weights_is_a_source(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("b.txt", "a.txt")]
    for path in paths:
        path.write_text(path.name * 9)
    corpus = small_corpus(tmp_path, name="text", path=tuple(map(str, paths)), weights=(1.0, 3.0))
    assert [documents(corpus, source) for source in (0, 1)] == [of_bytes([path.name * 9]) for path in paths]
    assert corpus.blends == (Blend((1.0, 3.0), None),)


def test_the_standard_library_is_read_in_a_fixed_order(tmp_path: Path) -> None:
    files = library_files()
    names = [file.name for file in files]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not [name for name in names if set(Path(name).parts) & {"test", "tests", "site-packages", "idlelib", "encodings"}]
    corpus = small_corpus(tmp_path, name="stdlib")
    first = Path(sysconfig.get_path("stdlib"), names[0]).read_bytes()
    assert documents(corpus)[0] == [*first, 0]
    assert mapped_tokens(corpus).size == sum(file.size + 1 for file in files)


def test_entropy_is_that_of_the_training_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 500 + "c" * 500)
    corpus = small_corpus(tmp_path, name="text", path=str(tmp_path / "a.txt"), validation=501 / 1501)
    assert set(split_tokens(corpus, "train")) == {97, 98}
    assert corpus.entropy == pytest.approx(log(2))


def test_entropy_of_much_held_out_text_is_that_of_all_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are counted together, and ranges that cross a block of tokens too."""
    write_jsonl(tmp_path / "a.jsonl")
    words: dict[str, Any] = {"name": "text", "path": str(tmp_path / "a.jsonl"), "validation": 0.3}
    monkeypatch.setattr(corpus_module, "BLOCK", 7)
    train, whole = (Counter(split_tokens(small_corpus(tmp_path, **words), split)) for split in ("train", "validation"))
    assert small_corpus(tmp_path, **words).entropy == pytest.approx(entropy_of(train))
    monkeypatch.setattr(corpus_module, "MOST_COUNTED", 1)
    assert small_corpus(tmp_path, **words).entropy == pytest.approx(entropy_of(train + whole))


def entropy_of(counts: Counter[int]) -> float:
    return -sum(many / counts.total() * log(many / counts.total()) for many in counts.values())


def test_lines_of_any_length_are_read_whole(tmp_path: Path) -> None:
    """A line crosses the turns of 8 MiB in which files are read, and no other line begins within a MiB."""
    texts = ["a" * 5_000_000, "b" * 7_000_000, "c" * 20, "d" * 9_000_000]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    assert documents(small_corpus(tmp_path, path=str(tmp_path / "a.jsonl"))) == of_bytes(texts)


def test_entropy_of_a_blend_is_by_weight(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 1000)
    paths = tuple(str(tmp_path / f"{name}.txt") for name in "ab")
    corpus = small_corpus(tmp_path, name="text", path=paths, weights=(1.0, 3.0), validation=0.1, end=0)
    assert corpus.entropy == pytest.approx(-(log(0.25) + 3 * log(0.75)) / 4)


# Large text, in parallel

LINES = [f"{index} {'x' * (index % 97)}" for index in range(350_000)]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_large_file_is_tokenized_by_several_processes(name: str, processes: int, tmp_path: Path) -> None:
    lines = [json.dumps({"text": line}) for line in LINES] if name.endswith("jsonl") else LINES
    (tmp_path / name).write_text("\n".join(lines))
    turns = split_turns([DataFile(name, tmp_path / name, (tmp_path / name).stat().st_size)])
    assert len(turns) > 2
    parts = list(tokenize_turns(turns, tmp_path, ("bytes", None, "text"), processes))
    tokens = b"".join(Path(f"{part}.tokens").read_bytes() for part in parts)
    ends = [len(np.fromfile(f"{part}.ends", np.int64)) for part in parts]
    assert tokens == ("\0".join(LINES) + "\0" if name.endswith("jsonl") else "\n".join(LINES) + "\0").encode()
    assert sum(ends) == (len(LINES) if name.endswith("jsonl") else 1)


def test_a_large_text_without_lines_is_cut_between_characters(tmp_path: Path) -> None:
    text = "字" * (SHARE // 2)
    (tmp_path / "a.txt").write_text(text)
    turns = split_turns([DataFile("a.txt", tmp_path / "a.txt", len(text) * 3)])
    parts = [Path(f"{part}.tokens").read_bytes() for part in tokenize_turns(turns, tmp_path, ("bytes", None, "text"), 1)]
    assert len(parts) == 2
    assert "".join(part.decode() for part in parts) == text + "\0"


def test_many_small_files_share_a_turn() -> None:
    files = [DataFile(str(index), Path(str(index)), SHARE // 10) for index in range(25)]
    turns = split_turns(files)
    assert [len(spans) for spans in turns] == [10, 10, 5]
    assert [span.path for spans in turns for span in spans] == [file.name for file in files]


# A vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_tokenizer_json_encodes_and_ends_documents(name: str, vocabulary: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_jsonl(tmp_path / name)
    rules = Tokenizer.from_file(str(vocabulary))
    expected = [[*rules.encode(text).ids, 1] for text in TEXTS]
    corpus = small_corpus(tmp_path, 300, name="text", path=str(tmp_path / name), tokenizer=str(vocabulary))
    assert documents(corpus) == expected
    assert mapped_tokens(corpus).files[0].dtype == np.uint16


def test_the_end_token_is_the_eos_token_of_the_tokenizer_folder(vocabulary: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(vocabulary.read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<pad>"}}')
    write_jsonl(tmp_path / "a.jsonl")
    words: dict[str, Any] = {"name": "text", "path": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path)}
    assert {text[-1] for text in documents(small_corpus(tmp_path, 300, **words))} == {0}
    assert {text[-1] for text in documents(small_corpus(tmp_path, 300, **words, end=5))} == {5}


def test_a_long_document_is_encoded_in_pieces_that_end_with_a_line(vocabulary: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    text = "".join(f"{index} to be or not\n" for index in range(45_000))
    (tmp_path / "a.txt").write_text(text)
    corpus = small_corpus(tmp_path, 300, name="text", path=str(tmp_path / "a.txt"), tokenizer=str(vocabulary))
    assert documents(corpus) == [[*Tokenizer.from_file(str(vocabulary)).encode(text).ids, 1]]


def test_a_missing_tokenizers_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Unreadable, match="needs the tokenizers package, which is not installed: pip install tokenizers"):
        small_corpus(tmp_path, name="stdlib", tokenizer=str(tmp_path / "tokenizer.json"))


# The words


def test_the_same_contents_have_the_same_key_in_any_folder(tmp_path: Path) -> None:
    keys = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text("to be or not to be")
        keys.append(small_corpus(tmp_path / place, name="text", path=str(tmp_path / place)).key)
    assert keys[0] == keys[1]


@pytest.mark.parametrize(("path", "kept"), [("a", "a"), (["a", "b"], ("a", "b")), (None, None)])
def test_a_path_is_one_or_several(path: Any, kept: Any) -> None:
    assert read({"name": "text", "path": path}, Data).path == kept


def test_the_cache_is_in_the_users_cache_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder(Data()) == Path("/x/distrain/data")
    assert cache_folder(Data(cache="/y")) == Path("/y")


def test_a_folder_is_read_with_links_to_files_but_not_to_folders_and_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("text/b/two.txt", "text/b.txt", "text/b/c/three.txt", "text/.git/four.txt", "text/.five.txt", "elsewhere/six.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "text" / "linked.txt").symlink_to(tmp_path / "elsewhere" / "six.txt")
    (tmp_path / "text" / "folder.txt").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text" / "dangling.txt").symlink_to("nowhere")
    (found,) = find_files([str(tmp_path / "text")], TEXT_SEARCH, lambda _: None, [])
    assert [file.name for file in found] == ["b.txt", "b/c/three.txt", "b/two.txt", "linked.txt"]
    assert [file.path for file in found] == [tmp_path / "text" / file.name for file in found]
    assert [file.size for file in found] == [file.path.stat().st_size for file in found]
