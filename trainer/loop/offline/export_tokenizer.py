"""The tokenizer of an exported folder: the run's files without truncation and padding, or the byte tokenizer in transformers' format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...models.hf_format.weights import NO_TOKENS
from ...spec.problem import Unreadable
from ...spec.run import Run
from ..data.tokenize.tokenizer import ByteTokenizer, Tokenizer, VocabularyTokenizer, load_tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model",
    "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
CUTTING_KEYS = ("truncation", "padding")  # transformers saves both in tokenizer.json once they were used
PLAIN_CLASS = "PreTrainedTokenizerFast"  # follows tokenizer.json alone; the classes of single models add rules of their own
# Texts in which tokenizers differ: spaces, case, digits, code, combining marks, letters of more than one byte.
TEXTS = (
    "Hello World", "  two  spaces and a line\n\n\tindented ", "x = f(a[10], 2024) != 'b' # don't",
    "e\u0301\u00e9 \ufb01 \u0130 \u212b", "\u6f22\u5b57 \U0001f642 \u03a9mega \u200b.", "", " ",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunTokenizer:
    """The tokenizer of a run's data (None: unknown), the special ids that its config files name, and remarks for the user."""

    tokenizer: Tokenizer | None
    special: dict[str, int | None]
    remarks: tuple[str, ...] = ()


def run_tokenizer(run: Run) -> RunTokenizer:
    """Return the tokenizer that a run was trained with, as far as its files still exist."""
    data, word = run.data, run.data.tokenizer
    tokenizer, remarks = None, list[str]()
    if word != "bytes" or data.has_text:
        try:
            tokenizer = load_tokenizer(word, data.end)
        except Unreadable as error:
            remarks.append(f"no tokenizer is written: {error}")
    if tokenizer is not None and tokenizer.size > run.model.vocab:
        remarks.append(f"no tokenizer is written: data.tokenizer={word} has {tokenizer.size:,} tokens and the model {run.model.vocab:,}")
        tokenizer = None
    end = tokenizer.end if tokenizer is not None else data.end
    special = {**NO_TOKENS, "eos_token_id": end, "bos_token_id": end}  # in the data a document starts after the end token of another
    if isinstance(tokenizer, VocabularyTokenizer):
        tokenizer.rules.no_truncation()
        tokenizer.rules.no_padding()
        ids: dict[str, int] = tokenizer.rules.get_vocab(with_added_tokens=True)
        own = {f"{name}_id": ids[token] for name, token in _named_special_tokens(_tokenizer_file(word).parent) if token in ids}
        special |= {key: token for key, token in own.items() if key != "eos_token_id" and token < run.model.vocab}
        remarks += _added_token_remarks(tokenizer, run)
    return RunTokenizer(tokenizer=tokenizer, special=special, remarks=tuple(remarks))


def write_tokenizer(run: Run, found: RunTokenizer, folder: Path) -> Iterator[str]:
    """Write the tokenizer into a folder that has its config.json. Yield remarks for the user."""
    if found.tokenizer is None:
        return
    if isinstance(found.tokenizer, ByteTokenizer):
        _write(folder / "tokenizer.json", bytes_tokenizer_json(found.tokenizer.end))
        _write(folder / TOKENIZER_CONFIG, _own_config(run, {"eos_token": "\0", "bos_token": "\0"} if found.tokenizer.end == 0 else {}))
    else:
        source = _tokenizer_file(run.data.tokenizer)
        yield from _copy_rules(source, folder)
        for name in TOKENIZER_FILES:
            with suppress(FileNotFoundError):
                shutil.copyfile(source.with_name(name), folder / name)
        if not (folder / TOKENIZER_CONFIG).exists():
            _write(folder / TOKENIZER_CONFIG, _own_config(run, _special_names(found)))
    yield from _check_reload(found.tokenizer, folder)


def _tokenizer_file(word: str) -> Path:
    path = Path(word).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path


