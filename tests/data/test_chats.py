"""Conversations: their assistant turns are labels, as transformers' masks say, and what is refused says what would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrain.tests.data.test_chat_template import CHATML, STRICT, write_folder
from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.loop.data.prepare import prepare_corpus
from distrain.trainer.loop.data.samples.batches import Batches
from distrain.trainer.loop.data.samples.corpus import Corpus
from distrain.trainer.loop.data.samples.tokens import MappedExamples
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Data

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SEQ = 120
MARKED = """\
{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}
"""
THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
    {{- message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}
"""  # as Qwen3's: a thought, here an empty one, is rendered behind the last question alone
Chat = list[dict[str, Any]]


def say(*texts: str, system: str = "") -> Chat:
    """Return a conversation of user and assistant by turns."""
    turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns] if system else turns


CHATS: tuple[Chat, ...] = (
    say("hi", "yo"),
    say("a", "b <x>", "c\n", " d é字 ", "e", "f", system="Be brief."),
    say("Ünï?", "字", "and?"),  # nothing answers the last question
    [*say("one", "two"), {"role": "assistant", "content": "three"}],
)


def open_lines(folder: Path, *rows: Any, name: str = "a.jsonl", **keys: Any) -> Corpus:
    """Prepare the corpus of lines, without validation."""
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = {"path": str(folder / name), "tokenizer": str(folder), "documents": True, "validation": 0.0, **keys}
    return prepare_corpus(Data(name="pairs", **words), vocab=300, seq=SEQ, cache=folder / "cache", progress=lambda *_: None)


def open_chats(folder: Path, *chats: Chat, **keys: Any) -> Corpus:
    return open_lines(folder, *({"messages": chat} for chat in chats), **keys)


def masks(corpus: Corpus) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each example, and whether each is a label when another precedes it (of the first it is not known)."""
    batches = Batches(corpus, seed=0, seq=SEQ)
    (size,) = batches.windows
    batch = batches.batch(0, size)
    assert batch.documents is not None
    found = dict[int, tuple[list[int], list[int]]]()
    for tokens, labels, marks in zip(batch.tokens.tolist(), batch.labels.tolist(), batch.documents.tolist(), strict=True):
        for document in set(marks) - {-1}:
            places = [place for place, mark in enumerate(marks) if mark == document]
            begin, end = places[0], places[-1] + 1
            found[document] = (tokens[begin:end], [int(label != IGNORED) for label in labels[begin : end - 1]])
    return [found[document] for document in sorted(found)]


def labelled(folder: Path, corpus: Corpus) -> list[str]:
    """Return the texts of the runs of labels of each example, one behind the other with | between them."""
    rules, texts = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), []
    for ids, mask in masks(corpus):
        cuts = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
        texts.append("|".join(rules.decode(ids[1:][begin:end], skip_special_tokens=False) for begin, end in cuts))
    return texts


def test_marked_turns_are_those_of_transformers(tmp_path: Path) -> None:
    """Where the last letter of a turn is several tokens transformers marks the first alone: no turn here ends with such a letter."""
    corpus = open_chats(write_folder(tmp_path, MARKED), *CHATS)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    wanted = []
    for chat in CHATS:
        found = theirs.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        wanted.append((list(found["input_ids"]), list(found["assistant_masks"])[1:]))
    assert [(ids, mask) for ids, mask in masks(corpus)] == wanted
    assert labelled(tmp_path, corpus)[1] == "b <x><|im_end|>| d é字 <|im_end|>|f<|im_end|>"


@pytest.mark.parametrize("trims", [True, False])
def test_places_are_those_of_white_space_too(trims: bool, tmp_path: Path) -> None:
    """A post-processor of byte-level BPE, as Llama 3's, takes spaces out of the places that it reports."""
    template = "{% for m in messages %}{{ m.role + ': ' }}{% generation %}{{ m.content }}{% endgeneration %}{{ ' ' }}{% endfor %}"
    folder = write_folder(tmp_path, template, "</s>")
    rules = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rules.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trims)
    rules.save(str(folder / "tokenizer.json"))
    (found,) = labelled(tmp_path, open_chats(folder, [{"role": "assistant", "content": each} for each in (" a ", "  b")]))
    assert found == " a |  b|</s>"


