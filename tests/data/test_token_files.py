"""Token files are memory-mapped as they are, with their documents and the validation split."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrain.tests.fakes.small_corpus import documents, mapped_tokens, small_corpus, split_tokens
from distrain.trainer.loop.data.files.id_width import raw_id_type
from distrain.trainer.loop.data.samples.corpus import Split, shortage, validation_ranges
from distrain.trainer.loop.data.token_files import DTYPE_CODES, LLM_C, MEGATRON
from distrain.trainer.spec.problem import Unreadable


def write_megatron(prefix: Path, texts: list[list[int]], code: int, sequences: int = 1) -> None:
    """Documents of so many sequences each, as Megatron's IndexedDatasetBuilder writes them."""
    pieces = [list(piece) for text in texts for piece in np.array_split(text, sequences)]
    lengths = np.array([len(piece) for piece in pieces], np.int32)
    item = np.dtype(DTYPE_CODES[code]).itemsize
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * item
    starts = np.arange(0, len(pieces) + 1, sequences, dtype=np.int64)
    head = MEGATRON + struct.pack("<QBQQ", 1, code, len(lengths), len(starts))
    prefix.with_suffix(".idx").write_bytes(head + lengths.tobytes() + offsets.tobytes() + starts.tobytes())
    np.concatenate(texts).astype(DTYPE_CODES[code]).tofile(prefix.with_suffix(".bin"))


def test_a_nanogpt_file_is_mapped_as_it_is(tmp_path: Path) -> None:
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "a.bin")
    corpus = small_corpus(tmp_path, 300, name="tokens", path=str(tmp_path / "a.bin"), validation=0.1)
    assert documents(corpus) == [list(range(300))]
    assert split_tokens(corpus, "train") == list(range(270))
    assert split_tokens(corpus, "validation") == list(range(270, 300))


def test_the_example_of_the_docs_writes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    corpus = small_corpus(tmp_path, 50257, name="tokens", path=str(tmp_path / "train.npy"), end=50256, documents=True)
    assert documents(corpus) == [[464, 3290, 318, 50256], [40, 716, 50256]]


def test_an_end_token_bounds_the_documents_of_a_nanogpt_file(tmp_path: Path) -> None:
    np.array([1, 2, 9, 3, 9, 9, 4], np.uint16).tofile(tmp_path / "a.bin")
    assert documents(small_corpus(tmp_path, 10, name="tokens", path=str(tmp_path / "a.bin"), end=9)) == [[1, 2, 9], [3, 9], [9], [4]]


@pytest.mark.parametrize(("train", "held"), [("train.bin", "val.bin"), ("fineweb_train_000001.bin", "fineweb_val_000000.bin")])
def test_a_file_named_for_validation_validates(train: str, held: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "in" / train)
    np.arange(300, 400, dtype=np.uint16).tofile(tmp_path / "in" / held)
    corpus = small_corpus(tmp_path, 400, name="tokens", path=str(tmp_path / "in"))
    assert split_tokens(corpus, "train") == list(range(300))
    assert split_tokens(corpus, "validation") == list(range(300, 400))


@pytest.mark.parametrize(("magic", "version"), LLM_C)
def test_an_llm_c_header_is_not_data(magic: int, version: int, tmp_path: Path) -> None:
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, 300
    (tmp_path / "a.bin").write_bytes(header.tobytes() + np.arange(300).astype(LLM_C[magic, version]).tobytes())
    assert documents(small_corpus(tmp_path, 300, name="tokens", path=str(tmp_path / "a.bin"))) == [list(range(300))]


@pytest.mark.parametrize("code", DTYPE_CODES)
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_megatron_pair_knows_its_documents(code: int, sequences: int, suffix: str, tmp_path: Path) -> None:
    texts = [list(range(first, first + 10)) for first in range(0, 100, 10)]
    write_megatron(tmp_path / "pair", texts, code, sequences)
    assert documents(small_corpus(tmp_path, 128, name="tokens", path=f"{tmp_path}/pair{suffix}")) == texts


def test_kinds_of_token_files_can_be_blended(tmp_path: Path) -> None:
    write_megatron(tmp_path / "pair", [[1, 2, 3, 4], [5, 6, 7, 8]], 4)
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "a.bin")
    corpus = small_corpus(tmp_path, 50, name="tokens", path=(f"{tmp_path}/pair", f"{tmp_path}/a.bin"), weights=(0.3, 0.7), validation=0.0)
    assert documents(corpus, 0) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert documents(corpus, 1) == [list(range(50))]


