"""A tokenizer's chat template, which renders messages as text: read from the tokenizer's folder, run in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ....system.regular_file import read_plain
from ..files.data_error import data_error
from .tokenizer import tokenizer_path

Message = dict[str, Any]

CONFIG_FILE, TEMPLATE_FILE, TOKENS_FILE = "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LONGEST_REASON = 200  # characters
_BEGIN, _END = "\ud800", "\ud801"  # around marked text while it is rendered: halves of characters, which no text has
_MARK = re.compile(f"[{_BEGIN}{_END}]")
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class NotRendered(Exception):
    """A template refuses the messages, or fails on them."""


class TextSpan(NamedTuple):
    """The characters begin .. end of a text."""

    begin: int
    end: int


class RenderedChat(NamedTuple):
    """The text of messages, and what of it the template marks as an assistant's, in order."""

    text: str
    marked: tuple[TextSpan, ...]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The text of a chat template, the file that holds it, and the special tokens that it may name: eos_token -> </s>."""

    text: str
    path: Path
    special: Mapping[str, str]

    @property
    def identity(self) -> list[Any]:
        """What the rendered text depends on besides the messages, and the date where the template prints that: JSON values."""
        return [self.text, sorted(self.special.items())]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return the text of messages, as transformers' apply_chat_template; raises NotRendered, Unreadable.

        With `add_generation_prompt` the template adds what an assistant's next message begins with.
        """
        return _MARK.sub("", self._render(messages, add_generation_prompt=add_generation_prompt))

    def render_turns(self, messages: Sequence[Message]) -> RenderedChat:
        """Return the text of messages and the spans of it that the template marks; raises NotRendered, Unreadable."""
        rendered, text, begin, marked = self._render(messages, add_generation_prompt=False), "", 0, list[TextSpan]()
        for piece in re.split(f"([{_BEGIN}{_END}])", rendered):
            if piece == _BEGIN:
                begin = len(text)
            elif piece == _END:
                marked.append(TextSpan(begin, len(text)))
            else:
                text += piece
        return RenderedChat(text, tuple(marked))

    @property
    def marks_turns(self) -> bool:
        """Whether the template marks what an assistant says, with {% generation %}."""
        return bool(_GENERATION_TAG.search(self.text))

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return the text of messages, with marks around what the template marks; raises NotRendered, Unreadable."""
        template = self._template
        known = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return template.render(messages=known, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self.special)
        except Exception as error:  # a template can fail in any way
            says = " ".join(str(error).split())[:_LONGEST_REASON]
            raise NotRendered(says if isinstance(error, TemplateError) else f"{type(error).__name__}: {says}") from None

    @cached_property
    def _template(self) -> Template:
        try:
            return _environment().from_string(self.text)
        except TemplateSyntaxError as error:
            raise data_error(f"the chat template in {self.path} can't be read: line {error.lineno}: {error.message}") from None


def load_chat_template(tokenizer: str) -> ChatTemplate | None:
    """Return the chat template beside the tokenizer.json that `data.tokenizer` names; None if there is none. Raises Unreadable."""
    if tokenizer == "bytes":
        return None
    folder = tokenizer_path(tokenizer).parent
    config, special = _read_object(folder / CONFIG_FILE), dict[str, str]()
    for file in (_read_object(folder / TOKENS_FILE), config):
        for name in SPECIAL_TOKENS:
            token = file.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[name] = token
    with suppress(FileNotFoundError):
        return ChatTemplate(text=_read_text(folder / TEMPLATE_FILE), path=folder / TEMPLATE_FILE, special=special)
    text = config.get("chat_template")
    if isinstance(text, list):
        named = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}
        text = named.get("default")
        if text is None:
            raise data_error(
                f"{folder / CONFIG_FILE} has chat templates, but none is named default: {', '.join(map(str, named))}",
                f"write the one to use as {folder / TEMPLATE_FILE}",
            )
    return ChatTemplate(text=text, path=folder / CONFIG_FILE, special=special) if isinstance(text, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; an empty one if there is no such file or it holds something else."""
    try:
        found = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_text(path: Path) -> str:
    """Return a file's text; raises FileNotFoundError, Unreadable."""
    try:
        return read_plain(path).decode()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise data_error(f"{path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None


class _Generation(Extension):
    """Reads {% generation %} ... {% endgeneration %}, which marks an assistant's text for transformers, as the text between two marks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        text = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END))
        return nodes.Scope([begin, *text, end], lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return what transformers runs chat templates in (transformers/utils/chat_template_utils.py)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _format_now}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
