"""A run that is fine-tuned on chats answers a question: `generate --chat` renders it as a user's turn and stops where the answer ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distrain.cli.app import command
from distrain.tests.data.test_chat_template import CHATML, STRICT, write_folder
from distrain.tests.data.test_chats import say
from distrain.trainer.loop.data.tokenize.tokenizer import VocabularyTokenizer, load_tokenizer
from distrain.trainer.loop.offline.chat_prompt import chat_prompt
from distrain.trainer.loop.offline.generate import Sampling, generate
from distrain.trainer.spec.problem import Unreadable

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

pytest.importorskip("tokenizers")

SMALL = (
    "quickstart", "model=tiny", "model.layers=1", "model.vocab=261", "data=pairs", "data.validation=0", "train.batch=8", "train.seq=64",
    "train.microbatch=4", "train.steps=60", "train.evaluate.every=0", "log.every=60", "optim.lr=1e-2", "optim.warmup=2",
)  # fmt: skip
ASKED = Sampling(prompt="hi", tokens=20, temperature=0.0, top_k=None, seed=0, tokenizer=None, chat=True)


@pytest.fixture(scope="module")
def answering_run(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has memorized two answers of one conversation; its tokenizer's end token is none of the template's."""
    top = tmp_path_factory.mktemp("chats")
    write_folder(top, CHATML, "</s>")
    (top / "a.jsonl").write_text(f"{json.dumps({'messages': say('hi', 'yo!', 'and?', 'so')})}\n" * 8)
    words = (f"data.path={top / 'a.jsonl'}", f"data.tokenizer={top}", f"data.cache={top / 'cache'}")
    return ranks.train(top / "run", *SMALL, *words).folder


def test_the_answer_alone_is_printed_up_to_the_end_of_its_turn(answering_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(answering_run, ASKED)
    assert capsys.readouterr().out == "yo!\n"


def test_without_chat_the_prompt_is_text(answering_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(answering_run, replace(ASKED, chat=False, prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", tokens=3))
    assert capsys.readouterr().out == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo!\n"


def test_the_verb_takes_chat(answering_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(["generate", str(answering_run), "--chat", "--prompt", "hi", "--temperature", "0"]) == 0
    assert capfd.readouterr().out == "yo!\n"


def test_a_tokenizer_without_template_is_refused(answering_run: Path, tmp_path: Path) -> None:
    write_folder(tmp_path, None)
    for name in ("bytes", str(tmp_path)):
        with pytest.raises(Unreadable) as refused:
            generate(answering_run, replace(ASKED, tokenizer=name))
        assert str(refused.value) == f"--chat needs a chat template, and the tokenizer {name} has none: name one that has: --tokenizer PATH"


def test_a_prompt_that_the_template_refuses_is_refused_in_one_line(tmp_path: Path) -> None:
    write_folder(tmp_path, STRICT.replace("!= (loop", "== (loop"), "</s>")
    with pytest.raises(Unreadable) as refused:
        chat_prompt("hi", str(tmp_path), load_tokenizer(str(tmp_path), None))
    wanted = f"the chat template in {tmp_path}/tokenizer_config.json refuses the prompt: Roles must alternate: user, assistant, user, ..."
    assert str(refused.value) == wanted


@pytest.mark.parametrize(("template", "end", "ends"), [(CHATML, "</s>", {"</s>", "<|im_end|>"}), (STRICT, "</s>", {"</s>"})])
def test_an_answer_ends_with_the_end_token_or_what_closes_a_turn(template: str, end: str, ends: set[str], tmp_path: Path) -> None:
    write_folder(tmp_path, template, end)
    tokenizer = load_tokenizer(str(tmp_path), None)
    found = chat_prompt("hi", str(tmp_path), tokenizer)
    assert found.text.endswith(("<|im_start|>assistant\n", "[INST] hi [/INST]"))
    assert isinstance(tokenizer, VocabularyTokenizer)
    assert {tokenizer.rules.id_to_token(each) for each in found.ends} == ends


@pytest.mark.parametrize("layout", ["parallel.pp=2", "parallel.cp=2"])
def test_layouts_change_no_loss_of_chats(layout: str, answering_run: Path, ranks: RankPool, tmp_path: Path) -> None:
    data = answering_run.parent
    words = (f"data.path={data / 'a.jsonl'}", f"data.tokenizer={data}", f"data.cache={data / 'cache'}", "train.steps=4", "log.every=1")
    one, other = (
        ranks.train(tmp_path / name, *SMALL, "model.layers=2", *words, *more).figures("loss")
        for name, more in (("one", ("cluster.gpus=1",)), ("other", (layout,)))
    )
    assert len(one) == 4
    assert other == pytest.approx(one, abs=5e-6, rel=0)