def test_windows_cross_file_ends(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2, 3, 4], [5, 6, 7, 8]], 4)
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "b.bin")
    corpus = small_corpus(tmp_path, 50, name="tokens", path=(f"{tmp_path}/a", f"{tmp_path}/b.bin", f"{tmp_path}/a"))
    tokens = mapped_tokens(corpus)
    out = np.empty(60, np.int64)
    tokens.copy(3, out)
    assert out.tolist() == [4, 5, 6, 7, 8, *range(50), 1, 2, 3, 4, 5]
    assert tokens.documents(3, 60).tolist() == [0, 1, 1, 1, 1, *[2] * 50, 3, 3, 3, 3, 4]


# NumPy's files


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "i4", "u4", "i8", "u8"])
def test_a_numpy_array_is_read_by_its_header(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(200).astype(dtype))
    corpus = small_corpus(tmp_path, 200, name="tokens", path=str(tmp_path / "a.npy"))
    assert documents(corpus) == [list(range(200))]
    assert corpus.entropy == pytest.approx(np.log(corpus.size("train")))


def test_a_numpy_array_is_recognised_by_its_first_bytes(tmp_path: Path) -> None:
    with (tmp_path / "a.bin").open("wb") as file:
        np.save(file, np.arange(200, dtype=np.uint32))
    assert documents(small_corpus(tmp_path, 200, name="tokens", path=str(tmp_path / "a.bin"))) == [list(range(200))]


@pytest.mark.parametrize("name", ["a.npy", "part-0-00000.npy", "a.ids"])
def test_raw_ids_are_read_under_any_file_name(name: str, tmp_path: Path) -> None:
    """OLMo's .npy have none: np.memmap(path, mode="w+") writes them (olmo-core, docs/source/guides/data_loading.rst)."""
    ids = np.random.default_rng(0).integers(0, 100_000, 3000)
    written = np.memmap(tmp_path / name, np.uint32, "w+", shape=(3000,))
    written[:] = ids
    written.flush()
    assert documents(small_corpus(tmp_path, 100_000, name="tokens", path=str(tmp_path / name))) == [ids.tolist()]


