"""Each problem with data is reported in one line, with the file, the place in it, and the fix."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.token_files import MEGATRON
from distrain.trainer.loop.data.tokenize.text_files import SHARE
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data


def lines(at: Path, name: str, *rows: str) -> Any:
    (at / name).write_text("".join(f"{row}\n" for row in rows))


def tokens(at: Path, name: str, ids: Any, dtype: Any = np.uint16) -> Any:
    np.array(ids, dtype).tofile(at / name)


def pair(at: Path, *, magic: bytes = MEGATRON, version: int = 1, code: int = 8, held: int | None = 20, last: int = 1) -> None:
    """An index of one document of 20 tokens, and so many tokens."""
    (at / "a.idx").write_bytes(magic + struct.pack("<QBQQiqqq", version, code, 1, 2, 20, 0, 0, last))
    if held is not None:
        tokens(at, "a.bin", range(held))


def two_shares(at: Path) -> None:
    """Bad in its second share: 12 MB of good lines, of 1000 bytes each, before it."""
    row = '{"text": "' + "x" * 987 + '"}\n'
    (at / "a.jsonl").write_text(row * (SHARE * 3 // 2 // 1000) + "{\n")


def pack(at: Path, name: str, text: str, keep: int | None = None) -> None:
    (at / name).write_bytes(gzip.compress(text.encode(), mtime=0)[:keep])


def cut_array(at: Path) -> None:
    np.save(at / "a.npy", np.arange(99))
    os.truncate(at / "a.npy", 200)


def two_arrays(at: Path) -> None:
    with (at / "a.npy").open("wb") as file:
        np.save(file, np.arange(10))
        np.save(file, np.arange(10))


# How the files are written, the keys of data (AT: the folder), and the line.
# fmt: off
WRONG: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "no path": (lambda at: None, {"name": "text"},
        "data=text reads files, but data.path is not set: set data.path=FILE, a folder or a pattern"),
    "an idle path": (lambda at: None, {"name": "stdlib", "path": "x"},
        "data.path=x is not read by data=stdlib: set data=text, data=tokens, data=pairs or data=preferences, or data.path=null"),
    "weights of other paths": (lambda at: None, {"name": "text", "path": ("x", "y"), "weights": (1.0,)},
        ("data.weights has 1 weight for 2 paths: give each path of data.path one weight\n"
         "data.path=x: no such file or folder\ndata.path=y: no such file or folder")),
    "a missing path": (lambda at: lines(at, "corpus.txt", "x"), {"name": "text", "path": "AT/corpsu.txt"},
        "data.path=AT/corpsu.txt: no such file or folder: did you mean corpus.txt?"),
    "a missing folder": (lambda at: None, {"name": "text", "path": "AT/no/a.txt"},
        "data.path=AT/no/a.txt: no such file or folder: there is no folder AT/no"),
    "a remote path": (lambda at: None, {"name": "text", "path": "s3://bucket/*.jsonl"},
        "data.path=s3://bucket/*.jsonl: remote paths are not read: copy the files to a folder, or mount them there"),
    "a pattern without files": (lambda at: None, {"name": "text", "path": "AT/*.md"},
        "data.path=AT/*.md matches no file"),
    "a folder without text": (lambda at: lines(at, "a.md", "x"), {"name": "text", "path": "AT"},
        ("data.path=AT has no .txt, .jsonl, .json, .ndjson (or one of them as .gz or .zst), .parquet or .arrow in it, only 1 .md: "
         "name files of other kinds with a pattern: data.path='AT/**/*.md'")),
    "a folder of other text": (lambda at: [lines(at, name, "x") for name in ("a.py", "b.md", "c.py")], {"name": "text", "path": "AT"},
        ("data.path=AT has no .txt, .jsonl, .json, .ndjson (or one of them as .gz or .zst), .parquet or .arrow in it, only 2 .py, 1 .md: "
         "name files of other kinds with a pattern: data.path='AT/**/*.py'")),
    "a folder without tokens": (lambda at: None, {"name": "tokens", "path": "AT"},
        "data.path=AT has no .bin, .npy or .ds in it"),
    "an empty file": (lambda at: lines(at, "a.txt"), {"name": "text", "path": "AT/a.txt"},
        "AT/a.txt is empty: name another"),
    "all at once": (lambda at: lines(at, "a.txt"), {"name": "text", "path": ("AT/a.txt", "AT/no/b.txt")},
        "AT/a.txt is empty: leave it out of data.path\ndata.path=AT/no/b.txt: no such file or folder: there is no folder AT/no"),
    "only blank lines": (lambda at: lines(at, "a.jsonl", "", ""), {"name": "text", "path": "AT/a.jsonl"},
        "AT/a.jsonl has no text"),
    "a line that is no JSON": (lambda at: lines(at, "a.jsonl", '{"text": "x"}', '{"text": "x"'), {"name": "text", "path": "AT/a.jsonl"},
        "AT/a.jsonl line 2 is not JSON: Expecting ',' delimiter at character 13"),
    "a bad line in a later share": (two_shares, {"name": "text", "path": "AT/a.jsonl"},
        "AT/a.jsonl line 12583 is not JSON: Expecting property name enclosed in double quotes at character 2"),
    "a line of another kind": (lambda at: lines(at, "a.jsonl", "7"), {"name": "text", "path": "AT/a.jsonl"},
        "AT/a.jsonl line 1 is not a JSON object"),
    "another key": (lambda at: lines(at, "a.jsonl", "", '{"id": 1, "content": "x"}'), {"name": "text", "path": "AT/a.jsonl"},
        "AT/a.jsonl line 2 has no key text: set data.text_key to one of id, content"),
    "no text": (lambda at: lines(at, "a.jsonl", '{"text": 7}'), {"name": "text", "path": "AT/a.jsonl"},
        "AT/a.jsonl line 1 has no text under text but 7"),
    "half a character": (lambda at: lines(at, "a.jsonl", '{"text": "\\ud83d"}'), {"name": "text", "path": "AT/a.jsonl"},
        "AT/a.jsonl line 1 holds half of a character (a lone surrogate)"),
    "text that is not packed": (lambda at: lines(at, "a.txt.gz", "x"), {"name": "text", "path": "AT/a.txt.gz"},
        "AT/a.txt.gz is no .gz file: end its name in .txt"),
    "packed text cut short": (lambda at: pack(at, "a.txt.gz", "x\n" * 10, 15), {"name": "text", "path": "AT/a.txt.gz"},
        "AT/a.txt.gz cannot be decompressed: Compressed file ended before the end-of-stream marker was reached"),
    "packed lines cut short": (lambda at: pack(at, "a.jsonl.gz", '{"text": "x"}\n' * 10, -4), {"name": "text", "path": "AT/a.jsonl.gz"},
        "AT/a.jsonl.gz line 11 cannot be decompressed: Compressed file ended before the end-of-stream marker was reached"),
    "a tokenizer that is missing": (lambda at: lines(at, "a.txt", "x"), {"name": "text", "path": "AT/a.txt", "tokenizer": "AT/t.json"},
        "data.tokenizer=AT/t.json: No such file or directory: set it to bytes or to the path of a tokenizer.json"),
    "an end that is no byte": (lambda at: lines(at, "a.txt", "x"), {"name": "text", "path": "AT/a.txt", "end": 256},
        "data.end=256 is not a token of data.tokenizer=bytes: its ids end at 255"),
    "a byte out of the vocabulary": (lambda at: lines(at, "a.txt", "~" * 99), {"name": "text", "path": "AT/a.txt"},
        "the text has token 126, and model.vocab=100: set model.vocab=256"),
    "a token out of the vocabulary": (lambda at: tokens(at, "a.bin", [1, 2, 300, 4, 400]), {"name": "tokens", "path": "AT/a.bin"},
        ("AT/a.bin: token 300 at position 2 is not in the vocabulary, model.vocab=100: "
         "the largest id near it is 400: train a model with the vocabulary of the tokenizer that wrote the file")),
    "too little text": (lambda at: lines(at, "a.txt", "x" * 7), {"name": "text", "path": "AT/a.txt"},
        "train has 9 tokens of data=text, fewer than one sequence and the token after it: train.seq=16: set train.seq to at most 8"),
    "an odd file of tokens": (lambda at: tokens(at, "a.bin", range(5), np.uint8), {"name": "tokens", "path": "AT/a.bin"},
        ("AT/a.bin has 5 bytes, but its ids seem to take 2 bytes each: "
         "it may be truncated; or write it with numpy.save, which records the width")),
    "documents that nobody bounds": (lambda at: tokens(at, "a.bin", range(50)), {"name": "tokens", "path": "AT/a.bin", "documents": True},
        "data.documents=true, but AT/a.bin does not say where documents end: set data.end to the token id that ends one (GPT-2: 50256)"),
    "an index without its pair": (lambda at: pair(at, held=None), {"name": "tokens", "path": "AT/a.idx"},
        "AT/a.bin: no such file: a.idx needs it in the same folder"),
    "no index": (lambda at: pair(at, magic=b"TNTIDX\x00\x00"), {"name": "tokens", "path": "AT/a.bin"},
        "AT/a.idx is not a Megatron index: it does not begin with MMIDIDX: move it away if the .bin is nanoGPT's"),
    "an index of another version": (lambda at: pair(at, version=2), {"name": "tokens", "path": "AT/a.bin"},
        "AT/a.idx is damaged or of an unknown kind: version 2, type 8, 62 bytes: write it again"),
    "an index of floats": (lambda at: pair(at, code=7), {"name": "tokens", "path": "AT/a.bin"},
        "AT/a.idx is damaged or of an unknown kind: version 1, type 7, 62 bytes: write it again"),
    "an index of another file": (lambda at: pair(at, held=19), {"name": "tokens", "path": "AT/a.bin"},
        "AT/a.bin has 38 bytes, but a.idx says 40: they do not belong together"),
    "an index of what is not there": (lambda at: pair(at, last=9), {"name": "tokens", "path": "AT/a.bin"},
        "AT/a.bin has 40 bytes, but a.idx says 40: they do not belong together"),
    "llm.c's cut short": (lambda at: tokens(at, "a.bin", [20240520, 1, 9, *[0] * 253], np.int32), {"name": "tokens", "path": "AT/a.bin"},
        "AT/a.bin has 1024 bytes, but its header says 9 tokens of 2: it is truncated: write it again"),
    "a file of llm.c's that is none of tokens": (lambda at: tokens(at, "a.bin", [20240326, 5, *[0] * 254], np.int32),
        {"name": "tokens", "path": "AT/a.bin"},
        "AT/a.bin is an llm.c file without tokens or of an unknown kind: 20240326, version 5"),
    "ids of four bytes of another tokenizer": (lambda at: tokens(at, "a.bin", [*range(1, 100), 300], np.uint32),
        {"name": "tokens", "path": "AT/a.bin"},
        ("AT/a.bin: token 300 at position 99 is not in the vocabulary, model.vocab=256: "
         "the largest id near it is 300: train a model with the vocabulary of the tokenizer that wrote the file, "
         "or its ids may not take 4 bytes, as they seem to: numpy.save records the width")),
    "tokens of four bytes cut short": (lambda at: (at / "a.bin").write_bytes(np.arange(1, 100, dtype=np.uint32).tobytes()[:-2]),
        {"name": "tokens", "path": "AT/a.bin"},
        ("AT/a.bin has 394 bytes, but its ids seem to take 4 bytes each: "
         "it may be truncated; or write it with numpy.save, which records the width")),
    "an array of floats": (lambda at: np.save(at / "a.npy", np.zeros(9)), {"name": "tokens", "path": "AT/a.npy"},
        "AT/a.npy is an array of float64, but token ids are integers: numpy.save(FILE, ids.astype('uint32'))"),
    "an array of truths": (lambda at: np.save(at / "a.npy", np.zeros(9, bool)), {"name": "tokens", "path": "AT/a.npy"},
        "AT/a.npy is an array of bool, but token ids are integers: numpy.save(FILE, ids.astype('uint32'))"),
    "an array of rows": (lambda at: np.save(at / "a.npy", np.zeros((3, 4), int)), {"name": "tokens", "path": "AT/a.npy"},
        "AT/a.npy is an array of 3 x 4: token ids need one dimension: numpy.save(FILE, ids.reshape(-1))"),
    "an array of objects": (lambda at: np.save(at / "a.npy", np.array([[1], [2, 3]], object)), {"name": "tokens", "path": "AT/a.npy"},
        "AT/a.npy is a NumPy array that can't be read: Array can't be memory-mapped: Python objects in dtype.: write it again"),
    "an array cut short": (lambda at: cut_array(at),
        {"name": "tokens", "path": "AT/a.npy"},
        "AT/a.npy is a NumPy array that can't be read: mmap length is greater than file size: write it again"),
    "an array without numbers": (lambda at: np.save(at / "a.npy", np.zeros(0, int)), {"name": "tokens", "path": "AT/a.npy"},
        "AT/a.npy has no tokens: leave it out of data.path"),
    "two arrays in a file": (two_arrays, {"name": "tokens", "path": "AT/a.npy"},
        "AT/a.npy has 208 bytes after its array: write a file for each array"),
    "several arrays": (lambda at: np.savez(at / "a.npz", a=np.arange(9)), {"name": "tokens", "path": "AT/a.npz"},
        "AT/a.npz is NumPy's .npz: save each array alone: numpy.save, as .npy"),
    "negative ids": (lambda at: np.save(at / "a.npy", np.array([1, 2, -100] * 20)), {"name": "tokens", "path": "AT/a.npy"},
        ("AT/a.npy: token -100 at position 2 is not in the vocabulary, model.vocab=256: "
         "the largest id near it is 2: train a model with the vocabulary of the tokenizer that wrote the file")),
    "an index of datatrove's of another file": (lambda at: (tokens(at, "a.ds", range(20)), tokens(at, "a.ds.index", [7], np.uint64)),
        {"name": "tokens", "path": "AT/a.ds"},
        "AT/a.ds has 40 bytes, which does not match a.ds.index: 7 tokens: write the files again together"),
    "datatrove's metadata of another file": (lambda at: (tokens(at, "a.ds", range(20)), lines(at, "a.ds.metadata", "gpt2|4", "20")),
        {"name": "tokens", "path": "AT/a.ds"},
        "AT/a.ds has 40 bytes, which does not match a.ds.metadata: 20 tokens: write the files again together"),
    "an index of datatrove's alone": (lambda at: (tokens(at, "a.ds", range(20)), tokens(at, "a.ds.index", [20], np.uint64)),
        {"name": "tokens", "path": "AT/a.ds.index"},
        "AT/a.ds.index belongs to a.ds: name that file"),
    "an end that is no token": (lambda at: tokens(at, "a.bin", range(99)), {"name": "tokens", "path": "AT/a.bin", "end": 256},
        "data.end=256 is not in the vocabulary, model.vocab=256: its ids end at 255"),
    "an end that ends nothing": (lambda at: tokens(at, "a.bin", range(99)),
        {"name": "tokens", "path": "AT/a.bin", "end": 250, "documents": True},
        ("data.documents=true, but data.end=250 occurs nowhere in AT/a.bin: "
         "set data.end to the token id that ends a document (GPT-2: 50256)")),
    "a share that leaves nothing to train on": (lambda at: tokens(at, "a.bin", range(99)),
        {"name": "tokens", "path": "AT/a.bin", "validation": 0.9},
        ("train has 10 tokens of data=tokens, fewer than one sequence and the token after it: train.seq=16: "
         "set data.validation to at most 0.4141")),
    "a file for validation and nothing else": (lambda at: (tokens(at, "train.bin", range(9)), tokens(at, "val.bin", range(99))),
        {"name": "tokens", "path": "AT"},
        "train has 9 tokens of data=tokens, fewer than one sequence and the token after it: train.seq=16: give more text"),
    "all of a user's mistakes at once": (lambda at: (at / "b.csv").write_text("a,b\n"),
        {"name": "text", "path": ("AT/a.txt", "AT/b.csv"), "weights": (1.0,), "tokenizer": "AT/t.json"},
        ("data.weights has 1 weight for 2 paths: give each path of data.path one weight\n"
         "data.tokenizer=AT/t.json: No such file or directory: set it to bytes or to the path of a tokenizer.json\n"
         "data.path=AT/a.txt: no such file or folder\n"
         "AT/b.csv is a table: "
         'write its text as .jsonl, {"text": "..."} a line, or rename it .txt to train on it as it is')),
    "a device": (lambda at: None, {"name": "text", "path": "/dev/null"},
        "data.path=/dev/null is a pipe or a device, not a file: write its contents to a file and name that"),
    "nobody's home": (lambda at: None, {"name": "text", "path": "~nobody-is-called-so/a.txt"},
        "data.path=~nobody-is-called-so/a.txt: Could not determine home directory"),
    "a name that is too long": (lambda at: None, {"name": "text", "path": "x" * 300},
        f"data.path={'x' * 300}: File name too long"),
    "a zero byte in a name": (lambda at: None, {"name": "text", "path": "a\0b"},
        "data.path=a\0b: no such file or folder"),
    "a link to nothing": (lambda at: (at / "a.txt").symlink_to(at / "b"), {"name": "text", "path": "AT/a.txt"},
        "data.path=AT/a.txt is a link to AT/b, which does not exist"),
    "a pattern of empty files": (lambda at: lines(at, "a.txt"), {"name": "text", "path": "AT/*.txt"},
        "data.path=AT/*.txt matches only empty files"),
    "a folder of empty files": (lambda at: lines(at, "a.txt"), {"name": "text", "path": "AT"},
        "data.path=AT has only empty files in it"),
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_each_problem_is_reported_in_one_line(name: str, tmp_path: Path) -> None:
    write, words, line = WRONG[name]
    write(tmp_path)
    paths = words.get("path")
    words = {**words, "path": tuple(path.replace("AT", str(tmp_path)) for path in paths) if isinstance(paths, tuple) else paths}
    words = {key: value.replace("AT", str(tmp_path)) if isinstance(value, str) else value for key, value in words.items()}
    with pytest.raises(Unreadable) as refused:
        prepare_corpus(
            Data(**words), vocab=100 if "vocabulary" in name else 256, seq=16, cache=tmp_path / "cache", progress=lambda *_: None
        )
    assert str(refused.value).replace(str(tmp_path), "AT") == line
    assert {problem.rule for problem in refused.value.problems} == {"data"}
    assert not list((tmp_path / "cache").glob("*.new"))


def test_a_too_small_model_vocabulary_is_refused_with_a_filled_cache(tmp_path: Path) -> None:
    tokens(tmp_path, "a.bin", range(200))
    data = Data(name="tokens", path=str(tmp_path / "a.bin"))
    prepare_corpus(data, vocab=200, seq=16, cache=tmp_path / "cache", progress=lambda *_: None)
    with pytest.raises(Unreadable, match=r"token 150 at position 150 is not in the vocabulary, model.vocab=150"):
        prepare_corpus(data, vocab=150, seq=16, cache=tmp_path / "cache", progress=lambda *_: None)


def test_a_tokenizer_larger_than_the_model_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{index}": index for index in range(300)}))
    made.save(str(tmp_path / "tokenizer.json"))
    lines(tmp_path, "a.txt", "w1")
    data = Data(name="text", path=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(Unreadable) as refused:
        prepare_corpus(data, vocab=256, seq=16, cache=tmp_path / "cache", progress=lambda *_: None)
    says = f"data.tokenizer={tmp_path}/tokenizer.json has ids up to 299, but model.vocab=256: set model.vocab=300"
    assert str(refused.value) == says


def test_text_that_is_not_utf8_is_refused_with_a_tokenizer_json(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"w": 0})).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    data = Data(name="text", path=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(Unreadable) as refused:
        prepare_corpus(data, vocab=256, seq=4, cache=tmp_path / "cache", progress=lambda *_: None)
    assert str(refused.value) == f"{tmp_path}/a.txt is not UTF-8 text: invalid continuation byte in b'\\xe9 au lai'"
