"""Words of other trainers: each is answered with ours, and with its value where it carries over."""

from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.cli.config import library
from distrain.cli.config.keys import config_keys
from distrain.cli.config.load import load_recipe
from distrain.cli.config.synonyms import ROWS, TOP_LEVEL_ONLY, Synonym, synonym_problem

KNOWN = config_keys()
WORDS = [word for row in ROWS for word in row.words]

# fmt: off
TOLD: list[tuple[str, str]] = [
    ("batch_size=8", "no key batch_size: that is train.batch (sequences a step, of all GPUs together): train.batch=8"),
    ("per_device_train_batch_size=4",
        ("no key per_device_train_batch_size: that is train.microbatch (sequences that a GPU computes at once; "
         "train.batch counts those of a step, of all GPUs together): train.microbatch=4")),
    ("gradient_accumulation_steps=4",
        "no key gradient_accumulation_steps: it follows from train.batch / (dp x train.microbatch)"),
    ("learning_rate=1e-4", "no key learning_rate: that is optim.lr: optim.lr=0.0001"),
    ("trainer.max_steps=100", "no key trainer.max_steps: that is train.steps: train.steps=100"),
    ("tensor-model-parallel-size=8", "no key tensor-model-parallel-size: that is parallel.tp: parallel.tp=8"),
    ("zero_optimization.stage=2", "no key zero_optimization.stage: that is parallel.zero (0 to 3): parallel.zero=2"),
    ("fsdp=full_shard", "no key fsdp: that is parallel.zero (3 shards weights, gradients and the optimizer): parallel.zero=3"),
    ("output_dir=out", "no key output_dir: that is log.dir (a run's folder is log.dir/name): log.dir=out"),
    ("num_train_epochs=3",
        "no key num_train_epochs: a run is as long as train.steps or train.tokens, and reads its data again"),
    ("bf16=true", "no key bf16: that is train.precision: train.precision=bf16"),
    ("bf16=false", "no key bf16: that is train.precision"),
    ("mixed_precision=bf16", "no key mixed_precision: that is train.precision: train.precision=bf16"),
    ("lr_scheduler_type=cosine", "no key lr_scheduler_type: that is optim.schedule: optim.schedule=cosine"),
    ("gradient_checkpointing=true",
        "no key gradient_checkpointing: that is parallel.recompute (none, selective or full): parallel.recompute=full"),
    ("warmup_ratio=0.1", "no key warmup_ratio: that is optim.warmup (steps, so that share of train.steps)"),
    ("resume_from_checkpoint=true",
        "no key resume_from_checkpoint: that is checkpoint.resume (auto, must or never): checkpoint.resume=must"),
    ("nproc_per_node=8", "no key nproc_per_node: that is cluster.gpus (GPUs of a node): cluster.gpus=8"),
    ("n_layer=12", "no key n_layer: that is model.layers: model.layers=12"),
    ("untie_embeddings_and_output_weights=true",
        "no key untie_embeddings_and_output_weights: that is model.tied: model.tied=false"),
    ("model.seed=1", "no key model.seed: did you mean train.seed?"),
    ("config=quickstart", "no key config: that is conf (the recipe): conf=quickstart"),
    # the same as options
    ("--batch-size=8", "no option --batch-size: that is train.batch (sequences a step, of all GPUs together): train.batch=8"),
    ("--learning_rate 1e-4", "no option --learning_rate: that is optim.lr: optim.lr=1e-4"),
    ("--num-gpus 8", "no option --num-gpus: that is cluster.gpus (GPUs of a node): cluster.gpus=8"),
    ("--fp16", "no option --fp16: that is train.precision"),
    ("--wandb-project mine", "no option --wandb-project: that is log (log=wandb turns it on; WANDB_PROJECT names the project)"),
    # and bare
    ("gradient_checkpointing",
        "no key gradient_checkpointing: that is parallel.recompute (none, selective or full)"),
]
# fmt: on


@pytest.mark.parametrize(("words", "line"), TOLD, ids=[words for words, _ in TOLD])
def test_a_word_of_another_trainer_is_answered_with_ours(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=quickstart", *words.split()]) == 2
    assert capsys.readouterr().err == f"distrain: {line}\n"


def test_a_word_of_another_trainer_is_answered_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [quickstart]\ntrain: {gradient_clipping: 0.5, batch: 16}\nper_device_train_batch_size: 4\nn_embd: 64\n")
    assert command(["plan", f"conf={file}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "distrain: no key train.gradient_clipping: that is train.clip (norm of all gradients): train.clip=0.5" in lines
    assert "distrain: no key n_embd: that is model.hidden: model.hidden=64" in lines
    assert len(lines) == 3


def test_no_word_has_two_rows_and_none_is_ours() -> None:
    assert len(WORDS) == len(set(WORDS)) >= 200
    assert set(TOP_LEVEL_ONLY) == set(WORDS) & {name for key in KNOWN for name in (key, key.rpartition(".")[2], key.partition(".")[0])}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.words[0])
def test_a_row_names_a_key_of_ours_and_values_that_it_takes(row: Synonym) -> None:
    assert not row.key or row.key in (*KNOWN, *library.groups(None), "conf")
    for value in (row.values or {}).values() if row.key else ():
        assert load_recipe("quickstart", [f"{row.key}={value}"]), (row.key, value)


@pytest.mark.parametrize("word", [word for word in WORDS if word not in TOP_LEVEL_ONLY])
def test_a_word_is_known_with_dashes_in_capitals_and_under_any_section(word: str) -> None:
    told = synonym_problem(word)
    assert told is not None
    for written in (word.replace("_", "-"), word.upper(), f"trainer.{word}", f"a.b.{word}", f"--{word}"):
        again = synonym_problem(written)
        assert again is not None
        assert again.mend == told.mend