def test_a_folder_may_hold_all_kinds_of_token_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    np.save(folder / "a.npy", np.arange(50))
    np.arange(50, 100, dtype=np.uint16).tofile(folder / "b.bin")
    write_datatrove(folder / "c.ds", [[7, 8], [9]], 2)
    write_megatron(folder / "d", [[1, 2, 3, 4], [5, 6, 7, 8]], 4)
    (folder / "README.md").write_text("to be")
    remarks: list[str] = []
    corpus = small_corpus(tmp_path, 100, remarks, name="tokens", path=str(folder))
    assert documents(corpus) == [list(range(50)), list(range(50, 100)), [7, 8], [9], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert remarks == [f"data.path={folder}: 4 files are read; skipped: 1 .md"]


@pytest.mark.parametrize("pattern", ["*", "*.idx", "*.bin", "a*"])
def test_a_pattern_that_also_matches_indices_reads_each_pair_once(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_megatron(tmp_path / "in" / "a", [[1, 2, 3, 4], [5, 6, 7, 8]], 4)
    assert documents(small_corpus(tmp_path, 100, name="tokens", path=f"{tmp_path}/in/{pattern}")) == [[1, 2, 3, 4], [5, 6, 7, 8]]


# datatrove's files


def write_datatrove(path: Path, texts: list[list[int]], width: int, *, index: bool = True, metadata: str | None = "tokenizer|{}") -> None:
    """As TokenizedFile writes them (datatrove 0.10.1, pipeline/tokens/tokenizer.py)."""
    ids = [token for text in texts for token in text]
    path.write_bytes(struct.pack(f"<{len(ids)}{'I' if width == 4 else 'H'}", *ids))
    if index:
        ends = np.cumsum([len(text) for text in texts]).tolist()
        path.with_name(f"{path.name}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if metadata is not None:
        path.with_name(f"{path.name}.metadata").write_text(f"{metadata.format(width)}\n{len(ids)}\n{len(ids)} T")


TEXTS = [list(range(first, first + 10)) for first in range(1, 101, 10)]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("words", [{}, {"metadata": None}, {"metadata": "Unknown Tokenizer|{0}|{0}"}])
def test_datatrove_files_know_their_documents_and_id_width(words: dict[str, Any], width: int, tmp_path: Path) -> None:
    write_datatrove(tmp_path / "a.ds", TEXTS, width, **words)
    corpus = small_corpus(tmp_path, 128, name="tokens", path=str(tmp_path / "a.ds"))
    assert documents(corpus) == TEXTS
    assert corpus.sources[0].documents == len(TEXTS)
    assert mapped_tokens(corpus).files[0].dtype.itemsize == width


@pytest.mark.parametrize("width", [2, 4])
def test_datatrove_files_without_an_index_use_the_recorded_width(width: int, tmp_path: Path) -> None:
    write_datatrove(tmp_path / "a.ds", TEXTS, width, index=False, metadata="tokenizer|{}" if width == 4 else "gpt2")
    corpus = small_corpus(tmp_path, 128, name="tokens", path=str(tmp_path / "a.ds"))
    assert documents(corpus) == [list(range(1, 101))]
    assert corpus.sources[0].documents is None


def test_a_changed_index_makes_another_corpus(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "a.ds", TEXTS, 2, metadata=None)
    before = small_corpus(tmp_path, 128, name="tokens", path=str(tmp_path / "a.ds"))
    (tmp_path / "a.ds.index").write_bytes(struct.pack("<2Q", 50, 100))
    after = small_corpus(tmp_path, 128, name="tokens", path=str(tmp_path / "a.ds"))
    assert after.key != before.key
    assert len(documents(after)) == 2


def test_unread_loss_masks_are_remarked_on(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "a.ds", TEXTS, 2)
    (tmp_path / "a.ds.loss").write_bytes(bytes(100))
    remarks: list[str] = []
    small_corpus(tmp_path, 128, remarks, name="tokens", path=str(tmp_path / "a.ds"))
    assert remarks == [f"{tmp_path}/a.ds.loss is not read: every token counts in the loss"]


# How wide ids are that no header tells of

ZIPF = 1.1  # exponent: how ids of text are spread


def of_text(seed: int, vocab: int, size: int) -> np.ndarray[Any, Any]:
    """Ids below vocab, the common ones first or, for an odd seed, anywhere."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(ZIPF, size), vocab) - 1
    return rng.permutation(vocab)[ids] if seed % 2 else ids


@given(
    seed=st.integers(0, 1000),
    vocab=st.sampled_from([4, 65, 256, 300, 32_000, 50_257, 65_536]),
    size=st.integers(100, 3000),
    dtype=st.sampled_from([np.uint16, np.uint32, np.int64]),
    padded=st.floats(0, 0.95),
)
def test_the_id_width_is_inferred_from_zero_bytes(
    seed: int, vocab: int, size: int, dtype: Any, padded: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ids = of_text(seed, vocab, size)
    ids[: int(size * padded)] = 0
    ids[-50:] = np.arange(50) % (vocab - 1) + 1
    path = tmp_path_factory.mktemp("ids") / "a.bin"
    ids.astype(dtype).tofile(path)
    assert raw_id_type(path, path.stat().st_size, vocab) == dtype


@given(seed=st.integers(0, 1000), vocab=st.sampled_from([65_537, 100_277, 128_256, 262_208, 1_000_000]), size=st.integers(1, 3000))
def test_a_larger_vocabulary_has_four_byte_ids(seed: int, vocab: int, size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("ids") / "a.bin"
    of_text(seed, vocab, size).astype(np.uint32).tofile(path)
    assert raw_id_type(path, path.stat().st_size, vocab) == np.uint32


@given(seed=st.integers(0, 1000), vocab=st.sampled_from([65_537, 128_256, 262_208]))
def test_a_larger_model_vocabulary_does_not_widen_two_byte_ids(seed: int, vocab: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("ids") / "a.bin"
    of_text(seed, 50_257, 3000).astype(np.uint16).tofile(path)
    assert raw_id_type(path, path.stat().st_size, vocab) == np.uint16


@pytest.mark.parametrize("vocab", [50_304, 65_536, 100_000])
def test_ids_of_another_tokenizer_are_refused_instead_of_read_as_halves(vocab: int, tmp_path: Path) -> None:
    ids = of_text(1, 128_256, 20_000)
    ids.astype(np.uint32).tofile(tmp_path / "a.bin")
    with pytest.raises(Unreadable, match=rf"a.bin: token \d+ at position \d+ is not in the vocabulary, model.vocab={vocab}: the largest"):
        small_corpus(tmp_path, vocab, name="tokens", path=str(tmp_path / "a.bin"))


@pytest.mark.parametrize(("vocab", "dtype"), [(50_257, np.uint16), (50_257, np.uint32), (100_000, np.uint32), (300, np.int64)])
def test_inferred_widths_other_than_two_bytes_are_remarked_on(vocab: int, dtype: Any, tmp_path: Path) -> None:
    ids = of_text(1, vocab, 1000)
    ids.astype(dtype).tofile(tmp_path / "a.bin")
    remarks: list[str] = []
    assert documents(small_corpus(tmp_path, vocab, remarks, name="tokens", path=str(tmp_path / "a.bin"))) == [ids.tolist()]
    says = f"{tmp_path}/a.bin is read as {np.dtype(dtype).itemsize}-byte ids: there is no header, but the zero bytes show the width"
    assert remarks == [says] * (dtype is not np.uint16)


def test_the_same_bytes_with_another_id_width_are_another_corpus(tmp_path: Path) -> None:
    """Too few of them tell how wide they are, and the vocabulary does."""
    np.arange(1, 11, dtype=np.uint32).tofile(tmp_path / "a.bin")
    narrow, wide = (small_corpus(tmp_path, vocab, name="tokens", path=str(tmp_path / "a.bin"), validation=0.0) for vocab in (300, 70_000))
    assert narrow.key != wide.key
    assert [mapped_tokens(corpus).size for corpus in (narrow, wide)] == [20, 10]
    assert documents(wide) == [list(range(1, 11))]


def test_a_large_file_is_sampled_in_many_places(tmp_path: Path) -> None:
    """Its first megabytes are zeros, as of a file that was made before it was filled."""
    ids = np.zeros(3_000_000, np.uint32)
    ids[2_000_000:] = np.random.default_rng(0).integers(0, 50_000, 1_000_000)
    ids.tofile(tmp_path / "a.bin")
    assert raw_id_type(tmp_path / "a.bin", 12_000_000, 50_257) == np.uint32


def test_token_files_named_as_tests_train_with_a_remark(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("train", "val", "test"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / "in" / f"{name}.bin")
    remarks: list[str] = []
    corpus = small_corpus(tmp_path, 100, remarks, name="tokens", path=str(tmp_path / "in"))
    assert (corpus.size("train"), corpus.size("validation")) == (200, 100)
    says = "1 of 3 files are named like held-out data, such as test.bin: they train like the others"
    assert remarks == [f"{says}; a pattern can leave them out: data.path='FOLDER/**/train*'"]


def test_an_end_token_that_never_occurs_is_remarked_on(tmp_path: Path) -> None:
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "a.bin")
    remarks: list[str] = []
    small_corpus(tmp_path, 400, remarks, name="tokens", path=str(tmp_path / "a.bin"), end=350)
    assert remarks == [f"data.end=350 occurs nowhere in {tmp_path}/a.bin: all text counts as one document"]


# The split


@pytest.mark.parametrize(("lengths", "share"), [([10] * 100, 0.07), ([1000, 1, 1], 0.1), ([50], 0.5), ([1, 99], 0.01), ([5] * 9, 0.0)])
def test_the_validation_split_is_between_one_and_two_shares(lengths: list[int], share: float) -> None:
    bounds = np.cumsum([0, *lengths])
    size = validation_ranges(3, bounds, share).size
    assert round(bounds[-1] * share) <= size
    assert size < 2 * bounds[-1] * share or not size


@pytest.mark.parametrize(
    ("key", "begins", "ends"),
    [(1, [70], [100]), (2, [0, 80], [10, 100]), (3, [50, 70], [60, 90])],
)
def test_whole_documents_validate_and_the_key_draws_them(key: int, begins: list[int], ends: list[int]) -> None:
    """Those of the first version, of ten documents of ten tokens: with others a resumed run would validate on what it has trained on."""
    runs = validation_ranges(key, np.arange(0, 110, 10), 0.25)
    assert (runs.begins.tolist(), runs.ends.tolist()) == (begins, ends)


def test_a_document_as_large_as_the_whole_share_validates() -> None:
    runs = validation_ranges(1, np.array([0, 10, 100]), 0.1)
    assert (runs.begins.tolist(), runs.ends.tolist()) == ([0], [10])


@pytest.mark.parametrize(
    ("size", "whole", "split", "set_apart", "mend"),
    [
        (5, 8, "train", False, "set train.seq to at most 4"),  # 8 tokens are one too few for a window of 8 and the token after it
        (5, 9, "train", False, "set data.validation to at most 0"),
        (5, 18, "train", False, "set data.validation to at most 0.25"),
        (1, 8, "train", False, "give more text"),
        (2, 8, "train", False, "set train.seq to at most 1"),
        (5, 17, "validation", False, "set train.seq to at most 4"),  # too few for a window of each
        (5, 18, "validation", False, "set data.validation=0.5 or train.evaluate.every=0"),
        (5, 100, "train", True, "give more text"),
        (5, 100, "validation", True, "leave out the files named for validation, or set train.evaluate.every=0"),
    ],
)
def test_a_split_that_is_too_small_is_told_what_would_do(size: int, whole: int, split: Split, set_apart: bool, mend: str) -> None:
    assert shortage("data=text", size, whole, 8, split, set_apart=set_apart).mend == mend
