"""Tokenizes prompts with their completions, or with two answers each, and conversations, from JSON lines of texts or messages."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from ....spec.run import Data
from .chat_template import ChatTemplate, Message, NotRendered, load_chat_template
from .chats import MESSAGE_FORM, SHAREGPT_KEY, Chat, chat_of, holds_messages, read_messages
from .text_files import HALF_CHARACTER, BadLine, BadText, Span, json_object, keyed_value, open_lines, span_rows
from .tokenizer import Ids, Tokenizer, VocabularyTokenizer

LineForm = Literal["prompt and completion", "messages"]

ALPACA_KEYS = {"instruction", "output"}
ALPACA_JQ = (
    """jq -c '{prompt: (if (.input // "") == "" then .instruction else .instruction + "\\n\\n" + .input end), completion: .output}' """
    "FILE > NEW.jsonl"
)


class PairKeys(NamedTuple):
    """data.prompt_key, data.completion_key, data.messages_key and data.turns."""

    prompt: str
    completion: str
    messages: str
    turns: str


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
    return PairKeys(data.prompt_key, data.completion_key, data.messages_key, data.turns)


def read_keys(names: Sequence[str]) -> Keys:
    """Return keys from their names."""
    return PreferenceKeys(*names) if len(names) == len(PreferenceKeys._fields) else PairKeys(*names)


class Pair(NamedTuple):
    """The texts of a prompt and its completion, and whether a chat template rendered them from messages."""

    prompt: bytes
    completion: bytes
    rendered: bool


class PairReader:
    """Reads the examples of a JSON line: the prompt with its completion, or with the chosen and with the rejected answer, or a
    conversation. Messages are rendered by the chat template of the tokenizer that `data.tokenizer` names."""

    def __init__(self, keys: Keys, tokenizer: str) -> None:
        self._keys, self._tokenizer = keys, tokenizer
        self._value_keys = {f"data.{key}_key": value for key, value in keys._asdict().items() if key not in ("messages", "turns")}

    def __call__(self, raw: bytes, form: LineForm | None = None) -> tuple[Pair | Chat, ...]:
        """Return the examples of a line, whose form must be this one; raises BadLine, Unreadable."""
        row = _row_of(raw)
        found = self.form(row)
        if form not in (None, found):
            raise BadLine(f"holds {found}, and the file's first line {form}: write lines of one kind into a file")
        if found == "messages":
            return (self._chat(row),)
        prompt, *completions = (
            _check_value(keyed_value(row, key, setting, self._value_keys.values()), key) for setting, key in self._value_keys.items()
        )
        keys = tuple(self._value_keys.values())
        for key, completion in zip(keys[1:], completions, strict=True):
            if isinstance(prompt, str) != isinstance(completion, str):
                kinds = ["text" if isinstance(each, str) else "messages" for each in (prompt, completion)]
                raise BadLine(f"has {kinds[0]} under {keys[0]} and {kinds[1]} under {key}: write both as one kind")
        rendered = not isinstance(prompt, str)
        texts = [self._render(prompt, each) if rendered else (prompt, each) for each in completions]
        try:
            return tuple(Pair(start.encode(), rest.encode(), rendered) for start, rest in texts)
        except UnicodeError:
            raise BadLine(HALF_CHARACTER) from None

    def text(self, raw: bytes) -> bytes:
        """Return the prompts and completions of a line as one text; raises BadLine, Unreadable."""
        return b"".join(each.text.encode() if isinstance(each, Chat) else each.prompt + each.completion for each in self(raw))

    def form_of_file(self, path: str) -> LineForm:
        """Return what the first line of a file holds; raises BadLine, OSError."""
        if path not in self._forms:
            with open_lines(path) as file:
                first = next((line for line in file if line.removeprefix(BOM_UTF8).strip()), b"{}")
            try:
                self._forms[path] = self.form(_row_of(first.removeprefix(BOM_UTF8)))
            except BadLine:  # which is said when the line is read
                self._forms[path] = "prompt and completion"
        return self._forms[path]

    def form(self, row: dict[str, Any]) -> LineForm:
        """Return what a line holds; raises BadLine for a form of other trainers that is not read."""
        if not isinstance(self._keys, PairKeys) or {self._keys.prompt, self._keys.completion} <= row.keys():
            return "prompt and completion"
        if self._keys.messages in row or SHAREGPT_KEY in row:
            return "messages"
        if row.keys() >= ALPACA_KEYS and self._keys.prompt not in row:
            raise BadLine(f"holds instruction and output, as Alpaca's: write prompts and completions: {ALPACA_JQ}")
        if chats := [key for key, value in row.items() if holds_messages(value) and key not in self._keys]:
            raise BadLine(f"has no key {self._keys.messages}: set data.messages_key={chats[0]}")
        return "prompt and completion"

    @cached_property
    def _forms(self) -> dict[str, LineForm]:
        return {}

    def _chat(self, row: dict[str, Any]) -> Chat:
        """Return the conversation of a line; raises BadLine, Unreadable."""
        assert isinstance(self._keys, PairKeys)
        key = self._keys.messages if self._keys.messages in row else SHAREGPT_KEY
        messages = read_messages(row[key], key)
        if self._template is None:
            raise BadLine(f"holds messages, but data.tokenizer={self._tokenizer} has no chat template: name a tokenizer that has one")
        return chat_of(messages, self._template, "last" if self._keys.turns == "last" else "all")

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return load_chat_template(self._tokenizer)

    def _render(self, prompt: list[Message], completion: list[Message]) -> tuple[str, str]:
        """Return the texts of a prompt's and a completion's messages; raises BadLine, Unreadable."""
        if self._template is None:
            says = f"holds messages, but data.tokenizer={self._tokenizer} has no chat template"
            raise BadLine(f"{says}: name a tokenizer that has one, or write {' and '.join(self._value_keys.values())} as texts")
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
            raise BadLine(f"has a message under {key} that is not {MESSAGE_FORM} but {json.dumps(message)[:40]}")
    return value


def _row_of(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; raises BadLine."""
    try:
        row = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        row = json_object(raw)
    if not isinstance(row, dict):
        raise BadLine("is not a JSON object")
    return row


