"""The tokenizer of an exported folder: the run's files without what would cut texts, or the bytes tokenizer in transformers' form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...models.weights import NO_TOKENS
from ...spec.problem import Unreadable
from ...spec.run import Run
from ..data.tokenizer import Bytes, Tokenizer, Vocabulary, tokenizer

CONFIG = "tokenizer_config.json"
BESIDE = (
    CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
CUTS = ("truncation", "padding")  # transformers writes both into tokenizer.json after it has used them
PLAIN = "PreTrainedTokenizerFast"  # the class that does what tokenizer.json says; others are of one model and know better
# Texts in which tokenizers differ: spaces, case, digits, code, marks that normalisation joins, letters of more than one byte.
TEXTS = (
    "Hello World", "  two  spaces and a line\n\n\tindented ", "x = f(a[10], 2024) != 'b' # don't",
    "e\u0301\u00e9 \ufb01 \u0130 \u212b", "\u6f22\u5b57 \U0001f642 \u03a9mega \u200b.", "", " ",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Known:
    """The tokenizer of a run's data (None: none is known), the ids that its configs name, and what the user is told."""

    by: Tokenizer | None
    special: dict[str, int | None]
    remarks: tuple[str, ...] = ()


def known(run: Run) -> Known:
    """The tokenizer that a run learnt by, as far as its files are still there."""
    data, word = run.data, run.data.tokenizer
    by, remarks = None, list[str]()
    if word != "bytes" or data.name in ("text", "stdlib"):
        try:
            by = tokenizer(word, data.end)
        except Unreadable as error:
            remarks.append(f"no tokenizer is written: {error}")
    if by is not None and by.size > run.model.vocab:
        remarks.append(f"no tokenizer is written: data.tokenizer={word} has {by.size:,} tokens and the model {run.model.vocab:,}")
        by = None
    end = by.end if by is not None else data.end
    special = {**NO_TOKENS, "eos_token_id": end, "bos_token_id": end}  # a text of the data begins where another has ended
    if isinstance(by, Vocabulary):
        by.rules.no_truncation()
        by.rules.no_padding()
        ids: dict[str, int] = by.rules.get_vocab(with_added_tokens=True)
        own = {f"{name}_id": ids[token] for name, token in _named(_source(word).parent) if token in ids}
        special |= {key: token for key, token in own.items() if key != "eos_token_id" and token < run.model.vocab}
        remarks += _around(by, run)
    return Known(by=by, special=special, remarks=tuple(remarks))


def put_tokenizer(run: Run, found: Known, folder: Path) -> Iterator[str]:
    """Write the tokenizer into a folder that has its config.json; what the user is told of it."""
    if found.by is None:
        return
    if isinstance(found.by, Bytes):
        _write(folder / "tokenizer.json", bytes_form(found.by.end))
        _write(folder / CONFIG, _own_config(run, {"eos_token": "\0", "bos_token": "\0"} if found.by.end == 0 else {}))
    else:
        source = _source(run.data.tokenizer)
        yield from _put_rules(source, folder)
        for name in BESIDE:
            with suppress(FileNotFoundError):
                shutil.copyfile(source.with_name(name), folder / name)
        if not (folder / CONFIG).exists():
            _write(folder / CONFIG, _own_config(run, _names(found)))
    yield from _checked(found.by, folder)


def _source(word: str) -> Path:
    path = Path(word).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path


def _put_rules(source: Path, folder: Path) -> Iterator[str]:
    """Copy tokenizer.json, without truncation and padding."""
    rules = json.loads(source.read_bytes())
    cuts = [key for key in CUTS if rules.get(key)]
    if not cuts:
        shutil.copyfile(source, folder / "tokenizer.json")
        return
    _write(folder / "tokenizer.json", rules | dict.fromkeys(cuts))
    yield f"tokenizer.json is written without the {' and '.join(cuts)} of {source}, which would change every text"


def _named(folder: Path) -> Iterator[tuple[str, str]]:
    """The special tokens that files beside tokenizer.json name: ("bos_token", "<s>")."""
    for file in ("special_tokens_map.json", CONFIG):
        with suppress(OSError, ValueError, AttributeError):
            for name, token in json.loads((folder / file).read_text(encoding="utf-8")).items():
                token = token.get("content") if isinstance(token, dict) else token
                if f"{name}_id" in NO_TOKENS and isinstance(token, str):
                    yield name, token


def _names(found: Known) -> dict[str, str]:
    """The special tokens by name, where tokenizer.json knows them as such: another would be looked for in texts from now on."""
    assert isinstance(found.by, Vocabulary)
    added = found.by.rules.get_added_tokens_decoder()
    return {
        key.removesuffix("_id"): added[token].content for key, token in found.special.items() if token in added and added[token].special
    }


def _own_config(run: Run, names: dict[str, str]) -> dict[str, object]:
    return {"tokenizer_class": PLAIN, "clean_up_tokenization_spaces": False, "model_max_length": run.train.seq, **names}


def _around(by: Vocabulary, run: Run) -> Iterator[str]:
    """That transformers puts tokens around a text which the run's texts did not have."""
    bare, whole = (by.rules.encode("a", add_special_tokens=add) for add in (False, True))
    if run.data.name in ("text", "stdlib") and len(whole.ids) > len(bare.ids):
        tokens = ", ".join(dict.fromkeys(token for token in whole.tokens if token not in bare.tokens))
        yield f"transformers puts {tokens} around a text, which the run's texts did not have: say add_special_tokens=False"


def _checked(by: Tokenizer, folder: Path) -> Iterator[str]:
    """Whether AutoTokenizer gives the run's ids; it is led to the plain class where only that one does."""
    if find_spec("transformers") is None or _same(by, folder):
        return
    before = (folder / CONFIG).read_bytes()
    said = json.loads(before)
    _write(folder / CONFIG, said | {"tokenizer_class": PLAIN})
    if said.get("tokenizer_class") != PLAIN and _same(by, folder):
        yield f"{CONFIG} names {PLAIN} in place of {said.get('tokenizer_class')}, which does not split texts as tokenizer.json says"
        return
    (folder / CONFIG).write_bytes(before)
    yield f"warning: AutoTokenizer does not split texts as the run's tokenizer: load it with transformers.{PLAIN}.from_pretrained"


def _same(by: Tokenizer, folder: Path) -> bool:
    theirs: Any = import_module("transformers").AutoTokenizer
    try:
        read = theirs.from_pretrained(folder)
        return all(read(text, add_special_tokens=False)["input_ids"] == by.encode(text.encode()).tolist() for text in TEXTS)
    except Exception:  # whatever a version of it may raise
        return False


def bytes_form(end: int | None) -> dict[str, object]:
    """The bytes tokenizer as a tokenizer.json: every byte of a text is its own id, and ids become the bytes again.

    Byte 0 is a token of its own where it ends documents: it is found in a text before the letters that stand for bytes are.
    """
    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    ends = []
    if end == 0:
        vocabulary = {"\0": 0} | {letter: byte for letter, byte in vocabulary.items() if byte}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ends = [{"id": 0, "content": "\0", **flags, "special": True}]
    stage = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": ends,
        "normalizer": None,
        "pre_tokenizer": stage,
        "post_processor": None,
        "decoder": stage,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "vocab": vocabulary, "merges": []},
    }


def _letters() -> list[str]:
    """The letter that GPT-2's ByteLevel form has for each byte: itself where it can be seen, else one from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(0x100 + hidden.index(byte)) for byte in range(256)]


def _write(path: Path, words: dict[str, Any]) -> None:
    path.write_text(json.dumps(words, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
