"""An exported tokenizer gives the ids that the run was byte_run on, and the exported model stops at the end token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distrain.cli.config.load import load_recipe
from distrain.tests.fakes.manifest_edits import edit_extra
from distrain.tests.fakes.one_process import sample_text
from distrain.tests.fakes.rank_pool import RankPool
from distrain.trainer.loop.data.tokenize.tokenizer import load_tokenizer
from distrain.trainer.loop.offline.export import export
from distrain.trainer.loop.offline.export_tokenizer import TEXTS, TOKENIZER_FILES, bytes_tokenizer_json, run_tokenizer, write_tokenizer
from distrain.trainer.models.hf_format.model_type import hf_model_type
from distrain.trainer.models.hf_format.weights import generation_config, hf_config
from distrain.trainer.spec.run import Run

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

KINDS = ("model=tiny", "model=tiny_llama", "model=tiny_moe", ("model=tiny_llama", "model.qkv_bias=true"))
SMALL = (
    "model.layers=1", "cluster=1x1", "train.batch=4", "train.microbatch=4", "train.seq=32", "train.steps=2", "optim.warmup=0",
    "train.evaluate.every=0", "log.every=2",
)  # fmt: skip
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")  # ids 0 to 3


def trained_rules(kind: str) -> Any:
    """A tokenizer of 300 words, byte_run on a little text."""
    pre, dec, norm = tokenizers.pre_tokenizers, tokenizers.decoders, tokenizers.normalizers
    rules = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    match kind:
        case "byte level":
            rules.pre_tokenizer, rules.decoder = pre.ByteLevel(add_prefix_space=False), dec.ByteLevel()
        case "metaspace":
            rules.pre_tokenizer, rules.decoder = pre.Metaspace(), dec.Metaspace()
        case _:
            rules.normalizer, rules.pre_tokenizer = norm.Lowercase(), pre.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIAL), show_progress=False)
    rules.train_from_iterator(sample_text().splitlines(), trainer)
    return rules


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, and tokenizers of several kinds: KIND/tokenizer.json."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(sample_text())
    for kind in ("byte level", "metaspace", "words"):
        (folder / kind).mkdir()
        trained_rules(kind).save(str(folder / kind / "tokenizer.json"))
    return folder


def run_of_text(text: Path, *overrides: str) -> Run:
    return load_recipe("quickstart", [*SMALL, "data=text", f"data.path={text}/text.txt", *overrides])


def export_tokenizer(run: Run, folder: Path) -> list[str]:
    """Write the configs and the tokenizer of a run as an export does. Return the remarks."""
    found = run_tokenizer(run)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**hf_config(run, hf_model_type(run), "float32"), **found.special}))
    (folder / "generation_config.json").write_text(json.dumps(generation_config(run, found.special)))
    return [*found.remarks, *write_tokenizer(run, found, folder)]


def same(read: Any, run: Run) -> bool:
    """Return whether a tokenizer of transformers gives the run's ids of every text."""
    by = load_tokenizer(run.data.tokenizer, run.data.end)
    texts = (*TEXTS, sample_text()[:3000])
    return all(read(each, add_special_tokens=False)["input_ids"] == by.encode(each.encode()).tolist() for each in texts)


# Bytes


@pytest.mark.parametrize("end", [0, 10, None])
@given(written=st.text())
def test_the_byte_tokenizer_json_is_exact(end: int | None, written: str) -> None:
    rules = tokenizers.Tokenizer.from_str(json.dumps(bytes_tokenizer_json(end)))
    for each in (written, f"\0{written}\0Āā"):
        ids = rules.encode(each).ids
        assert ids == list(each.encode())
        assert rules.decode(ids, skip_special_tokens=False) == each


@pytest.mark.parametrize("overrides", KINDS[:3])
def test_transformers_reads_the_bytes_tokenizer(text: Path, tmp_path: Path, overrides: str) -> None:
    run = run_of_text(text, overrides)
    assert export_tokenizer(run, tmp_path / "out") == []
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert same(read, run)
    assert (len(read), read.eos_token_id, read.bos_token_id) == (256, 0, 0)
    assert read.decode(read("é 漢\n")["input_ids"]) == "é 漢\n"


