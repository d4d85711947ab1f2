"""Files of token ids are mapped as they are, with the documents that they know of and the share that is held out."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrain.trainer.loop.data.corpus import Corpus, Mapped, Split, held_out
from distrain.trainer.loop.data.prepare import prepare
from distrain.trainer.loop.data.tokenfiles import CODES, LLM_C, MEGATRON
from distrain.trainer.spec.run import Data


def opened(folder: Path, vocab: int = 256, **words: Any) -> Corpus:
    return prepare(Data(**words), vocab=vocab, seq=4, cache=folder / "cache", progress=lambda *_: None)


def mapped(corpus: Corpus, source: int = 0) -> Mapped:
    tokens = corpus.sources[source].tokens
    assert isinstance(tokens, Mapped)
    return tokens


def documents(corpus: Corpus, source: int = 0) -> list[list[int]]:
    tokens = mapped(corpus, source)
    whole = np.empty(tokens.size, np.int64)
    tokens.copy(0, whole)
    return [whole[begin:end].tolist() for begin, end in zip(tokens.bounds[:-1], tokens.bounds[1:], strict=True)]


def split(corpus: Corpus, which: Split) -> list[int]:
    runs = corpus.sources[0].runs(which)
    whole = np.empty(runs.size, np.int64)
    filled = 0
    for start, length in runs.pieces(0, runs.size):
        corpus.sources[0].tokens.copy(start, whole[filled : filled + length])
        filled += length
    return whole.tolist()


def write_megatron(prefix: Path, texts: list[list[int]], code: int, sequences: int = 1) -> None:
    """Documents of so many sequences each, as Megatron's IndexedDatasetBuilder writes them."""
    pieces = [list(piece) for text in texts for piece in np.array_split(text, sequences)]
    lengths = np.array([len(piece) for piece in pieces], np.int32)
    item = np.dtype(CODES[code]).itemsize
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * item
    starts = np.arange(0, len(pieces) + 1, sequences, dtype=np.int64)
    head = MEGATRON + struct.pack("<QBQQ", 1, code, len(lengths), len(starts))
    prefix.with_suffix(".idx").write_bytes(head + lengths.tobytes() + offsets.tobytes() + starts.tobytes())
    np.concatenate(texts).astype(CODES[code]).tofile(prefix.with_suffix(".bin"))


def test_a_nanogpt_file_is_mapped_as_it_is(tmp_path: Path) -> None:
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "a.bin")
    corpus = opened(tmp_path, 300, name="tokens", path=str(tmp_path / "a.bin"), validation=0.1)
    assert documents(corpus) == [list(range(300))]
    assert split(corpus, "train") == list(range(270))
    assert split(corpus, "validation") == list(range(270, 300))


def test_an_end_token_bounds_the_documents_of_a_nanogpt_file(tmp_path: Path) -> None:
    np.array([1, 2, 9, 3, 9, 9, 4], np.uint16).tofile(tmp_path / "a.bin")
    assert documents(opened(tmp_path, 10, name="tokens", path=str(tmp_path / "a.bin"), end=9)) == [[1, 2, 9], [3, 9], [9], [4]]


@pytest.mark.parametrize(("train", "held"), [("train.bin", "val.bin"), ("fineweb_train_000001.bin", "fineweb_val_000000.bin")])
def test_a_file_named_for_validation_validates(train: str, held: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "in" / train)
    np.arange(300, 400, dtype=np.uint16).tofile(tmp_path / "in" / held)
    corpus = opened(tmp_path, 400, name="tokens", path=str(tmp_path / "in"))
    assert split(corpus, "train") == list(range(300))
    assert split(corpus, "validation") == list(range(300, 400))


@pytest.mark.parametrize(("magic", "version"), LLM_C)
def test_a_header_of_llm_c_is_no_text(magic: int, version: int, tmp_path: Path) -> None:
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, 300
    (tmp_path / "a.bin").write_bytes(header.tobytes() + np.arange(300).astype(LLM_C[magic, version]).tobytes())
    assert documents(opened(tmp_path, 300, name="tokens", path=str(tmp_path / "a.bin"))) == [list(range(300))]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_pair_of_megatron_knows_its_documents(code: int, sequences: int, suffix: str, tmp_path: Path) -> None:
    texts = [list(range(first, first + 10)) for first in range(0, 100, 10)]
    write_megatron(tmp_path / "pair", texts, code, sequences)
    assert documents(opened(tmp_path, 128, name="tokens", path=f"{tmp_path}/pair{suffix}")) == texts


def test_kinds_of_token_files_can_be_blended(tmp_path: Path) -> None:
    write_megatron(tmp_path / "pair", [[1, 2, 3, 4], [5, 6, 7, 8]], 4)
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "a.bin")
    corpus = opened(tmp_path, 50, name="tokens", path=(f"{tmp_path}/pair", f"{tmp_path}/a.bin"), weights=(0.3, 0.7), validation=0.0)
    assert documents(corpus, 0) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert documents(corpus, 1) == [list(range(50))]


def test_files_in_a_row_are_read_across_their_ends(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2, 3, 4], [5, 6, 7, 8]], 4)
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "b.bin")
    corpus = opened(tmp_path, 50, name="tokens", path=(f"{tmp_path}/a", f"{tmp_path}/b.bin", f"{tmp_path}/a"))
    tokens = mapped(corpus)
    out = np.empty(60, np.int64)
    tokens.copy(3, out)
    assert out.tolist() == [4, 5, 6, 7, 8, *range(50), 1, 2, 3, 4, 5]
    assert tokens.documents(3, 60).tolist() == [0, 1, 1, 1, 1, *[2] * 50, 3, 3, 3, 3, 4]


# The split


@pytest.mark.parametrize(("lengths", "share"), [([10] * 100, 0.07), ([1000, 1, 1], 0.1), ([50], 0.5), ([1, 99], 0.01), ([5] * 9, 0.0)])
def test_at_least_the_share_is_held_out_and_less_than_twice(lengths: list[int], share: float) -> None:
    bounds = np.cumsum([0, *lengths])
    size = held_out(3, bounds, share).size
    assert round(bounds[-1] * share) <= size
    assert size < 2 * bounds[-1] * share or not size
