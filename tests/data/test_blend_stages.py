"""Stages of a run blend its sources by weights of their own; a source goes on where it was left in the stage before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.batches import Batches
from distrain.trainer.loop.data.samples.blend_stages import source_order
from distrain.trainer.loop.data.samples.corpus import Corpus
from distrain.trainer.loop.data.samples.order import blend, blend_counts, permuted_index, random_key
from distrain.trainer.spec.derived.data_blends import SampleBlend, blends
from distrain.trainer.spec.run import Data, DataStage

SEQ, SEED, EACH = 8, 7, 300  # tokens, and samples that the stages below have in all
STAGES = (
    DataStage(weights=(3.0, 1.0, 0.0), until=SEQ * 50.0),
    DataStage(weights=(0.0, 1.0, 2.0), until=SEQ * 90.0 + 3),  # ends inside a sample
    DataStage(weights=(1.0, 0.0, 0.0), until=SEQ * 100.0),
    DataStage(weights=(5.0, 4.0, 1.0)),
)
FIRSTS = (0, 50, 91, 100, EACH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    """Three files whose tokens name their place: 0.., 1000.., 2000.. ."""
    for source, size in enumerate((400, 170, 90)):
        np.arange(1000 * source, 1000 * source + size, dtype=np.uint16).tofile(folder / f"{source}.bin")
    paths = tuple(str(folder / f"{source}.bin") for source in range(3))
    return Data(name="tokens", path=paths, stages=STAGES, validation=0.0)


def open_corpus(data: Data, folder: Path) -> Corpus:
    return prepare_corpus(data, vocab=3000, seq=SEQ, cache=folder / "cache", progress=lambda *_: None)


@pytest.fixture(scope="module")
def batches(data: Data, folder: Path) -> Batches:
    return Batches(open_corpus(data, folder), seed=SEED, seq=SEQ)


def plain_order(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """(source, window) of each sample of the run, counted one by one: how many samples of each source came before is a counter."""
    found, read = [], [0, 0, 0]
    for stage, first, end in zip(STAGES, FIRSTS, FIRSTS[1:], strict=False):
        sources = [source for source, weight in enumerate(stage.weights) if weight]
        chosen, _ = blend(np.arange(end - first), [stage.weights[source] for source in sources])
        for source in (sources[each] for each in chosen):
            epoch, place = divmod(read[source], sizes[source])
            key = random_key(SEED, source, np.array([epoch]))
            found.append((source, int(permuted_index(np.array([place]), sizes[source], key)[0])))
            read[source] += 1
    return found


def test_the_order_is_that_of_counters(batches: Batches) -> None:
    source, window = batches.locate(np.arange(EACH))
    assert list(zip(source.tolist(), window.tolist(), strict=True)) == plain_order(batches.windows)


def test_each_stage_reads_its_sources_by_weight_and_no_other(batches: Batches) -> None:
    source, _ = batches.locate(np.arange(EACH))
    for stage, first, end in zip(STAGES, FIRSTS, FIRSTS[1:], strict=False):
        counts = np.bincount(source[first:end], minlength=3)
        assert counts == pytest.approx([(end - first) * weight / sum(stage.weights) for weight in stage.weights], abs=1.5)
        assert not counts[np.array(stage.weights) == 0].any()


def test_no_window_is_skipped_or_read_twice_in_an_epoch_of_its_source(batches: Batches) -> None:
    source, window = batches.locate(np.arange(EACH))
    for index, size in enumerate(batches.windows):
        mine = window[source == index]
        assert len(mine) > size, "the stages read more than an epoch of each"
        for begin in range(0, len(mine), size):
            epoch = mine[begin : begin + size]
            assert len(np.unique(epoch)) == len(epoch)
        assert np.array_equal(np.sort(mine[:size]), np.arange(size))


def test_tokens_are_those_of_the_windows(batches: Batches) -> None:
    source, window = batches.locate(np.arange(40, 110))
    batch = batches.batch(40, 70)
    wanted = 1000 * source[:, None] + window[:, None] * SEQ + np.arange(SEQ)
    assert np.array_equal(batch.tokens.numpy(), wanted)
    assert np.array_equal(batch.labels.numpy(), wanted + 1)


@given(first=st.integers(0, 10**9), count=st.integers(1, 30), cut=st.integers(0, 30))
def test_a_resume_at_any_sample_continues_with_the_same_batches(batches: Batches, first: int, count: int, cut: int) -> None:
    cut = min(cut, count)
    whole, again = batches.batch(first % 200, count), Batches(batches.corpus, seed=SEED, seq=SEQ)
    parts = [again.batch(first % 200 + cut, count - cut), batches.batch(first % 200, cut)]
    assert torch.equal(torch.cat([parts[1].tokens, parts[0].tokens]), whole.tokens)
    assert batches.locate(np.array([first]))[0] == again.locate(np.array([first]))[0]


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=7), count=st.integers(0, 2000), later=st.integers(0, 2**38))
def test_counts_are_those_of_the_samples(weights: list[float], count: int, later: int) -> None:
    assert blend_counts(count, weights) == np.bincount(blend(np.arange(count), weights)[0], minlength=len(weights)).tolist()
    source, nth = blend(np.array([later]), weights)
    assert blend_counts(later, weights)[int(source[0])] == nth[0], "far on, too"


def test_one_blend_is_the_order_of_weights_alone() -> None:
    samples, weights = np.arange(10**6, 10**6 + 500), (3.0, 2.0, 1.0)
    for mine, plain in zip(source_order((SampleBlend(0, weights),)).locate(samples), blend(samples, weights), strict=True):
        assert np.array_equal(mine, plain)


def test_a_stage_that_no_run_reaches_is_never_read(data: Data, folder: Path) -> None:
    endless = replace(data, stages=(replace(STAGES[0], until=1e30), STAGES[3]))
    alone = replace(data, stages=None, weights=(3.0, 1.0))
    made, plain = (
        Batches(open_corpus(each, folder), seed=SEED, seq=SEQ) for each in (endless, replace(alone, path=(alone.path or ())[:2]))
    )
    for mine, other in zip(made.locate(np.arange(10**6, 10**6 + 300)), plain.locate(np.arange(10**6, 10**6 + 300)), strict=True):
        assert np.array_equal(mine, other)


def test_the_first_blend_is_part_of_what_identifies_the_data_and_later_ones_are_not(data: Data, folder: Path) -> None:
    key = open_corpus(data, folder).key
    assert open_corpus(replace(data, stages=STAGES[:1] + STAGES[3:]), folder).key == key
    assert open_corpus(replace(data, stages=None, weights=STAGES[0].weights), folder).key == key
    assert open_corpus(replace(data, stages=STAGES[1:]), folder).key != key


def test_other_blends_of_the_same_corpus_are_read_where_they_are_given(batches: Batches, data: Data) -> None:
    later = replace(data, stages=(*STAGES[:2], STAGES[3]))
    other = batches.with_blends(blends(later))
    samples = np.arange(EACH)
    assert np.array_equal(other.locate(samples[:91])[1], batches.locate(samples[:91])[1])
    assert not np.array_equal(other.locate(samples[91:])[0], batches.locate(samples[91:])[0])
    assert np.array_equal(other.with_blends(blends(data)).locate(samples)[1], batches.locate(samples)[1])


def test_held_out_text_validates_by_the_first_blend(data: Data, folder: Path) -> None:
    corpus = open_corpus(replace(data, validation=0.3), folder)
    source, _ = Batches(corpus, seed=SEED, seq=SEQ, split="validation").locate(np.arange(400))
    assert np.bincount(source, minlength=3).tolist() == [300, 100, 0]