def test_texts_longer_than_a_sequence_are_checked_without_a_warning(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert max(len(each.encode()) for each in TEXTS) > 16
    assert export_tokenizer(run_of_text(text, "model=tiny", "train.seq=16"), tmp_path / "out") == []
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")


def test_a_letter_that_ends_documents_is_still_encoded_as_a_letter(text: Path, tmp_path: Path) -> None:
    export_tokenizer(run_of_text(text, "model=tiny", "data.end=10"), tmp_path / "out")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read.decode(read("a\nb")["input_ids"], skip_special_tokens=True) == "a\nb"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 10


def test_no_tokenizer_is_written_for_a_smaller_vocabulary(text: Path, tmp_path: Path) -> None:
    assert export_tokenizer(run_of_text(text, "model=tiny", "model.vocab=128"), tmp_path / "out") == [
        "no tokenizer is written: data.tokenizer=bytes has 256 tokens and the model 128"
    ]
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["synthetic", "tokens"])
def test_data_without_text_has_no_tokenizer(name: str, tmp_path: Path) -> None:
    run = load_recipe(
        "quickstart", [*SMALL, "model=tiny", f"data={name}", *(["data.path=x.bin", "data.end=7"] if name == "tokens" else [])]
    )
    assert export_tokenizer(run, tmp_path / "out") == []
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == (7 if name == "tokens" else None)


# Files