class _Tokenized(NamedTuple):
    """The ids of an example, the positions at which its completion or its turns begin and end, whether its completion is empty."""

    ids: Ids
    labels: list[tuple[int, int]]
    is_empty: bool


def tokenize_pairs(spans: Sequence[Span], into: Path, tokenizer: Tokenizer, read: PairReader) -> None:
    """Write `into`.tokens, ids in the tokenizer's type, and int64: the number of ids before each completion and before each example's end,
    `into`.completions and `into`.ends; [n, 2] those before each turn of a conversation and before its end, `into`.turns, nothing of files
    of prompts and completions; and the number of empty completions, `into`.empty.

    Raises BadText, Unreadable.
    """
    completions, ends, turns, empty, written = list[int](), list[int](), list[tuple[int, int]](), 0, 0
    end_text = _end_text(tokenizer)
    with open(f"{into}.tokens", "wb") as out:
        for span in spans:
            for each in chain.from_iterable(_examples(span, read)):
                found = _tokenize_chat(each, tokenizer, end_text) if isinstance(each, Chat) else _tokenize_pair(each, tokenizer, end_text)
                out.write(found.ids.tobytes())
                first = found.labels[0][0] if found.labels else len(found.ids)
                completions.append(written + first)
                turns += [(written + begin, written + end) for begin, end in found.labels]
                empty += found.is_empty
                written += len(found.ids)
                ends.append(written)
    for name, numbers in (("completions", completions), ("ends", ends), ("turns", turns), ("empty", [empty])):
        Path(f"{into}.{name}").write_bytes(np.array(numbers, np.int64).tobytes())


def _tokenize_pair(pair: Pair, tokenizer: Tokenizer, end_text: bytes) -> _Tokenized:
    """Tokenize a prompt and its completion apart; raises Unreadable."""
    prompt, completion = tokenizer.encode(pair.prompt), tokenizer.encode(pair.completion)
    closes = not (pair.rendered and _ends_with(pair.completion, end_text))
    ids = np.concatenate([prompt, completion, _end_ids(tokenizer, closes=closes)])
    return _Tokenized(ids, [(len(prompt), len(ids))], is_empty=not pair.completion)


def _tokenize_chat(chat: Chat, tokenizer: Tokenizer, end_text: bytes) -> _Tokenized:
    """Tokenize a whole conversation at once. A token that holds a character of a turn belongs to it. Raises Unreadable."""
    assert isinstance(tokenizer, VocabularyTokenizer)  # bytes have no chat template
    ids, begins, ends = tokenizer.encode_with_places(chat.text)
    ends = np.maximum(ends, begins + 1)
    labels = [(int(np.searchsorted(ends, turn.begin, "right")), int(np.searchsorted(begins, turn.end))) for turn in chat.turns]
    closing = _end_ids(tokenizer, closes=not _ends_with(chat.text.encode(), end_text))
    if len(closing) and labels and chat.ends_with_label:
        begin = labels.pop()[0] if labels[-1][1] == len(ids) else len(ids)
        labels.append((begin, len(ids) + len(closing)))
    return _Tokenized(np.concatenate([ids, closing]), labels, is_empty=False)


def _end_ids(tokenizer: Tokenizer, *, closes: bool) -> Ids:
    """Return the end token where something `closes` with it, else nothing."""
    return np.array([tokenizer.end] if closes and tokenizer.end is not None else [], tokenizer.dtype)


def _examples(span: Span, read: PairReader) -> Iterator[tuple[Pair | Chat, ...]]:
    """Yield the examples of each line of a span; raises BadText, Unreadable."""
    try:
        yield from span_rows(span, partial(read, form=read.form_of_file(span.path)))
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
