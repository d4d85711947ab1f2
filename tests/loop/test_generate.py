"""`distrain generate`: text from a run's newest checkpoint, drawn by a seed, printed token by token."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from distrain.cli.app import command
from distrain.tests.fakes.manifest_edits import edit_extra
from distrain.trainer.loop.checkpoint import CheckpointSearch, find_newest
from distrain.trainer.loop.checkpoint.publish import remove_checkpoint
from distrain.trainer.loop.data.tokenize.detokenize import detokenizer
from distrain.trainer.loop.data.tokenize.tokenizer import ByteTokenizer, VocabularyTokenizer
from distrain.trainer.loop.offline.generate import Sampling, generate, sample_token
from distrain.trainer.loop.offline.load_run import load_model, load_saved_run
from distrain.trainer.spec.problem import Unreadable

PHRASE = "abcdefg" * 400  # 7 letters and windows of 16 tokens: no letter has a place of its own in them
SMALL = ("model=tiny", "model.layers=1", "train.batch=8", "train.microbatch=4", "train.seq=16", "train.steps=150", "optim.warmup=2")
QUICK = (*SMALL, "optim.lr=1e-2", "train.evaluate.every=0", "log.every=150", "data.validation=0")


@pytest.fixture(scope="module")
def trained_run(ranks, tmp_path_factory):
    """A run that has memorized one phrase."""
    top = tmp_path_factory.mktemp("trained")
    (top / "phrase.txt").write_text(PHRASE)
    job = ranks.train(top / "run", "quickstart", *QUICK, "data=text", f"data.path={top / 'phrase.txt'}", f"data.cache={top / 'cache'}")
    return job.folder


def generate_text(folder: Path, capsys, **other) -> tuple[str, str]:
    """Generate, and return (stdout, stderr)."""
    generate(folder, replace(Sampling(prompt="abc", tokens=8, temperature=0.0, top_k=None, seed=0, tokenizer=None), **other))
    out, err = capsys.readouterr()
    return out, err


def test_the_verb_prints_the_prompt_and_its_memorized_continuation(trained_run: Path) -> None:
    arguments = ["generate", str(trained_run), "--prompt", "cdef", "--tokens", "30", "--temperature", "0"]
    done = subprocess.run([sys.executable, "-m", "distrain", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, PHRASE[2:36] + "\n", "")


LOADS_A_MODEL = """
import sys
from pathlib import Path
import torch
from distrain.trainer.loop.offline.load_run import load_model, load_saved_run
load_model(load_saved_run(Path(sys.argv[1])), torch.device("cpu"))
assert "torch._dynamo.eval_frame" not in sys.modules
"""


def test_a_model_is_loaded_on_a_cpu_without_an_import_of_torchs_compiler(trained_run: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOADS_A_MODEL, str(trained_run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_temperature_0_takes_the_models_likeliest_token(trained_run: Path, capsys) -> None:
    found = load_saved_run(trained_run)
    module = load_model(found, torch.device("cpu"))
    with torch.no_grad():
        after = int(module.logits(torch.tensor([list(b"xyz")]))[0, -1].argmax())
    assert generate_text(trained_run, capsys, prompt="xyz", tokens=1)[0] == f"xyz{chr(after)}\n"


def test_a_checkpoint_that_the_run_removes_meanwhile_is_still_read(trained_run: Path, tmp_path: Path) -> None:
    shutil.copytree(trained_run, tmp_path / "run")
    found = load_saved_run(tmp_path / "run")
    remove_checkpoint(found.checkpoint.path)
    module, whole = (load_model(each, torch.device("cpu")) for each in (found, load_saved_run(trained_run)))
    assert all(torch.equal(one, other) for one, other in zip(module.parameters(), whole.parameters(), strict=True))


def test_a_checkpoint_that_is_removed_before_it_is_opened_is_looked_for_again(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained_run, tmp_path / "run")
    calls = 0

    def find_and_remove(folder: Path) -> CheckpointSearch:
        nonlocal calls
        calls += 1
        if calls == 2:
            (tmp_path / "removed").rename(found.path)  # as if the run had saved the next one
        search = find_newest(folder)
        if calls == 1 and search.checkpoint is not None:
            search.checkpoint.path.rename(tmp_path / "removed")
        return search

    found = load_saved_run(tmp_path / "run").checkpoint
    monkeypatch.setattr("distrain.trainer.loop.offline.load_run.find_newest", find_and_remove)
    assert load_saved_run(tmp_path / "run").checkpoint.step == found.step
    assert calls == 2


def test_a_seed_gives_the_same_text_and_another_seed_another(trained_run: Path, capsys) -> None:
    first, again, other = (generate_text(trained_run, capsys, temperature=9.0, tokens=40, seed=seed)[0] for seed in (1, 1, 2))
    assert first == again != other


def test_top_k_1_takes_the_likeliest_token(trained_run: Path, capsys) -> None:
    assert generate_text(trained_run, capsys, temperature=9.0, top_k=1, tokens=20) == generate_text(trained_run, capsys, tokens=20)


def test_a_prompt_that_is_too_long_is_cut_with_a_warning(trained_run: Path, capsys) -> None:
    long = "zzz" + PHRASE[:16]
    out, err = generate_text(trained_run, capsys, prompt=long)
    assert err == "distrain: the prompt has 19 tokens and the model sees 16: only the last 16 count\n"
    assert out == long + generate_text(trained_run, capsys, prompt=PHRASE[:16])[0].removeprefix(PHRASE[:16])


def test_an_empty_prompt_starts_a_text(trained_run: Path, capsys) -> None:
    assert generate_text(trained_run, capsys, prompt="", tokens=1)[0].endswith("\n")


def test_temperature_and_top_k_give_the_right_probabilities() -> None:
    drawn, logits = torch.Generator().manual_seed(0), torch.tensor([0.0, 2.0, 1.0, -1.0])
    found = torch.bincount(torch.tensor([sample_token(logits, 0.5, 3, drawn) for _ in range(4000)]), minlength=4) / 4000
    wanted = torch.softmax(torch.tensor([0.0, 4.0, 2.0, -torch.inf]), 0)
    assert found[3] == 0
    assert (found - wanted).abs().max() < 0.02  # 3 deviations of 4,000 draws


def test_the_bytes_of_an_incomplete_letter_wait_for_the_rest() -> None:
    decoder = detokenizer(ByteTokenizer())
    assert [decoder.decode(each) for each in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert decoder.decode(0xC3) == ""
    assert decoder.flush() == "�"


def test_a_vocabulary_keeps_its_spaces() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "to": 1, "be": 2, "[UNK]": 3}, unk_token="[UNK]"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    decoder = detokenizer(VocabularyTokenizer(size=4, end=None, identity="", rules=rules))
    assert "".join(map(decoder.decode, [1, 2, 0, 2])) + decoder.flush() == "to be a be"


def test_a_byte_level_vocabulary_decodes_complete_letters() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    rules = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = tokenizers.decoders.ByteLevel()
    vocabulary = VocabularyTokenizer(size=256, end=None, identity="", rules=rules)
    text = "naïve €5 — ok"
    ids = np.asarray(vocabulary.encode(text.encode())).tolist()
    decoder = detokenizer(vocabulary)
    pieces = [decoder.decode(each) for each in ids]
    assert "".join(pieces) + decoder.flush() == text
    assert "€" in pieces


def test_a_run_that_names_no_tokenizer_asks_for_one(trained_run: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(trained_run, tmp_path / "run")

    def edit(extra) -> None:
        extra["run"]["data"]["name"], extra["run"]["model"]["vocab"] = "tokens", 300

    edit_extra(tmp_path / "run" / "checkpoints" / "step_150", edit)
    with pytest.raises(Unreadable) as wrong:
        generate_text(tmp_path / "run", capsys)
    assert str(wrong.value) == "the run was trained on data=tokens, which names no tokenizer: name one: --tokenizer PATH"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "missing option '--prompt'"),
        (["--prompt", "x", "--tokens", "0"], "invalid value for '--tokens': 0 is not in the range x>=1"),
        (["--prompt", "x", "--tokens", "many"], "invalid value for '--tokens': 'many' is not a valid int range"),
        (["--prompt", "x", "--temperature", "-1"], "invalid value for '--temperature': -1.0 is not in the range x>=0"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature nan is not a finite number: 1 samples from the learnt distribution"),
        (["--prompt", "x", "--top-k", "0"], "invalid value for '--top-k': 0 is not in the range x>=1"),
        (["--prompt", "x", "--sed", "0"], "no option --sed: did you mean --seed?"),
    ],
)
def test_wrong_arguments_get_one_line(arguments: list[str], line: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "run.json").touch()
    assert command(["generate", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err == f"distrain: {line}\n"


def test_a_problem_of_the_child_process_is_one_line(trained_run: Path, tmp_path: Path, capfd) -> None:
    (tmp_path / "run.json").write_text((trained_run / "run.json").read_text())
    assert command(["generate", str(tmp_path), "--prompt", "x"]) == 1
    mend = "`distrain fit` saves one every checkpoint.every steps, and at its end unless checkpoint.final=false"
    assert capfd.readouterr() == ("", f"distrain: {tmp_path} has no checkpoint yet: {mend}\n")
