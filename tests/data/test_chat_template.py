"""Messages are rendered as transformers renders them, and divided into a prompt and a completion where the prompt's text ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.batches import Batches
from distrain.trainer.loop.data.samples.corpus import Corpus
from distrain.trainer.loop.data.tokenize.chat_template import ChatTemplate, NotRendered, load_chat_template
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
STRICT = """\
{% if messages[0]['role'] == 'system' %}
    {% set system = messages[0]['content'] | trim + '\\n\\n' %}
    {% set turns = messages[1:] %}
{% else %}
    {% set system = '' %}
    {% set turns = messages %}
{% endif %}
{{ bos_token -}}
{% for message in turns %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' -}}
    {% else %}
        {{- ' ' + message['content'] | trim + eos_token -}}
    {% endif %}
{% endfor %}
"""
BLOCKS = """\
{%- set seen = namespace(system=false) %}
Year: {{ strftime_now('%Y') }} {{ pad_token }}|{{ tools }}
{% for message in messages %}
{% if message.role == 'tool' %}{% continue %}{% endif %}
{% if message.role == 'system' %}{% set seen.system = true %}{% endif %}
<|im_start|>{{ message.role }} {{ {'name': message.name, 'text': message.content} | tojson if message.name is defined else '' }}
{% generation %}
{{ message.content }}<|im_end|>
{% endgeneration %}
{% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}
{{ 'system' if seen.system else 'none' }}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
TEMPLATES = {"ChatML": CHATML, "strict": STRICT, "blocks": BLOCKS}
SYSTEM: dict[str, Any] = {"role": "system", "content": " Be brief. "}
USER: dict[str, Any] = {"role": "user", "content": "Ünïcödé <b>字</b>?\n", "name": "Zoë"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "  yes & no  ", "tool_calls": None}
TOOL: dict[str, Any] = {"role": "tool", "content": "7"}
CHATS: tuple[list[dict[str, Any]], ...] = (
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ASSISTANT],
    [USER, ASSISTANT, USER, ASSISTANT],
    [TOOL, USER],
)


def write_folder(folder: Path, template: Any, end: str = "<|im_end|>", file: str | None = None) -> Path:
    """Write a tokenizer of bytes and a few special tokens, whose tokenizer_config.json has the template; `file`: of chat_template.jinja."""
    rules = tokenizers.Tokenizer(tokenizers.models.BPE())
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=261, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    rules.train_from_iterator(["a"], trainer)
    rules.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": end},
        "pad_token": "<pad>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    if file is not None:
        (folder / "chat_template.jinja").write_text(file)
    return folder


def load_template(folder: Path) -> ChatTemplate:
    template = load_chat_template(str(folder))
    assert template is not None
    return template


def render(template: ChatTemplate, chat: list[dict[str, Any]], *, prompt: bool) -> str:
    """Return the rendered text, or that the template refused the messages."""
    try:
        return template.render(chat, add_generation_prompt=prompt)
    except NotRendered as error:
        return f"refused: {error}"


def render_by_transformers(folder: Path, chat: list[dict[str, Any]], *, prompt: bool) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # jinja2's TemplateError
        return f"refused: {error}"


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_are_rendered_as_by_transformers(name: str, prompt: bool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TEMPLATES[name])
    ours = [render(load_template(folder), chat, prompt=prompt) for chat in CHATS]
    assert ours == [render_by_transformers(folder, chat, prompt=prompt) for chat in CHATS]
    assert ours[-1].startswith("refused: Roles must alternate") == (name == "strict")


@pytest.mark.parametrize(
    ("template", "file"),
    [
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}], None),
        ("no", CHATML),
        (None, CHATML),
    ],
    ids=["named", "both files", "a file of its own"],
)
def test_the_template_is_found_where_transformers_finds_it(template: Any, file: str | None, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, template, file=file)
    ours = render(load_template(folder / "tokenizer.json"), [USER], prompt=True)
    assert ours == render_by_transformers(folder, [USER], prompt=True)
    assert ours.startswith("<|im_start|>user")


@pytest.mark.parametrize("text", ["messages.__class__.__mro__", "messages.append(1)"])
def test_a_template_reaches_nothing_outside_its_sandbox(text: str, tmp_path: Path) -> None:
    template = load_template(write_folder(tmp_path, f"{{{{ {text} }}}}"))
    assert re.fullmatch(r"refused: access to attribute '\w+' of 'list' object is unsafe.", render(template, [USER], prompt=False))


def test_bytes_have_no_template() -> None:
    assert load_chat_template("bytes") is None


# From messages to labels