# fmt: off
FOUND: dict[str, tuple[str, str, Chat, str]] = {  # the template, the end token, the conversation, its labels
    "turns and their line ends": (CHATML, "<|im_end|>", say("a", "b", "c", "d"), "b<|im_end|>\n|d<|im_end|>\n"),
    "another end": (CHATML, "</s>", say("a", "b", "c", "d"), "b<|im_end|>\n|d<|im_end|>\n</s>"),
    "another end behind a question": (CHATML, "</s>", say("a", "b", "c"), "b<|im_end|>\n"),
    "no generation prompt": (STRICT, "</s>", say("a", " b ", "c", "d", system="s"), " b</s>| d</s>"),
    "a thought in the last turn": (THINKING, "<|im_end|>", say("a", " b\n", "c", "d"),
        "b<|im_end|>\n|<think>\n\n</think>\n\nd<|im_end|>\n"),
    "equal turns": (THINKING, "<|im_end|>", say("a", "a", "a", "a"), "a<|im_end|>\n|<think>\n\n</think>\n\na<|im_end|>\n"),
}
# fmt: on


@pytest.mark.parametrize("name", FOUND)
def test_turns_are_found_in_the_rendered_whole(name: str, tmp_path: Path) -> None:
    template, end, chat, labels = FOUND[name]
    assert labelled(tmp_path, open_chats(write_folder(tmp_path, template, end), chat)) == [labels]


def test_a_whole_conversation_is_tokenized_at_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CHATML)
    ((ids, _),) = masks(open_chats(folder, CHATS[1]))
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert ids == theirs.apply_chat_template(CHATS[1], tokenize=True, return_dict=True)["input_ids"]


def test_a_token_that_holds_a_letter_of_a_turn_is_its_label(tmp_path: Path) -> None:
    """As in transformers. Of this tokenizer `: y` is one token, whose last letter is the turn's first."""
    folder = write_folder(tmp_path, "{% for m in messages %}{% if m.role == 'user' %}{{ m.content + ':' }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}", "</s>")  # fmt: skip
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"][":y"] = len(words["model"]["vocab"])
    words["model"]["merges"].append([":", "y"])
    words["pre_tokenizer"]["use_regex"] = False
    (folder / "tokenizer.json").write_text(json.dumps(words))
    ((ids, mask),) = masks(open_chats(folder, say("a", "yo")))
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    wanted = theirs.apply_chat_template(say("a", "yo"), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert [*ids[:-1]] == wanted["input_ids"]
    assert len(ids) == 4
    assert mask == [*wanted["assistant_masks"][1:], 1] == [1, 1, 1]


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_the_last_turn_alone_can_be_the_label(template: str, tmp_path: Path) -> None:
    corpus = open_chats(write_folder(tmp_path, template), say("a", "b", "c", "d"), say("e", "f", "g"), turns="last")
    assert [text.removesuffix("\n") for text in labelled(tmp_path, corpus)] == ["d<|im_end|>", "f<|im_end|>"]


@pytest.mark.parametrize(("turn", "rest"), [(1, "d"), (3, "b")])
@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_a_turn_of_weight_0_is_no_label(template: str, turn: int, rest: str, tmp_path: Path) -> None:
    chat = say("a", "b", "c", "d")
    chat[turn]["weight"] = 0
    corpus = open_chats(write_folder(tmp_path, template), chat)
    assert [text.removesuffix("\n") for text in labelled(tmp_path, corpus)] == [f"{rest}<|im_end|>"]


def test_every_range_of_positions_knows_its_turns() -> None:
    none: Any = np.zeros(0, np.int64)
    turns = np.array([[0, 3, 7, 9], [1, 5, 8, 12]])
    tokens = MappedExamples(files=(), starts=none, bounds=np.array([0, 12]), counts=none, completions=none, turns=turns)
    inside = np.zeros(12, bool)
    for begin, end in turns.T:
        inside[begin:end] = True
    for begin in range(12):
        for end in range(begin + 1, 13):
            assert tokens.in_completion(begin, end - begin).tolist() == inside[begin:end].tolist()
            assert tokens.has_turn(np.array([begin]), np.array([end])).tolist() == [bool(inside[begin + 1 : end].any())]


def test_other_turns_use_another_cache(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CHATML)
    assert open_chats(folder, CHATS[1]).key != open_chats(folder, CHATS[1], turns="last").key


def test_a_conversation_of_one_answer_is_labelled_as_a_prompt_and_its_completion(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CHATML)
    chat = say("hi", "yo", system="s")
    pair = open_lines(folder, {"prompt": chat[:2], "completion": chat[2:]}, name="pair.jsonl")
    assert masks(open_chats(folder, chat)) == masks(pair)


def test_a_long_conversation_keeps_the_turns_inside_its_window(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CHATML)
    corpus = open_chats(folder, say("a", "b", "c" * SEQ, "d"), say("e" * SEQ, "f", "g", "h"), say("i", "j" * SEQ))
    first, last = labelled(tmp_path, corpus)
    assert first == "b<|im_end|>\n"
    assert set(last) == {"j"}


def test_sharegpt_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CHATML)
    roles = {"system": "system", "user": "human", "assistant": "gpt"}
    theirs = [{"from": roles[each["role"]], "value": each["content"]} for each in CHATS[1]]
    wanted = masks(open_chats(folder, CHATS[1]))
    assert masks(open_lines(folder, {"id": 1, "conversations": theirs}, name="b.jsonl")) == wanted
    assert masks(open_lines(folder, {"chat": theirs}, name="c.jsonl", messages_key="chat")) == wanted


