"""`distrain evaluate`: the loss of a checkpoint outside training is that of the run's own evaluation, also on files that it names later."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from distrain.cli.config.load import load_recipe
from distrain.cli.verbs.evaluate import _data_changes
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.offline.evaluate_run import EvaluatedSet, _read_of, _Set, changed_data, evaluate_run
from distrain.trainer.loop.offline.export import export
from distrain.trainer.loop.offline.load_run import load_saved_run
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import PoolJob, RankPool

SMALL = ("model=tiny_llama", "model.layers=2", "train.steps=2", "train.batch=4", "train.microbatch=4", "train.seq=32", "optim.warmup=0")
EVALUATES = (*SMALL, "optim.lr=1e-2", "train.evaluate={every: 1, batches: 2}", "log.every=1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.txt").write_text("a line of a text to train on\n" * 150)
    (folder / "b.txt").write_text("other words, of which all are read once\n" * 6)
    rows = [{"prompt": f"{each} and ", "completion": f"{each + 1}"} for each in range(40)]
    for name, few in (("p", rows), ("q", rows[:9])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in few))
    return folder


@pytest.fixture(scope="module")
def text_run(ranks: RankPool, files: Path, tmp_path_factory: pytest.TempPathFactory) -> PoolJob:
    """A run in two pipeline stages that holds out more than an evaluation reads, and has a set, of which it reads all."""
    words = ("data=text", f"data.path={files / 'a.txt'}", "data.validation=0.2", f"data.cache={files / 'cache'}")
    layout = ("cluster.gpus=2", "parallel.pp=2", "train.microbatch=1")
    return ranks.train(
        tmp_path_factory.mktemp("run") / "run", "quickstart", *EVALUATES, *words, *layout, f"data.validate.b={files / 'b.txt'}"
    )


def evaluated(capsys: pytest.CaptureFixture[str], folder: Path, **given: Any) -> dict[str, Any]:
    capsys.readouterr()
    evaluate_run(folder, **{"changes": {}, **given}, as_json=True)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_losses_are_those_of_the_runs_evaluations(text_run: PoolJob, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(capsys, text_run.folder)
    assert (found["version"], found["step"]) == (1, 2)
    held, named = found["sets"]
    assert (held["name"], named["name"]) == ("validation", "b")
    assert held["loss"] == pytest.approx(text_run.figures("validation_loss")[-1], abs=1e-5)
    assert held["tokens"] == 2 * 4 * 32
    assert named["loss"] == pytest.approx(text_run.figures("validation_loss/b")[-1], abs=1e-5)
    assert named["tokens"] == 6 * 40, "the end of the text among them, and not its first byte"
    assert named["perplexity"] == pytest.approx(exp(named["loss"]))
    assert named["bits_per_byte"] == pytest.approx(named["loss"] / log(2))


def test_files_that_are_named_later_take_the_place_of_the_runs_own(
    text_run: PoolJob, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(files / "b.txt")
    found = evaluated(capsys, text_run.folder, changes={"data.path": path, "data.validate.again": path})["sets"]
    assert [each["name"] for each in found] == [path, "again"]
    for each in found:
        assert each["loss"] == pytest.approx(text_run.figures("validation_loss/b")[-1], abs=1e-5)
    (few,) = evaluated(capsys, text_run.folder, changes={"data.path": path}, sequences=2)["sets"]
    assert few["tokens"] < found[0]["tokens"]
    evaluate_run(text_run.folder, changes={"data.path": path})
    first, line = capsys.readouterr().out.splitlines()
    assert first == "step 2 of run, in float32"
    assert line.startswith(f"{path}: loss {found[0]['loss']:.4f}, perplexity ")
    assert line.endswith(" bits a byte, of 240 tokens")


def test_a_set_may_have_the_name_of_what_is_held_out(text_run: PoolJob, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held, named = evaluated(capsys, text_run.folder, changes={"data.validate": {"validation": str(files / "b.txt")}})["sets"]
    assert (held["name"], named["name"]) == ("validation", "validation")
    assert held["tokens"] == 2 * 4 * 32
    assert named["tokens"] == 6 * 40, "all of its files count"


def test_of_a_text_shorter_than_an_evaluation_windows_count_again(
    ranks: RankPool, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "data=text",
        f"data.path={files / 'a.txt'}",
        "data.validation=0.03",
        f"data.cache={files / 'cache'}",
        "train.evaluate.batches=9",
    )
    job = ranks.train(tmp_path / "run", "quickstart", *EVALUATES, *words, "cluster.gpus=1", "parallel.zero=0")
    (held,) = evaluated(capsys, job.folder)["sets"]
    assert held["loss"] == pytest.approx(job.figures("validation_loss")[-1], abs=1e-5)
    (once,) = evaluated(capsys, job.folder, sequences=1000)["sets"]
    assert once["tokens"] < held["tokens"]


def test_completions_alone_count_where_the_data_are_pairs(
    ranks: RankPool, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("data=pairs", f"data.path={files / 'p.jsonl'}", f"data.cache={files / 'cache'}", f"data.validate.q={files / 'q.jsonl'}")
    job = ranks.train(tmp_path / "run", "quickstart", *EVALUATES, *words, "data.validation=0", "cluster.gpus=1", "parallel.zero=0")
    (found,) = evaluated(capsys, job.folder, step=2)["sets"]
    assert found["loss"] == pytest.approx(job.figures("validation_loss/q")[-1], abs=1e-5)
    assert found["tokens"] == 2 * 9, "a digit and the end"


def test_a_file_that_is_not_there_is_named_by_the_key_that_the_user_set(text_run: PoolJob) -> None:
    for changes, key in (({"data.path": "gone.txt"}, "data.path"), ({"data.validate.x": "gone.txt"}, "data.validate.x")):
        with pytest.raises(Unreadable) as wrong:
            evaluate_run(text_run.folder, changes=changes)
        assert str(wrong.value.problems[0]).startswith(f"{key}=gone.txt: no such file or folder")


def test_other_paths_leave_the_blends_and_sets_of_the_runs_own_behind() -> None:
    data = Data(name="text", path=("a", "b"), weights=(1.0, 2.0), validate={"c": "d"}, text_key="body")
    found = changed_data(data, {"data.path": "e"})
    assert (found.path, found.weights, found.validate, found.text_key) == ("e", None, None, "body")
    assert changed_data(data, {"data.validate.f": "g"}).validate == {"c": "d", "f": "g"}
    with pytest.raises(Unreadable, match=r"data\.validation=2 is not a number"):
        changed_data(data, {"data.validation": 2})


def test_words_set_keys_of_data_alone() -> None:
    assert _data_changes(["data=text", "data.path=[a.txt,b]", "data.validate.code=c"]) == {
        "data.name": "text",
        "data.path": ["a.txt", "b"],
        "data.validate.code": "c",
    }
    for word in ("train.seq=5", "model=tiny", "cluster=2x8"):
        with pytest.raises(Unreadable, match=f"^{word} sets no key of data"):
            _data_changes([word])
    with pytest.raises(Unreadable, match=r"evaluate deletes no key, as ~data\.path does"):
        _data_changes(["~data.path"])
    with pytest.raises(Unreadable, match="would hold out text that the run has trained on"):
        _data_changes(["data.validation=0.5"])
    assert _data_changes(["data.validation=0.5", "data.path=a.txt"]) == {"data.validation": 0.5, "data.path": "a.txt"}


def test_documents_of_transformers_models_are_refused(files: Path) -> None:
    run = load_recipe("quickstart", [*SMALL, "data=synthetic"])
    data = replace(run.data, name="text", path=str(files / "a.txt"), documents=True, cache=str(files / "cache"))
    corpus = prepare_corpus(data, vocab=256, seq=32, cache=files / "cache", progress=lambda *_: None)
    run = replace(run, model=replace(run.model, family="hf"))
    with pytest.raises(Unreadable, match="family hf does not keep documents apart"):
        _read_of(run, _Set("x", corpus, is_held_out=False), None)


def test_a_loss_that_is_not_finite_is_null() -> None:
    found = EvaluatedSet(name="a", counted=3, loss=float("nan"), are_bytes=True)
    assert [found.figures[key] for key in ("loss", "perplexity", "bits_per_byte")] == [None] * 3
    assert str(found) == "a: loss nan, no finite perplexity, of 3 tokens"
    assert EvaluatedSet(name="a", counted=3, loss=800.0, are_bytes=False).figures["perplexity"] is None


def test_the_average_of_the_weights_has_the_losses_that_the_run_logged_of_it(
    ranks: RankPool, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also exported, and in an adapter; a run without one is refused."""
    words = ("data=text", f"data.path={files / 'a.txt'}", "data.validation=0.2", f"data.cache={files / 'cache'}", "optim.ema=0.5")
    job = ranks.train(tmp_path / "run", "quickstart", *EVALUATES, *words, "cluster.gpus=2", "parallel.zero=1", "train.microbatch=2")
    weights, averaged = [evaluated(capsys, job.folder, ema=ema)["sets"][0]["loss"] for ema in (False, True)]
    assert averaged == pytest.approx(job.figures("validation_ema_loss")[-1], abs=1e-5)
    assert weights == pytest.approx(job.figures("validation_loss")[-1], abs=1e-5)
    assert abs(averaged - weights) > 1e-3
    evaluate_run(job.folder, changes={}, ema=True)
    assert capsys.readouterr().out.startswith("step 2, averaged weights of run, in float32\n")
    export(job.folder, tmp_path / "hf", "fp32", ema=True)
    assert capsys.readouterr().out.startswith("step 2, averaged weights, ")
    written = load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"].T
    saved = load_saved_run(job.folder, ema=True)
    assert torch.equal(written, saved.read("head.weight", tuple(written.shape)))
    assert not torch.equal(written, load_saved_run(job.folder).read("head.weight", tuple(written.shape)))
    plain = ranks.train(tmp_path / "plain", "quickstart", *EVALUATES, *words[:-1], "cluster.gpus=1")
    with pytest.raises(Unreadable, match="keeps no average of the weights: the run was trained with"):
        evaluate_run(plain.folder, changes={}, ema=True)