def open_chats(folder: Path, *rows: Any, **keys: Any) -> Corpus:
    """Prepare a corpus of messages, of windows of 64 tokens and the one after."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in rows))
    data = Data(name="pairs", path=str(folder / "a.jsonl"), tokenizer=str(folder), documents=True, validation=0.0, **keys)
    return prepare_corpus(data, vocab=300, seq=64, cache=folder / "cache", progress=lambda *_: None)


def tokens_and_labels(folder: Path, corpus: Corpus) -> tuple[str, str]:
    """Return the texts of the first window's tokens, without padding, and of its labels that count."""
    rules = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    batch = Batches(corpus, seed=0, seq=64).batch(0, 1)
    assert batch.documents is not None
    read = batch.tokens[0][batch.documents[0] >= 0].tolist()
    counted = [label for label in batch.labels[0].tolist() if label != IGNORED]
    decoded: tuple[str, str] = tuple(rules.decode(ids, skip_special_tokens=False) for ids in (read, counted))
    return decoded


HI, YO = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "yo"}]


# The template, the end token, the texts of the tokens and of the labels.
# fmt: off
DIVIDED = {
    "ends with the end and a line end": (CHATML, "<|im_end|>",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n", "yo<|im_end|>\n"),
    "ends with another token": (CHATML, "</s>",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n</s>", "yo<|im_end|>\n</s>"),
    "ends with the end": (STRICT, "</s>",
        "<s>[INST] hi [/INST] yo</s>", " yo</s>"),
}
# fmt: on


@pytest.mark.parametrize("name", DIVIDED)
def test_the_labels_are_what_the_template_adds_to_the_prompt(name: str, tmp_path: Path) -> None:
    template, end, tokens, labels = DIVIDED[name]
    corpus = open_chats(write_folder(tmp_path, template, end), (HI, YO))
    assert tokens_and_labels(tmp_path, corpus) == (tokens, labels)


def test_texts_end_with_the_end_token_though_they_name_it(tmp_path: Path) -> None:
    corpus = open_chats(write_folder(tmp_path, None, "</s>"), ("a", "b</s>"))
    assert tokens_and_labels(tmp_path, corpus) == ("ab</s></s>", "b</s></s>")


def test_several_turns_may_be_the_prompt(tmp_path: Path) -> None:
    corpus = open_chats(write_folder(tmp_path, STRICT, "</s>"), ([*HI, *YO, *HI], YO))
    assert tokens_and_labels(tmp_path, corpus) == ("<s>[INST] hi [/INST] yo</s>[INST] hi [/INST] yo</s>", " yo</s>")


def test_another_template_uses_another_cache(tmp_path: Path) -> None:
    one = open_chats(write_folder(tmp_path, CHATML), (HI, YO))
    other = open_chats(write_folder(tmp_path, CHATML.replace("<|im_start|>", "<s>")), (HI, YO))
    assert one.key != other.key
    assert tokens_and_labels(tmp_path, other)[0].startswith("<s>user")


# fmt: off
WRONG = {
    "no template": (None, HI, YO,
        ("AT/a.jsonl line 2 holds messages, but data.tokenizer=AT has no chat template: "
         "name a tokenizer that has one, or write prompt and completion as texts")),
    "a wrong order of roles": (STRICT, YO, HI,
        "AT/a.jsonl line 2 is refused by the chat template in AT/tokenizer_config.json: Roles must alternate: user, assistant, user, ..."),
    "another beginning": ("{{ messages | length }}{{ messages[0].content }}", HI, YO,
        ("AT/a.jsonl line 2 can't be divided: rendered by the chat template in AT/tokenizer_config.json "
         "the whole does not begin with the prompt, which ends with '1hi'")),
    "a template that fails": ("{{ messages[0].content + 7 }}", HI, YO,
        ("AT/a.jsonl line 2 is refused by the chat template in AT/tokenizer_config.json: "
         'TypeError: can only concatenate str (not "int") to str')),
    "a template that is none": ("{% for %}", HI, YO,
        ("the chat template in AT/tokenizer_config.json can't be read: line 1: "
         "Expected an expression, got 'end of statement block'")),
    "no default": ([{"name": "tool_use", "template": CHATML}], HI, YO,
        ("AT/tokenizer_config.json has chat templates, but none is named default: tool_use: "
         "write the one to use as AT/chat_template.jinja")),
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_what_a_template_can_not_render_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    template, prompt, completion, line = WRONG[name]
    write_folder(tmp_path, template)
    with pytest.raises(Unreadable) as refused:
        open_chats(tmp_path, ("a", "b"), (prompt, completion))
    assert str(refused.value).replace(str(tmp_path), "AT") == line
