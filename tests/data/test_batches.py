"""Batches depend only on the seed and the samples consumed: in every layout, after every resume, in every epoch."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.batches import Batches, microbatch_samples, prefetch
from distrain.trainer.loop.data.samples.corpus import Corpus
from distrain.trainer.loop.data.samples.synthetic import PHRASE, STRIDES
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data

CPU = torch.device("cpu")

SEQ = 8
END = 9999  # ends a document of what is counted below


def write_counting_file(folder: Path, name: str, first: int, documents: int, rng: np.random.Generator) -> Path:
    """A nanoGPT file whose tokens are first, first + 1, ..., so that each names its place, and an END after each document."""
    tokens: list[int] = []
    for _ in range(documents):
        tokens += [*range(first + len(tokens), first + len(tokens) + int(rng.integers(1, 40))), END]
    path = folder / name
    np.array(tokens, np.uint16).tofile(path)
    return path


def open_corpus(data: Data, folder: Path, seq: int = SEQ, vocab: int = 10_000) -> Corpus:
    return prepare_corpus(data, vocab=vocab, seq=seq, cache=folder / "cache", progress=lambda *_: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    """One source of 60 documents."""
    path = write_counting_file(folder, "one.bin", 0, 60, np.random.default_rng(0))
    return open_corpus(Data(name="tokens", path=str(path), end=END, validation=0.1), folder)


@pytest.fixture(scope="module")
def blend(folder: Path) -> Corpus:
    """Three sources, of 3, 2 and 1 parts."""
    rng = np.random.default_rng(1)
    paths = tuple(str(write_counting_file(folder, f"part{index}.bin", 3000 * index, 40, rng)) for index in range(3))
    return open_corpus(Data(name="tokens", path=paths, weights=(3.0, 2.0, 1.0), end=END, validation=0.1), folder)


@pytest.fixture(scope="module", params=["corpus", "blend", "synthetic"])
def batches(request: pytest.FixtureRequest, folder: Path) -> Batches:
    made = open_corpus(Data(), folder) if request.param == "synthetic" else request.getfixturevalue(request.param)
    return Batches(made, seed=7, seq=SEQ)


def test_a_label_is_the_next_token(batches: Batches) -> None:
    batch = batches.batch(3, 5)
    assert batch.tokens.shape == batch.labels.shape == (5, SEQ)
    assert batch.tokens.dtype == batch.labels.dtype == batch.samples.dtype == torch.int64
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.samples.tolist() == [3, 4, 5, 6, 7]
    assert batch.documents is None


@pytest.mark.parametrize(
    ("dp", "microbatch"), [(dp, each) for dp in (1, 2, 3, 4, 6, 12) for each in (1, 2, 4, 12) if 12 % (dp * each) == 0]
)
def test_a_global_batch_is_the_same_however_it_is_split(batches: Batches, dp: int, microbatch: int) -> None:
    for step in range(3):
        whole = batches.batch(step * 12, 12)
        parts = [
            microbatch_samples(step * 12, micro=micro, dp_rank=rank, dp=dp, microbatch=microbatch, batch=12)
            for micro in range(12 // (dp * microbatch))
            for rank in range(dp)
        ]
        read = [batches.batch(part.start, len(part)) for part in parts]
        assert torch.equal(torch.cat([part.tokens for part in read]), whole.tokens)
        assert torch.equal(torch.cat([part.labels for part in read]), whole.labels)
        assert torch.equal(torch.cat([part.samples for part in read]), whole.samples)


@pytest.mark.parametrize(("micro", "rank"), [(3, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_shard_outside_of_the_batch_is_refused(micro: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"no micro-batch {micro} of rank {rank}: a batch of 12 is 2 ranks of 2 at a time"):
        microbatch_samples(0, micro=micro, dp_rank=rank, dp=2, microbatch=2, batch=12)


@given(first=st.integers(0, 10**7), count=st.integers(1, 20), cut=st.integers(0, 20))
def test_a_resume_at_any_sample_continues_with_the_same_batches(batches: Batches, first: int, count: int, cut: int) -> None:
    cut = min(cut, count)
    whole = batches.batch(first, count)
    again = Batches(batches.corpus, seed=7, seq=SEQ)
    parts = [again.batch(first + cut, count - cut), batches.batch(first, cut)]
    assert torch.equal(torch.cat([parts[1].tokens, parts[0].tokens]), whole.tokens)


def test_an_epoch_has_every_window_once(corpus: Corpus) -> None:
    batches = Batches(corpus, seed=7, seq=SEQ)
    (size,) = batches.windows
    assert size == (corpus.size("train") - 1) // SEQ
    for epoch in range(3):
        labels = batches.batch(epoch * size, size).labels.flatten()
        places = labels[labels != END]
        assert len(torch.unique(places)) == len(places)
        assert len(labels) == size * SEQ


def test_each_epoch_has_its_own_order(corpus: Corpus) -> None:
    batches = Batches(corpus, seed=7, seq=SEQ)
    (size,) = batches.windows
    first, second = batches.batch(0, size).tokens, batches.batch(size, size).tokens
    assert not torch.equal(first, second)
    assert torch.equal(first.flatten().sort().values, second.flatten().sort().values)


def test_another_seed_is_another_order(corpus: Corpus) -> None:
    assert not torch.equal(Batches(corpus, seed=7, seq=SEQ).batch(0, 9).tokens, Batches(corpus, seed=8, seq=SEQ).batch(0, 9).tokens)


@pytest.mark.parametrize("which", ["corpus", "blend"])
def test_validation_tokens_never_train(which: str, request: pytest.FixtureRequest) -> None:
    corpus = request.getfixturevalue(which)
    seen = []
    for split in ("train", "validation"):
        batches = Batches(corpus, seed=7, seq=SEQ, split=split)
        batch = batches.batch(0, 8 * sum(batches.windows))
        seen.append(set(batch.tokens.flatten().tolist()) | set(batch.labels.flatten().tolist()))
    assert seen[0] & seen[1] == {END}


def test_whole_documents_of_about_the_requested_share_validate(corpus: Corpus) -> None:
    source = corpus.sources[0]
    size = corpus.size("train") + corpus.size("validation")
    assert 0.1 * size <= corpus.size("validation") <= 0.1 * size + 40
    bounds = set(source.tokens.bounds.tolist())  # type: ignore[attr-defined]
    assert {*source.validation.begins.tolist(), *source.validation.ends.tolist()} <= bounds


def test_validation_windows_are_the_same_for_every_seed_and_evaluation(corpus: Corpus) -> None:
    one, other = (Batches(corpus, seed=seed, seq=SEQ, split="validation") for seed in (1, 2))
    (size,) = one.windows
    assert torch.equal(one.batch(0, size).tokens, other.batch(0, size).tokens)
    assert torch.equal(one.batch(0, size).tokens, one.batch(size, size).tokens)
    assert len(torch.unique(one.batch(0, size).tokens, dim=0)) == size


def test_sources_are_sampled_by_weight_and_have_their_own_epochs(blend: Corpus) -> None:
    batches = Batches(blend, seed=7, seq=SEQ)
    source, window = batches.locate(np.arange(6 * max(batches.windows)))
    assert np.bincount(source).tolist() == pytest.approx([len(source) * part / 6 for part in (3, 2, 1)], abs=2)
    for index, size in enumerate(batches.windows):
        mine = window[source == index]
        assert np.array_equal(np.sort(mine[:size]), np.arange(size))


@pytest.mark.parametrize("which", ["corpus", "blend"])
def test_loss_stays_inside_documents_if_documents_are_kept_apart(which: str, request: pytest.FixtureRequest) -> None:
    corpus = request.getfixturevalue(which)
    plain, apart = (Batches(replace(corpus, documents=documents), seed=7, seq=SEQ).batch(0, 100) for documents in (False, True))
    assert apart.documents is not None
    assert torch.equal(plain.tokens, apart.tokens)
    boundary = plain.tokens == END
    assert boundary.any()
    assert (apart.labels[boundary] == IGNORED).all()
    assert torch.equal(apart.labels[~boundary], plain.labels[~boundary])
    changes = apart.documents[:, 1:] != apart.documents[:, :-1]
    assert torch.equal(changes, boundary[:, :-1])


def test_prefetching_changes_no_batch(batches: Batches) -> None:
    shards = [range(first, first + 4) for first in (0, 4, 8, 100, 3)]
    for samples, batch in zip(shards, prefetch(batches, iter(shards), CPU), strict=True):
        assert torch.equal(batch.tokens, batches.batch(samples.start, 4).tokens)
        assert batch.samples.tolist() == list(samples)


def test_prefetching_ends_when_the_reader_stops(batches: Batches) -> None:
    reader = prefetch(batches, (range(first, first + 2) for first in range(0, 10**9, 2)), CPU)
    assert next(reader).samples.tolist() == [0, 1]
    reader.close()  # type: ignore[attr-defined]


def test_synthetic_text_counts_up_in_phrases(folder: Path) -> None:
    made = open_corpus(Data(), folder, vocab=1000).sources[0].tokens
    tokens = np.empty(50 * PHRASE, np.int64)
    made.copy(0, tokens)
    strides = np.diff(tokens.reshape(50, PHRASE)) % 1000
    assert (strides == strides[:, :1]).all()
    assert set(np.unique(strides)) == set(range(1, STRIDES + 1))


def test_synthetic_tokens_are_uniform(folder: Path) -> None:
    corpus = open_corpus(Data(), folder, vocab=50)
    assert corpus.entropy == pytest.approx(log(50))
    tokens = np.empty(200_000, np.int64)
    corpus.sources[0].tokens.copy(0, tokens)
    shares = np.bincount(tokens, minlength=50) / len(tokens)
    assert -(shares * np.log(shares)).sum() == pytest.approx(log(50), abs=1e-3)


def test_batches_are_the_same_in_the_next_release(folder: Path) -> None:
    """A run may be resumed by another version: these figures change with the format of the cache only, and never by chance."""
    np.arange(2000, dtype=np.uint16).tofile(folder / "golden.bin")
    corpus = open_corpus(Data(name="tokens", path=str(folder / "golden.bin"), end=999, validation=0.1), folder)
    assert corpus.key == "c60fb4ff0c6566e4ef8ebf436756b4e1"
    batches = Batches(corpus, seed=1234, seq=SEQ)
    assert batches.batch(0, 10).tokens[:, 0].tolist() == [344, 320, 1552, 664, 1480, 1240, 224, 1656, 1504, 992]
    assert batches.batch(10**6, 3).tokens[:, 0].tolist() == [848, 96, 1384]
    assert Batches(corpus, seed=1, seq=SEQ, split="validation").batch(0, 5).tokens[:, 0].tolist() == [1976, 1880, 1896, 1848, 1920]
    made = Batches(open_corpus(Data(), folder, vocab=256), seed=1234, seq=4)
    assert made.batch(0, 3).tokens.tolist() == [[205, 207, 209, 211], [37, 45, 53, 61], [41, 47, 53, 59]]


def test_a_text_shorter_than_one_window_is_refused(corpus: Corpus) -> None:
    with pytest.raises(Unreadable) as refused:
        Batches(corpus, seed=0, seq=200, split="validation")
    size = corpus.size("train") + corpus.size("validation")
    held = corpus.size("validation")
    share = f"{-(-201 * 10_000 // size) / 10_000:g}"
    assert str(refused.value) == (
        f"validation has {held} tokens of data=tokens, fewer than one sequence and the token after it: train.seq=200: "
        f"set data.validation={share} or train.evaluate.every=0"
    )
