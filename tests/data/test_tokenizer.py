"""A tokenizer.json encodes each document whole and ends it, with any saved state, or is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.corpus import Corpus
from distrain.trainer.loop.data.samples.tokens import MappedTokens
from distrain.trainer.loop.data.tokenize.tokenizer import ByteTokenizer, load_tokenizer
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [f"to be or not to be, that is question {index} of {index * index}" for index in range(40)]


def make_rules(special: tuple[str, ...] = ("<pad>", "</s>"), **model: Any) -> Any:
    """A byte-level BPE tokenizer of 300 ids, as GPT-2's."""
    rules = tokenizers.Tokenizer(tokenizers.models.BPE(**model))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    rules.train_from_iterator(TEXTS, trainer)
    return rules


PLAIN = make_rules()
WHOLE = [[*PLAIN.encode(text).ids, 1] for text in TEXTS]


def write_texts(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def open_corpus(folder: Path, vocab: int = 300, remarks: list[str] | None = None, **words: Any) -> Corpus:
    def progress(what: str, done: int, total: int) -> None:
        if not total and remarks is not None:
            remarks.append(what)

    data = Data(name="text", path=str(write_texts(folder)), **{"tokenizer": str(folder), **words})
    return prepare_corpus(data, vocab=vocab, seq=4, cache=folder / "cache", progress=progress)


def documents(corpus: Corpus) -> list[list[int]]:
    tokens = corpus.sources[0].tokens
    assert isinstance(tokens, MappedTokens)
    whole = np.empty(tokens.size, np.int64)
    tokens.copy(0, whole)
    return [whole[begin:end].tolist() for begin, end in zip(tokens.bounds[:-1], tokens.bounds[1:], strict=True)]


# Left behind by a last use


@pytest.mark.parametrize("use", [{"truncation": True, "max_length": 8}, {"padding": "max_length", "max_length": 64, "truncation": True}])
def test_truncation_and_padding_saved_by_transformers_are_ignored(use: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=make_rules(), eos_token="</s>", pad_token="<pad>")
    fast(TEXTS[0], **use)
    fast.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["truncation"] or saved["padding"], "transformers writes what this test is about"
    assert documents(open_corpus(tmp_path)) == WHOLE


STATES: dict[str, Callable[[Any], Any]] = {
    "truncation": lambda rules: rules.enable_truncation(5),
    "padding to a length": lambda rules: rules.enable_padding(length=100),
    "padding to a multiple": lambda rules: rules.enable_padding(pad_to_multiple_of=64),
    "both": lambda rules: (rules.enable_truncation(5), rules.enable_padding(length=7)),
    "tokens around a text": lambda rules: setattr(
        rules,
        "post_processor",
        tokenizers.processors.TemplateProcessing(single="<pad> $A </s>", special_tokens=[("<pad>", 0), ("</s>", 1)]),
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_no_saved_tokenizer_state_changes_a_document(state: str, tmp_path: Path) -> None:
    rules = make_rules()
    STATES[state](rules)
    rules.save(str(tmp_path / "tokenizer.json"))
    assert documents(open_corpus(tmp_path)) == WHOLE


def test_bpe_dropout_is_switched_off(tmp_path: Path) -> None:
    rules = make_rules()
    rules.model.dropout = 0.5
    rules.save(str(tmp_path / "tokenizer.json"))
    assert documents(open_corpus(tmp_path)) == WHOLE


# Sizes and ends


def test_added_tokens_beyond_the_base_vocabulary_count(tmp_path: Path) -> None:
    rules = make_rules()
    rules.add_special_tokens(["<|im_end|>"])
    rules.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    size = rules.token_to_id("<|im_end|>") + 1
    with pytest.raises(Unreadable, match=rf"has ids up to {size - 1}, but model.vocab={size - 1}: set model.vocab={size}$"):
        open_corpus(tmp_path, size - 1)
    assert {text[-1] for text in documents(open_corpus(tmp_path, size))} == {size - 1}


BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "a name": {"tokenizer_config.json": {"eos_token": "<pad>"}},
    "an added token": {"tokenizer_config.json": {"eos_token": {"content": "<pad>", "special": True}}},
    "an older folder": {"special_tokens_map.json": {"eos_token": "<pad>"}},
    "both": {"tokenizer_config.json": {"eos_token": "<pad>"}, "special_tokens_map.json": {"eos_token": "</s>"}},
    "one without it": {"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": {"eos_token": {"content": "<pad>"}}},
}


@pytest.mark.parametrize("name", BESIDE)
def test_the_end_token_is_the_eos_token_of_tokenizer_config(name: str, tmp_path: Path) -> None:
    PLAIN.save(str(tmp_path / "tokenizer.json"))
    for file, words in BESIDE[name].items():
        (tmp_path / file).write_text(json.dumps(words))
    assert load_tokenizer(str(tmp_path), None).end == 0
    assert load_tokenizer(str(tmp_path / "tokenizer.json"), 7).end == 7


def test_an_unknown_eos_token_is_refused(tmp_path: Path) -> None:
    PLAIN.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    with pytest.raises(Unreadable) as refused:
        load_tokenizer(str(tmp_path), None)
    assert str(refused.value) == (
        f"{tmp_path}/tokenizer_config.json names eos_token=<|im_end|>, which data.tokenizer={tmp_path} does not have: "
        "set data.end to the id of the token that ends a document"
    )
    assert load_tokenizer(str(tmp_path), 1).end == 1


def test_a_tokenizer_without_an_end_token_is_remarked_on(tmp_path: Path) -> None:
    make_rules(("<pad>",)).save(str(tmp_path / "tokenizer.json"))
    remarks: list[str] = []
    open_corpus(tmp_path, remarks=remarks)
    says = f"data.tokenizer={tmp_path} names no end-of-document token, so documents run together: data.end=ID sets one"
    assert remarks == [says]


@pytest.mark.parametrize(("vocab", "remarked"), [(300, False), (1384, False), (1385, True), (50257, True)])
def test_a_model_vocabulary_far_larger_than_the_tokenizer_is_remarked_on(vocab: int, remarked: bool, tmp_path: Path) -> None:
    PLAIN.save(str(tmp_path / "tokenizer.json"))
    remarks: list[str] = []
    open_corpus(tmp_path, vocab, remarks)
    says = f"data.tokenizer={tmp_path} has 300 ids, but model.vocab={vocab}: the other ids never occur"
    assert remarks == [says] * remarked


# What is not a tokenizer.json
# fmt: off
OTHERS: dict[str, tuple[str, Callable[[Path], Any], str]] = {  # what is named, what there is, the line
    "a folder of something else": ("AT", lambda at: None,
        "data.tokenizer=AT has no tokenizer.json: set it to bytes or to the path of a tokenizer.json"),
    "a folder of a slow tokenizer": ("AT", lambda at: (at / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15"),
        ("data.tokenizer=AT has no tokenizer.json, only tokenizer.model: transformers writes one: "
         "AutoTokenizer.from_pretrained('AT').save_pretrained('AT')")),
    "a SentencePiece model": ("AT/tokenizer.model", lambda at: (at / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\xff"),
        ("data.tokenizer=AT/tokenizer.model is a SentencePiece model: transformers writes one: "
         "AutoTokenizer.from_pretrained('AT').save_pretrained('AT')")),
    "one beside the right file": ("AT/tokenizer.model", lambda at: (
        (at / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\xff"), PLAIN.save(str(at / "tokenizer.json"))),
        "data.tokenizer=AT/tokenizer.model is a SentencePiece model: did you mean AT/tokenizer.json?"),
    "a vocabulary": ("AT/vocab.json", lambda at: (at / "vocab.json").write_text('{"a": 0, "b": 1}'),
        ("data.tokenizer=AT/vocab.json is a vocabulary without its rules: transformers writes one: "
         "AutoTokenizer.from_pretrained('AT').save_pretrained('AT')")),
    "a configuration": ("AT/config.json", lambda at: (at / "config.json").write_text('{"model_type": "llama"}'),
        "data.tokenizer=AT/config.json is a configuration, not a tokenizer.json: set it to bytes or to the path of a tokenizer.json"),
    "tiktoken's": ("AT/cl100k.tiktoken", lambda at: (at / "cl100k.tiktoken").write_text("IQ== 0\nIg== 1\n"),
        "data.tokenizer=AT/cl100k.tiktoken is a tiktoken vocabulary: set it to bytes or to the path of a tokenizer.json"),
    "a name of the hub": ("gpt2", lambda at: None,
        "data.tokenizer=gpt2: No such file or directory: set it to bytes or to the path of a tokenizer.json"),
    "a device": ("/dev/null", lambda at: None,
        "data.tokenizer=/dev/null is not a file: set it to bytes or to the path of a tokenizer.json"),
    "an empty vocabulary": ("AT/t.json", lambda at: tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(at / "t.json")),
        "data.tokenizer=AT/t.json has no tokens"),
    "a pointer of Git LFS": ("AT/t.json", lambda at: (at / "t.json").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "data.tokenizer=AT/t.json is a Git LFS pointer: git lfs pull fetches the file: set it to bytes or to the path of a tokenizer.json"),
    "nobody's home": ("~nobody-is-called-so/t.json", lambda at: None,
        "data.tokenizer=~nobody-is-called-so/t.json: No such file or directory: set it to bytes or to the path of a tokenizer.json"),
}
# fmt: on


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_is_not_a_tokenizer_json_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    word, write, line = OTHERS[name]
    write(tmp_path)
    with pytest.raises(Unreadable) as refused:
        load_tokenizer(word.replace("AT", str(tmp_path)), None)
    assert str(refused.value).replace(str(tmp_path), "AT") == line


def test_text_that_a_tokenizer_cannot_encode_is_refused_in_one_line(tmp_path: Path) -> None:
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "to": 1}))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rules.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(Unreadable, match=r"^the tokenizer can't encode b'to be or .*: WordLevel error: Missing \[UNK\] token"):
        open_corpus(tmp_path)


def test_the_byte_tokenizer_returns_bytes() -> None:
    assert load_tokenizer("bytes", None) == ByteTokenizer()
