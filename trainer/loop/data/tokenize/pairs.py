"""Tokenizes prompts with their completions, or with two answers each, from JSON lines that hold each as text or as messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ....spec.run import Data
from .chat_template import ChatTemplate, Message, NotRendered, load_chat_template
from .text_files import HALF_CHARACTER, BadLine, BadText, Span, json_object, keyed_value, span_rows
from .tokenizer import Tokenizer, VocabularyTokenizer


class PairKeys(NamedTuple):
    """data.prompt_key and data.completion_key."""

    prompt: str
    completion: str


class PreferenceKeys(NamedTuple):
    """data.prompt_key, data.chosen_key and data.rejected_key."""

    prompt: str
    chosen: str
    rejected: str


Keys = PairKeys | PreferenceKeys


def keys_of(data: Data) -> Keys:
    """Return the keys of the lines that a run's data section names."""
    if data.has_preferences:
        return PreferenceKeys(data.prompt_key, data.chosen_key, data.rejected_key)
    return PairKeys(data.prompt_key, data.completion_key)


def read_keys(names: Sequence[str]) -> Keys:
    """Return keys from their names."""
    return PreferenceKeys(*names) if len(names) == len(PreferenceKeys._fields) else PairKeys(*names)


class Pair(NamedTuple):
    """The texts of a prompt and its completion, and whether a chat template rendered them from messages."""

    prompt: bytes
    completion: bytes
    rendered: bool


class PairReader:
    """Reads the pairs of a JSON line: the prompt with its completion, or with the chosen and with the rejected answer. Messages are
    rendered by the chat template of the tokenizer that `data.tokenizer` names."""

    def __init__(self, keys: Keys, tokenizer: str) -> None:
        self._keys, self._tokenizer = keys, tokenizer

    def __call__(self, raw: bytes) -> tuple[Pair, ...]:
        """Return the pairs of a line; raises BadLine, Unreadable."""
        try:
            row = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            row = json_object(raw)
        if not isinstance(row, dict):
            raise BadLine("is not a JSON object")
        prompt, *completions = (
            _check_value(keyed_value(row, key, f"data.{setting}_key", self._keys), key) for setting, key in self._keys._asdict().items()
        )
        for key, completion in zip(self._keys[1:], completions, strict=True):
            if isinstance(prompt, str) != isinstance(completion, str):
                kinds = ["text" if isinstance(each, str) else "messages" for each in (prompt, completion)]
                raise BadLine(f"has {kinds[0]} under {self._keys.prompt} and {kinds[1]} under {key}: write both as one kind")
        rendered = not isinstance(prompt, str)
        texts = [self._render(prompt, each) if rendered else (prompt, each) for each in completions]
        try:
            return tuple(Pair(start.encode(), rest.encode(), rendered) for start, rest in texts)
        except UnicodeError:
            raise BadLine(HALF_CHARACTER) from None

    def text(self, raw: bytes) -> bytes:
        """Return the prompts and completions of a line as one text; raises BadLine, Unreadable."""
        return b"".join(pair.prompt + pair.completion for pair in self(raw))

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return load_chat_template(self._tokenizer)

    def _render(self, prompt: list[Message], completion: list[Message]) -> tuple[str, str]:
        """Return the texts of a prompt's and a completion's messages; raises BadLine, Unreadable."""
        if self._template is None:
            says = f"holds messages, but data.tokenizer={self._tokenizer} has no chat template"
            raise BadLine(f"{says}: name a tokenizer that has one, or write {' and '.join(self._keys)} as texts")
        try:
            start = self._template.render(prompt, add_generation_prompt=True)
            whole = self._template.render([*prompt, *completion], add_generation_prompt=False)
        except NotRendered as error:
            raise BadLine(f"is refused by the chat template in {self._template.path}: {error}") from None
        if not whole.startswith(start):
            says = f"rendered by the chat template in {self._template.path} the whole does not begin with the prompt"
            raise BadLine(f"can't be divided: {says}, which ends with {start[-40:]!r}")
        return start, whole[len(start) :]


def _check_value(value: Any, key: str) -> Any:
    """Return a text or a list of messages; raises BadLine if a value is neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise BadLine(f"has neither text nor messages under {key} but {json.dumps(value)[:40]}")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(each), str) for each in ("role", "content")):
            raise BadLine(f'has a message under {key} that is not {{"role": "...", "content": "..."}} but {json.dumps(message)[:40]}')
    return value


def tokenize_pairs(spans: Sequence[Span], into: Path, tokenizer: Tokenizer, read: PairReader) -> None:
    """Write `into`.tokens, ids in the tokenizer's type, and the number of ids before each completion and before each example's end
    (int64): `into`.completions and `into`.ends.

    Raises BadText, Unreadable.
    """
    completions, ends, written = list[int](), list[int](), 0
    end_text = _end_text(tokenizer)
    with open(f"{into}.tokens", "wb") as out:
        for span in spans:
            for pair in chain.from_iterable(_pairs(span, read)):
                prompt, completion = tokenizer.encode(pair.prompt), tokenizer.encode(pair.completion)
                closes = tokenizer.end is not None and not (pair.rendered and _ends_with(pair.completion, end_text))
                end = np.array([tokenizer.end] if closes else [], tokenizer.dtype)
                out.write(prompt.tobytes() + completion.tobytes() + end.tobytes())
                completions.append(written + len(prompt))
                written += len(prompt) + len(completion) + len(end)
                ends.append(written)
    Path(f"{into}.completions").write_bytes(np.array(completions, np.int64).tobytes())
    Path(f"{into}.ends").write_bytes(np.array(ends, np.int64).tobytes())


def _pairs(span: Span, read: PairReader) -> Iterator[tuple[Pair, ...]]:
    """Yield the pairs of each line of a span; raises BadText, Unreadable."""
    try:
        yield from span_rows(span, read)
    except OSError as error:
        raise BadText(f"{span.path}: {error.strerror or error}") from None


def _end_text(tokenizer: Tokenizer) -> bytes:
    """Return the text of the end token; b"" if there is none."""
    if tokenizer.end is None or not isinstance(tokenizer, VocabularyTokenizer):
        return b""
    return str(tokenizer.rules.decode([tokenizer.end], skip_special_tokens=False)).encode()


def _ends_with(text: bytes, end: bytes) -> bool:
    """Return whether a rendered text ends with the end token's text, then perhaps white space, as after many templates' messages."""
    return bool(end) and (text.endswith(end) or text.rstrip().endswith(end))