def _copy_rules(source: Path, folder: Path) -> Iterator[str]:
    """Copy tokenizer.json without truncation and padding. Yield a remark if it had any."""
    rules = json.loads(source.read_bytes())
    cuts = [key for key in CUTTING_KEYS if rules.get(key)]
    if not cuts:
        shutil.copyfile(source, folder / "tokenizer.json")
        return
    _write(folder / "tokenizer.json", rules | dict.fromkeys(cuts))
    yield f"tokenizer.json is written without the {' and '.join(cuts)} of {source}, which would change texts"


def _named_special_tokens(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the special tokens that files next to tokenizer.json name: ("bos_token", "<s>")."""
    for file in ("special_tokens_map.json", TOKENIZER_CONFIG):
        with suppress(OSError, ValueError, AttributeError):
            for name, token in json.loads((folder / file).read_text(encoding="utf-8")).items():
                token = token.get("content") if isinstance(token, dict) else token
                if f"{name}_id" in NO_TOKENS and isinstance(token, str):
                    yield name, token


def _special_names(found: RunTokenizer) -> dict[str, str]:
    """Return the special tokens by name, those that are special in tokenizer.json too: any other would newly be matched in texts."""
    assert isinstance(found.tokenizer, VocabularyTokenizer)
    added = found.tokenizer.rules.get_added_tokens_decoder()
    return {
        key.removesuffix("_id"): added[token].content for key, token in found.special.items() if token in added and added[token].special
    }


def _own_config(run: Run, names: dict[str, str]) -> dict[str, object]:
    return {"tokenizer_class": PLAIN_CLASS, "clean_up_tokenization_spaces": False, "model_max_length": run.train.seq, **names}


def _added_token_remarks(tokenizer: VocabularyTokenizer, run: Run) -> Iterator[str]:
    """Yield a remark where transformers adds tokens around a text that the run's texts did not have."""
    as_published = type(tokenizer.rules).from_file(str(_tokenizer_file(run.data.tokenizer)))  # with its post-processor
    bare, whole = (as_published.encode("a", add_special_tokens=add) for add in (False, True))
    if run.data.has_text and len(whole.ids) > len(bare.ids):
        tokens = ", ".join(dict.fromkeys(token for token in whole.tokens if token not in bare.tokens))
        yield f"transformers adds {tokens} around a text, which the run's texts did not have: pass add_special_tokens=False"


def _check_reload(tokenizer: Tokenizer, folder: Path) -> Iterator[str]:
    """Check that AutoTokenizer gives the run's ids; where only the plain class does, name that in the config. Yield a remark of either."""
    if find_spec("transformers") is None or _splits_alike(tokenizer, folder):
        return
    before = (folder / TOKENIZER_CONFIG).read_bytes()
    config = json.loads(before)
    _write(folder / TOKENIZER_CONFIG, config | {"tokenizer_class": PLAIN_CLASS})
    if config.get("tokenizer_class") != PLAIN_CLASS and _splits_alike(tokenizer, folder):
        own = config.get("tokenizer_class")
        yield f"{TOKENIZER_CONFIG} names {PLAIN_CLASS} in place of {own}, which does not tokenize as tokenizer.json says"
        return
    (folder / TOKENIZER_CONFIG).write_bytes(before)
    yield f"warning: AutoTokenizer does not tokenize like the run's tokenizer: load it with transformers.{PLAIN_CLASS}.from_pretrained"


def _splits_alike(tokenizer: Tokenizer, folder: Path) -> bool:
    auto: Any = import_module("transformers").AutoTokenizer
    try:
        loaded = auto.from_pretrained(folder)
        split = partial(loaded, add_special_tokens=False, verbose=False)  # with `verbose` it warns of texts longer than train.seq
        return all(split(text)["input_ids"] == tokenizer.encode(text.encode()).tolist() for text in TEXTS)
    except Exception:  # any exception of any version
        return False


def bytes_tokenizer_json(end: int | None) -> dict[str, object]:
    """Return the byte tokenizer as a tokenizer.json: every byte of a text is its own id.

    Byte 0 is an added token where it ends documents: added tokens are matched before bytes become letters.
    """
    vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())}
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


def _byte_letters() -> list[str]:
    """Return the letter that GPT-2's ByteLevel format has for each byte: itself if it is printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + hidden.index(byte)) for byte in range(256)]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
