"""A prompt as a chat's first question: the text that a tokenizer's chat template makes of it, and the tokens that end the answer."""

from __future__ import annotations

from typing import NamedTuple

from ...spec.problem import Problem, Unreadable
from ..data.tokenize.chat_template import ChatTemplate, NotRendered, load_chat_template
from ..data.tokenize.tokenizer import Tokenizer, VocabularyTokenizer

_ANSWER = "answer"


class ChatPrompt(NamedTuple):
    """The rendered text up to where an assistant's answer begins, and the ids that end the answer."""

    text: str
    ends: frozenset[int]


def chat_prompt(question: str, name: str, tokenizer: Tokenizer) -> ChatPrompt:
    """Return a question as a user's turn with the chat template of the tokenizer that `name` names; raises Unreadable.

    An answer ends with the tokenizer's end token, or with the special token that the template closes an assistant's turn with.
    """
    template = load_chat_template(name)
    if template is None or not isinstance(tokenizer, VocabularyTokenizer):
        raise _refusal(f"--chat needs a chat template, and the tokenizer {name} has none", "name one that has: --tokenizer PATH")
    messages = [{"role": "user", "content": question}]
    try:
        text = template.render(messages, add_generation_prompt=True)
        ends = {tokenizer.end, _closing_token([*messages, {"role": "assistant", "content": _ANSWER}], template, tokenizer)}
    except NotRendered as error:
        raise _refusal(f"the chat template in {template.path} refuses the prompt: {error}", "") from None
    return ChatPrompt(text, frozenset(each for each in ends if each is not None))


def _closing_token(messages: list[dict[str, str]], template: ChatTemplate, tokenizer: VocabularyTokenizer) -> int | None:
    """Return the special token directly behind the last message; None if there is none. Raises NotRendered."""
    closing = template.render(messages, add_generation_prompt=False).rpartition(_ANSWER)[2]
    ids = tokenizer.encode(closing.encode()).tolist()
    special = tokenizer.rules.get_added_tokens_decoder()
    return ids[0] if ids and ids[0] in special and special[ids[0]].special else None


def _refusal(says: str, mend: str) -> Unreadable:
    return Unreadable([Problem(rule="generate", says=says, mend=mend)])