@pytest.mark.parametrize("kind", ["byte level", "metaspace", "words"])
@pytest.mark.parametrize("named", [None, "PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("overrides", KINDS, ids=str)
def test_transformers_gives_the_runs_ids_or_the_user_is_told_how_to_get_them(
    text: Path, tmp_path: Path, kind: str, named: str | None, overrides: str | tuple[str, ...]
) -> None:
    """AutoTokenizer silently builds another tokenizer for some model types and class names."""
    shutil.copytree(text / kind, tmp_path / "in")
    if named:
        (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named, "eos_token": "</s>"}))
    more = (overrides,) if isinstance(overrides, str) else overrides
    run = run_of_text(text, *more, "model.vocab=300", f"data.tokenizer={tmp_path}/in")
    said = export_tokenizer(run, tmp_path / "out")
    right = same(transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), run)
    assert right == (not any(line.startswith("warning: AutoTokenizer does not tokenize like the run's tokenizer") for line in said))
    assert same(transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out"), run)
    now = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert (now == (named or "PreTrainedTokenizerFast")) == (not any(line.startswith("tokenizer_config.json names ") for line in said))
    if hf_model_type(run) != "qwen2":
        assert right


def test_truncation_and_padding_are_dropped_with_a_remark(text: Path, tmp_path: Path) -> None:
    rules = trained_rules("byte level")
    rules.enable_truncation(4)
    rules.enable_padding(length=9)
    rules.save(str(tmp_path / "own.json"))
    before = (tmp_path / "own.json").read_bytes()
    run = run_of_text(text, "model=tiny", "model.vocab=300", f"data.tokenizer={tmp_path}/own.json")
    said = export_tokenizer(run, tmp_path / "out")
    assert said == [f"tokenizer.json is written without the truncation and padding of {tmp_path}/own.json, which would change texts"]
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert (plain.truncation, plain.padding) == (None, None)
    assert plain.encode(sample_text()).ids == trained_rules("byte level").encode(sample_text()).ids
    assert (tmp_path / "own.json").read_bytes() == before


def test_all_files_of_a_tokenizer_are_copied_unchanged(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text / "byte level", tmp_path / "in")
    for name in TOKENIZER_FILES:
        (tmp_path / "in" / name).write_text(json.dumps({"unk_token": "<unk>"}) if name.endswith(".json") else f"{name}: é\n")
    run = run_of_text(text, "model=tiny_llama", "model.vocab=300", f"data.tokenizer={tmp_path}/in/tokenizer.json")
    export_tokenizer(run, tmp_path / "out")
    for name in ("tokenizer.json", *TOKENIZER_FILES):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes(), name


def test_the_configs_name_the_special_tokens(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text / "byte level", tmp_path / "in")
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "in" / "special_tokens_map.json").write_text(json.dumps(named))
    run = run_of_text(text, "model=tiny_llama", "model.vocab=300", f"data.tokenizer={tmp_path}/in")
    export_tokenizer(run, tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        told = json.loads((tmp_path / "out" / name).read_text())
        assert (told["eos_token_id"], told["bos_token_id"], told["pad_token_id"]) == (2, 1, 3), name
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (read.eos_token_id, read.bos_token_id, read.pad_token_id) == (2, 1, 3)


def test_an_end_token_that_texts_may_contain_is_not_special(text: Path, tmp_path: Path) -> None:
    """As a special token it would be matched in texts, even inside longer words."""
    ordinary = trained_rules("byte level").token_to_id("e")
    run = run_of_text(text, "model=tiny", "model.vocab=300", f"data.tokenizer={text}/byte level", f"data.end={ordinary}")
    export_tokenizer(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == ordinary
    assert "eos_token" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert same(transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), run)


def test_tokens_that_transformers_adds_around_a_text_are_reported(text: Path, tmp_path: Path) -> None:
    rules = trained_rules("byte level")
    rules.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    rules.save(str(tmp_path / "own.json"))
    said = export_tokenizer(run_of_text(text, "model=tiny", "model.vocab=300", f"data.tokenizer={tmp_path}/own.json"), tmp_path / "out")
    assert said == ["transformers adds <s> around a text, which the run's texts did not have: pass add_special_tokens=False"]


def test_a_missing_tokenizer_is_reported(text: Path, tmp_path: Path) -> None:
    (line,) = export_tokenizer(run_of_text(text, "model=tiny", f"data.tokenizer={tmp_path}/gone"), tmp_path / "out")
    assert line.startswith(f"no tokenizer is written: data.tokenizer={tmp_path}/gone: No such file or directory")


@pytest.mark.parametrize("overrides", KINDS, ids=str)
def test_transformers_reads_the_generation_config(text: Path, tmp_path: Path, overrides: str | tuple[str, ...]) -> None:
    export_tokenizer(run_of_text(text, *((overrides,) if isinstance(overrides, str) else overrides)), tmp_path / "out")
    read = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    read.validate(strict=True)
    assert (read.eos_token_id, read.bos_token_id, read.max_length, read.do_sample) == (0, 0, 32, True)


# Whole


@pytest.fixture(scope="module")
def byte_run(ranks: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of bytes."""
    overrides = ("quickstart", *SMALL, "model=tiny", "data=text", f"data.path={text}/text.txt")
    return ranks.train(tmp_path_factory.mktemp("byte_run") / "run", *overrides).folder


def greedy(folder: Path, tokens: int) -> list[int]:
    """The likeliest tokens after "the " in transformers; at most `tokens`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = torch.tensor([list(b"the ")])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens)
    return [int(token) for token in made[0, prompt.shape[1] :]]


def test_generation_in_transformers_stops_at_the_end_token(byte_run: Path, tmp_path: Path) -> None:
    export(byte_run, tmp_path / "out", "fp32")
    whole = greedy(tmp_path / "out", 8)
    assert len(whole) == 8
    shutil.copytree(byte_run, tmp_path / "run")
    ends: dict[str, Any] = {"end": whole[0]}  # had texts ended with what it says first
    edit_extra(tmp_path / "run" / "checkpoints" / "step_2", lambda extra: extra["run"]["data"].update(ends))
    export(tmp_path / "run", tmp_path / "ends", "fp32")
    assert greedy(tmp_path / "ends", 8) == whole[:1]


def test_a_pipeline_of_transformers_generates_as_far_as_the_context_reaches(byte_run: Path, tmp_path: Path) -> None:
    export(byte_run, tmp_path / "out", "fp32")
    torch.manual_seed(1)
    made = transformers.pipeline("text-generation", str(tmp_path / "out"))("the ")[0]["generated_text"]
    assert made.startswith("the ")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert 4 < len(read(made)["input_ids"]) <= 3 * 32  # a byte that is no letter comes back as three