def test_a_prompt_beside_messages_is_not_read(tmp_path: Path) -> None:
    """As in UltraChat, whose lines have their first question a second time."""
    folder = write_folder(tmp_path, CHATML)
    assert labelled(tmp_path, open_lines(folder, {"prompt": "hi", "messages": say("hi", "yo")})) == ["yo<|im_end|>\n"]


def test_a_folder_of_json_files_is_read_where_they_hold_chats(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CHATML)
    (folder / "in").mkdir()
    (folder / "in" / "config.json").write_text('{"model_type": "llama"}\n')
    (folder / "in" / "b.json").write_text(json.dumps({"conversations": [{"from": "gpt", "value": "b"}]}) + "\n")
    corpus = open_lines(folder, {"messages": say("a", "c")}, name="in/a.json", path=str(folder / "in"))
    assert labelled(tmp_path, corpus) == ["c<|im_end|>\n", "b<|im_end|>\n"]


def test_files_of_both_kinds_are_read_side_by_side(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CHATML)
    (folder / "b.jsonl").write_text(json.dumps({"prompt": "p", "completion": "c"}) + "\n")
    corpus = open_lines(folder, {"messages": say("a", "b", "c", "d")}, path=(str(folder / "a.jsonl"), str(folder / "b.jsonl")))
    assert labelled(tmp_path, corpus) == ["b<|im_end|>\n|d<|im_end|>\n", "c<|im_end|>"]


def test_several_processes_find_the_same_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distrain.trainer.loop.data import source_reader
    from distrain.trainer.loop.data.tokenize import text_files

    folder = write_folder(tmp_path, CHATML)
    wanted = masks(open_chats(folder, *CHATS))
    monkeypatch.setattr(source_reader, "_ONE_PROCESS", (0, 0))
    monkeypatch.setattr(source_reader, "cpu_count", lambda: 2)
    monkeypatch.setattr(text_files, "SHARE", 150)  # turns of about a line
    assert masks(open_chats(folder, *CHATS, cache=None, name="b.jsonl")) == wanted


def test_entropy_is_that_of_the_labels(tmp_path: Path) -> None:
    corpus = open_chats(write_folder(tmp_path, MARKED), say("a", "", "c", ""))
    assert corpus.entropy == 0  # the end token alone


