"""The file of the reference: what it is of, and which other weights, data and lengths it is not of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from distrain.cli.config.load import load_recipe
from distrain.trainer.launch.file_checks import weight_problems
from distrain.trainer.loop.data.samples.corpus import Corpus
from distrain.trainer.loop.state.reference_file import HeldReference, _changed_values, read_reference, reference_identity, write_reference
from distrain.trainer.rundir.files import REFERENCE_FILE, run_folder
from distrain.trainer.rundir.reference_header import has_whole_reference, samples_read, union_of_reads
from distrain.trainer.spec.run import Run
from distrain.trainer.spec.sections.lora import Lora
from distrain.trainer.spec.sections.router import Router

VALUES = [np.array([[1.0, 2.0], [np.nan, np.nan]]), np.zeros((1, 2))]
SET = [np.array([[3.0, 4.0]])]  # of a validation set
CORPUS = Corpus(name="preferences", key="a", vocab=256, sources=(), blends=(), documents=True)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that begins with the weights of a folder."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.safetensors").write_bytes(os.urandom(300_000))
    words = ["model=tiny_llama", "data=preferences", "data.path=a.jsonl", f"model.weights={folder}"]
    return load_recipe("quickstart", words)


def read_back(folder: Path, written: Run, run: Run, corpus: Corpus = CORPUS) -> HeldReference:
    """Write the reference of one run, and read that of another."""
    write_reference(folder, {CORPUS.key: VALUES, "set": SET}, reference_identity(written, CORPUS))
    return read_reference(folder, reference_identity(run, corpus))


def test_what_is_written_is_read(tmp_path: Path, run: Run) -> None:
    held = read_back(tmp_path, run, run)
    assert list(held.values) == [CORPUS.key, "set"]
    for one, other in zip([*held.values[CORPUS.key], *held.values["set"]], [*VALUES, *SET], strict=True):
        np.testing.assert_array_equal(one, other)
    assert not held.problem


def test_many_sources_keep_their_order(tmp_path: Path, run: Run) -> None:
    values, identity = [np.full((1, 2), float(each)) for each in range(12)], reference_identity(run, CORPUS)
    write_reference(tmp_path, {CORPUS.key: values}, identity)
    assert [each[0, 0] for each in read_reference(tmp_path, identity).values[CORPUS.key]] == list(range(12))


def test_a_file_of_an_earlier_version_holds_the_training_pairs(tmp_path: Path, run: Run) -> None:
    """Its tensors have the numbers of their sources as names."""
    values, identity = [np.full((1, 2), float(each)) for each in range(12)], reference_identity(run, CORPUS)
    found = blake2b(b"".join(each.tobytes() for each in values), digest_size=16).hexdigest()
    tensors = {str(index): each for index, each in enumerate(values)}
    (tmp_path / REFERENCE_FILE).write_bytes(save(tensors, metadata={"identity": json.dumps(identity), "hash": found}))
    held = read_reference(tmp_path, identity)
    assert [each[0, 0] for each in held.values[CORPUS.key]] == list(range(12))
    assert not held.problem


def test_a_folder_without_the_file_has_no_problem(tmp_path: Path, run: Run) -> None:
    assert read_reference(tmp_path, reference_identity(run, CORPUS))[::2] == ({}, "")


def change_end(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "of"),
    [
        (lambda folder: change_end(folder / "two.safetensors"), "start weights"),
        (lambda folder: (folder / "two.safetensors").rename(folder / "three.safetensors"), "start weights"),
        (lambda folder: (folder / "three.safetensors").write_bytes(b""), "start weights"),
    ],
)
def test_other_files_of_weights_have_another_reference(tmp_path: Path, run: Run, change: Callable[[Path], object], of: str) -> None:
    identity = reference_identity(run, CORPUS)
    write_reference(tmp_path, {CORPUS.key: VALUES}, identity)
    change(Path(str(run.model.weights)))
    held = read_reference(tmp_path, reference_identity(run, CORPUS))
    assert not held.values
    assert held.problem == f"{REFERENCE_FILE} is of other {of}"


def test_other_data_and_lengths_have_another_reference(tmp_path: Path, run: Run) -> None:
    other = read_back(tmp_path, run, run, replace(CORPUS, key="b"))
    assert other.problem == f"{REFERENCE_FILE} is of other data"
    assert "set" in other.values, "a validation set stays what it is beside other training data"
    longer = replace(run, train=replace(run.train, seq=2 * run.train.seq))
    assert read_back(tmp_path, run, longer)[::2] == ({}, f"{REFERENCE_FILE} is of other lengths of sequences")


def test_drawn_weights_have_their_seed_and_their_model(tmp_path: Path, run: Run) -> None:
    drawn = replace(run, model=replace(run.model, weights=None))
    assert read_back(tmp_path, drawn, drawn).values
    assert not read_back(tmp_path, run, drawn).values
    assert not read_back(tmp_path, drawn, replace(drawn, train=replace(drawn.train, seed=7))).values
    assert not read_back(tmp_path, drawn, replace(drawn, model=replace(drawn.model, layers=3))).values
    assert read_back(tmp_path, drawn, replace(drawn, model=replace(drawn.model, dropout=0.1))).values


def test_keys_at_their_defaults_are_no_part_of_drawn_weights() -> None:
    """So that a key that is added later changes the reference of no run."""
    model = load_recipe("quickstart", ["model=tiny_llama"]).model
    assert _changed_values(Lora(rank=4, weights="a")) == {"rank": 4, "weights": "a"}
    found = _changed_values(replace(model, router=Router(scale=2.0)))
    assert found["router"] == {"scale": 2.0}
    assert found["hidden"] == model.hidden
    assert not {"lora", "mtp", "hf", "experts", "sinks"} & found.keys()


def test_weights_that_are_gone_are_those_of_before(tmp_path: Path, run: Run) -> None:
    before = reference_identity(run, CORPUS)
    write_reference(tmp_path, {CORPUS.key: VALUES}, before)
    Path(str(run.model.weights)).rename(tmp_path / "elsewhere")
    held = read_reference(tmp_path, reference_identity(run, CORPUS))
    assert held.values
    assert held.identity == before


@pytest.mark.parametrize("content", [b"", b"no tensors", None])
def test_a_damaged_file_is_not_used(tmp_path: Path, run: Run, content: bytes | None) -> None:
    identity = reference_identity(run, CORPUS)
    write_reference(tmp_path, {CORPUS.key: VALUES}, identity)
    if content is None:
        change_end(tmp_path / REFERENCE_FILE)
    else:
        (tmp_path / REFERENCE_FILE).write_bytes(content)
    held = read_reference(tmp_path, identity)
    assert not held.values
    assert held.problem.startswith(f"{REFERENCE_FILE} {'is damaged' if content is None else 'can’t be read'.replace('’', chr(39))}")


@pytest.mark.parametrize(
    ("is_whole", "size", "kept"), [(True, None, True), (False, None, False), (True, 100, False), (True, -8, False), (True, 4, False)]
)
def test_only_a_whole_file_frees_a_resume_from_the_start_weights(
    tmp_path: Path, run: Run, is_whole: bool, size: int | None, kept: bool
) -> None:
    """A pass that was stopped leaves a file without all pairs; a crash may leave one that is cut short."""
    file = tmp_path / REFERENCE_FILE
    assert not has_whole_reference(run, tmp_path)
    write_reference(tmp_path, {CORPUS.key: VALUES}, reference_identity(run, CORPUS), is_whole=is_whole)
    if size is not None:
        file.write_bytes(file.read_bytes()[:size])
    assert has_whole_reference(run, tmp_path) is kept


def test_weights_that_are_gone_are_missed_before_ranks_start_where_the_reference_is_partial(tmp_path: Path, run: Run) -> None:
    run = replace(run, log=replace(run.log, dir=str(tmp_path)))
    folder = run_folder(run)
    (folder / "checkpoints" / "step_1").mkdir(parents=True)
    identity = reference_identity(run, CORPUS)
    Path(str(run.model.weights)).rename(tmp_path / "elsewhere")
    for is_whole in (True, False):
        write_reference(folder, {CORPUS.key: VALUES}, identity, is_whole=is_whole)
        assert bool(list(weight_problems(run))) is not is_whole


def with_steps(run: Run, steps: int, **data: Any) -> Run:
    return replace(run, train=replace(run.train, steps=steps, tokens=None), data=replace(run.data, **data))


@pytest.mark.parametrize(
    ("change", "is_missed"),
    [
        (lambda run: run, False),
        (lambda run: with_steps(run, 50), False),
        (lambda run: with_steps(run, 101), True),
        (lambda run: with_steps(run, 100, path="elsewhere.jsonl"), False),
        (lambda run: with_steps(run, 100, validate={"new": "b.jsonl"}), True),
        (lambda run: replace(run, train=replace(run.train, batch=2 * run.train.batch)), True),
        (lambda run: replace(run, train=replace(run.train, seed=run.train.seed + 1)), True),
    ],
)
def test_weights_that_are_gone_are_missed_where_a_run_reads_other_pairs_than_the_one_that_computed_the_reference(
    tmp_path: Path, run: Run, change: Callable[[Run], Run], is_missed: bool
) -> None:
    run = with_steps(replace(run, log=replace(run.log, dir=str(tmp_path))), 100)
    folder, batch = run_folder(run), run.train.batch
    (folder / "checkpoints" / "step_1").mkdir(parents=True)
    Path(str(run.model.weights)).rename(tmp_path / "elsewhere")
    reads = samples_read(run, 0, 101 * batch)
    write_reference(folder, {CORPUS.key: VALUES}, reference_identity(run, CORPUS), reads=reads)
    assert bool(list(weight_problems(change(run)))) is is_missed
    assert bool(list(weight_problems(change(run), CORPUS.key))) is is_missed
    assert list(weight_problems(change(run), "other tokens"))


def test_a_pass_that_is_stopped_keeps_what_was_whole(tmp_path: Path, run: Run) -> None:
    run = with_steps(run, 10)
    identity, reads = reference_identity(run, CORPUS), samples_read(run, 0, 11 * run.train.batch)
    write_reference(tmp_path, {CORPUS.key: VALUES}, identity, is_whole=False, reads=reads)
    assert has_whole_reference(run, tmp_path)
    assert not has_whole_reference(with_steps(run, 11), tmp_path)
    assert read_reference(tmp_path, identity).reads == reads | {"every": False}


def test_a_file_with_all_pairs_lets_a_longer_run_begin_without_the_weights(tmp_path: Path, run: Run) -> None:
    identity, reads = reference_identity(run, CORPUS), samples_read(run, 0, 11 * run.train.batch)
    write_reference(tmp_path, {CORPUS.key: [np.ones((9, 2))]}, identity, reads=reads)
    assert has_whole_reference(with_steps(run, 1000), tmp_path)
    assert not has_whole_reference(with_steps(run, 1000, validate={"new": "b.jsonl"}), tmp_path)


def test_samples_that_follow_on_each_other_are_joined(run: Run) -> None:
    reads = {each: samples_read(run, *each) for each in ((0, 10), (5, 20), (11, 20), (0, 20))}
    assert union_of_reads(reads[0, 10], reads[5, 20]) == reads[0, 20]
    assert union_of_reads(reads[0, 10], reads[11, 20]) == reads[11, 20]
    assert union_of_reads(reads[11, 20], reads[0, 10]) == reads[0, 10]
    assert union_of_reads(None, reads[0, 10]) == reads[0, 10]
    other = samples_read(replace(run, train=replace(run.train, seed=9)), 5, 20)
    assert union_of_reads(reads[0, 10], other) == other


def test_an_adapter_is_a_part_of_the_start_weights(tmp_path: Path, run: Run) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(os.urandom(1000))
    begins = replace(run, model=replace(run.model, lora=Lora(rank=4, weights=str(adapter))))
    assert read_back(tmp_path, run, begins).problem == f"{REFERENCE_FILE} is of other start weights"
    assert read_back(tmp_path, begins, begins).values
    change_end(adapter / "adapter_model.safetensors")
    assert read_reference(tmp_path, reference_identity(begins, CORPUS)).problem == f"{REFERENCE_FILE} is of other start weights"
    (adapter / "adapter_model.safetensors").unlink()
    assert read_reference(tmp_path, reference_identity(begins, CORPUS)).values, "nothing says that they are others"
