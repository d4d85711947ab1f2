"""Conversations whose assistant turns are labels: read from a JSON line, rendered as a whole, each turn found in the text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from .chat_template import ChatTemplate, Message, NotRendered, TextSpan
from .text_files import HALF_CHARACTER, BadLine

SHAREGPT_KEY = "conversations"
SHAREGPT_ROLES = {  # of ShareGPT's messages, {"from": ..., "value": ...}
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}
MESSAGE_FORM = '{"role": "...", "content": "..."}'


class Chat(NamedTuple):
    """The text of a whole conversation, the characters of each assistant turn that is a label, and whether its last message is one."""

    text: str
    turns: tuple[TextSpan, ...]
    ends_with_label: bool


def chat_of(messages: Sequence[Message], template: ChatTemplate, turns: Literal["all", "last"]) -> Chat:
    """Return a conversation whose assistant turns, all or the last one, are labels; raises BadLine, Unreadable.

    A turn with "weight": 0 (OpenAI's format) is no label.
    """
    assistant = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not assistant:
        raise BadLine("has no message of role assistant, so nothing of it would be trained")
    chosen = [index for index in (assistant if turns == "all" else assistant[-1:]) if messages[index].get("weight", 1) != 0]
    try:
        "".join(message["content"] for message in messages).encode()
        whole = template.render_turns(messages)
        if not template.marks_turns:
            found = [_find_turn(messages, index, whole.text, template) for index in chosen]
        elif chosen == assistant:
            found = list(whole.marked)
        else:
            found = [span for index in chosen for span in _marked_turn(messages, index, whole.marked, template)]
    except UnicodeError:
        raise BadLine(HALF_CHARACTER) from None
    except NotRendered as error:
        raise BadLine(f"is refused by the chat template in {template.path}: {error}") from None
    spans = tuple(span for span in found if span.begin < span.end)
    return Chat(text=whole.text, turns=spans, ends_with_label=bool(chosen) and chosen[-1] == len(messages) - 1)


def read_messages(value: Any, key: str) -> list[Message]:
    """Return messages of roles and texts, of ShareGPT's form too; raises BadLine."""
    if value == []:
        raise BadLine(f"has an empty list under {key}: write its messages, or leave out the line")
    if not isinstance(value, list):
        raise BadLine(f"has {json.dumps(value)[:40]} under {key}, which is not a list of messages")
    return [_read_message(each, key) for each in value]


def holds_messages(value: Any) -> bool:
    """Whether a value looks like the messages of a conversation."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and ({"role", "from"} & each.keys()) for each in value)


def _read_message(message: Any, key: str) -> Message:
    if isinstance(message, dict) and "role" not in message and {"from", "value"} <= message.keys():
        role = SHAREGPT_ROLES.get(message["from"]) if isinstance(message["from"], str) else None
        if role is None:
            raise BadLine(f"has a message under {key} from {json.dumps(message['from'])[:40]}, not one of {', '.join(SHAREGPT_ROLES)}")
        message = {"role": role, "content": message["value"]}
    if not isinstance(message, dict) or not all(isinstance(message.get(each), str) for each in ("role", "content")):
        raise BadLine(f"has a message under {key} that is not {MESSAGE_FORM} but {json.dumps(message)[:40]}")
    return message


def _marked_turn(messages: Sequence[Message], index: int, marked: Sequence[TextSpan], template: ChatTemplate) -> Iterator[TextSpan]:
    """Yield the spans of one message of those that a template marks in the whole: as many as it marks more with the message than without
    it. Raises NotRendered, Unreadable."""
    before, after = (len(template.render_turns(messages[:end]).marked) if end else 0 for end in (index, index + 1))
    yield from marked[before:after]


def _find_turn(messages: Sequence[Message], index: int, whole: str, template: ChatTemplate) -> TextSpan:
    """Return where a message lies in the rendered whole: behind the messages before it with the generation prompt, up to where the messages
    with it end. Raises BadLine, NotRendered, Unreadable.

    Where a template renders the last message in another way than those before, as Qwen3's adds an empty thought, the message must be its
    content and what the template closes it with.
    """
    start = template.render(messages[:index], add_generation_prompt=True)
    if not whole.startswith(start):
        says = f"does not begin with the messages before it, which with the generation prompt end with {start[-40:]!r}"
        raise BadLine(_not_found(index, template, f"the whole {says}"))
    through = template.render(messages[: index + 1], add_generation_prompt=False)
    if whole.startswith(through) and len(through) >= len(start):
        return TextSpan(len(start), len(through))
    for content in (messages[index]["content"], messages[index]["content"].strip()):
        _, found, closing = through.rpartition(content)
        if content and found and closing and whole.startswith(content + closing, len(start)):
            return TextSpan(len(start), len(start) + len(content + closing))
    raise BadLine(_not_found(index, template, "it is rendered in another way where messages follow"))


def _not_found(index: int, template: ChatTemplate, says: str) -> str:
    mend = "mark what is trained in the template, {% generation %} ... {% endgeneration %}, or write prompt and completion"
    return f"has an assistant turn, message {index + 1}, that can't be found: by the chat template in {template.path} {says}: {mend}"