PAIR = {"prompt": "a", "completion": "b"}
# The template, the lines, the keys, the line that is said (AT: the folder).
# fmt: off
WRONG: dict[str, tuple[Any, list[Any], dict[str, Any], str]] = {
    "mixed": (CHATML, [{"messages": say("a", "b")}, PAIR], {},
        "AT/a.jsonl line 2 holds prompt and completion, and the file's first line messages: write lines of one kind into a file"),
    "mixed the other way": (CHATML, [PAIR, {"messages": say("a", "b")}], {},
        "AT/a.jsonl line 2 holds messages, and the file's first line prompt and completion: write lines of one kind into a file"),
    "bytes": (CHATML, [{"messages": say("a", "b")}], {"tokenizer": "bytes"},
        "AT/a.jsonl line 1 holds messages, but data.tokenizer=bytes has no chat template: name a tokenizer that has one"),
    "no answer": (CHATML, [{"messages": say("a")}], {},
        "AT/a.jsonl line 1 has no message of role assistant, so nothing of it would be trained"),
    "no list": (CHATML, [{"messages": "a"}], {}, 'AT/a.jsonl line 1 has "a" under messages, which is not a list of messages'),
    "an empty list": (CHATML, [{"messages": []}], {},
        "AT/a.jsonl line 1 has an empty list under messages: write its messages, or leave out the line"),
    "no content": (CHATML, [{"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}], {},
        ('AT/a.jsonl line 1 has a message under messages that is not {"role": "...", "content": "..."} '
         'but {"role": "assistant", "content": null, "')),
    "an unknown speaker": (CHATML, [{"conversations": [{"from": "bing", "value": "a"}]}], {},
        'AT/a.jsonl line 1 has a message under conversations from "bing", not one of system, human, user, gpt, assistant, tool'),
    "another key": (CHATML, [{"dialog": say("a", "b")}], {},
        "AT/a.jsonl line 1 has no key messages: set data.messages_key=dialog"),
    "Alpaca": (CHATML, [{"instruction": "a", "input": "", "output": "b"}], {},
        ("AT/a.jsonl line 1 holds instruction and output, as Alpaca's: write prompts and completions: jq -c '{prompt: (if (.input // "
         '"") == "" then .instruction else .instruction + "\\n\\n" + .input end), completion: .output}\' FILE > NEW.jsonl')),
    "half a character": (CHATML, [{"messages": say("a", "\ud800")}], {}, "AT/a.jsonl line 1 holds half of a character (a lone surrogate)"),
    "a refusal": (STRICT, [{"messages": [*say("a", "b"), {"role": "assistant", "content": "c"}]}], {},
        "AT/a.jsonl line 1 is refused by the chat template in AT/tokenizer_config.json: Roles must alternate: user, assistant, user, ..."),
    "another beginning": ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", [{"messages": say("a", "b")}], {},
        ("AT/a.jsonl line 1 has an assistant turn, message 2, that can't be found: by the chat template in AT/tokenizer_config.json the "
         "whole does not begin with the messages before it, which with the generation prompt end with '1a': mark what is trained in the "
         "template, {% generation %} ... {% endgeneration %}, or write prompt and completion")),
    "another middle": ("{% for m in messages %}{{ m.content + ('!' if loop.last else '') }}{% endfor %}",
        [{"messages": say("a", "b", "c", "d")}], {"turns": "all"},
        ("AT/a.jsonl line 1 has an assistant turn, message 2, that can't be found: by the chat template in AT/tokenizer_config.json the "
         "whole does not begin with the messages before it, which with the generation prompt end with 'a!': mark what is trained in the "
         "template, {% generation %} ... {% endgeneration %}, or write prompt and completion")),
    "another answer": ("{% for m in messages %}{{ m.content + ('' if m.role == 'user' else '.' if loop.last else ';') }}{% endfor %}",
        [{"messages": say("a", "b", "c", "d")}], {},
        ("AT/a.jsonl line 1 has an assistant turn, message 2, that can't be found: by the chat template in AT/tokenizer_config.json it is "
         "rendered in another way where messages follow: mark what is trained in the template, "
         "{% generation %} ... {% endgeneration %}, or write prompt and completion")),
}
# fmt: on


@pytest.mark.parametrize("name", WRONG)
def test_each_problem_is_reported_in_one_line(name: str, tmp_path: Path) -> None:
    template, rows, keys, line = WRONG[name]
    write_folder(tmp_path, template)
    with pytest.raises(Unreadable) as refused:
        open_lines(tmp_path, *rows, **keys)
    assert str(refused.value).replace(str(tmp_path), "AT") == line
