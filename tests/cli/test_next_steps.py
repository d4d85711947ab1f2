"""The commands at the end of a run fit its data and its model, and are commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.pages.next_steps import next_commands
from distrain.trainer.spec.changed_run import with_changes
from distrain.trainer.spec.run import Run

REPORT, TOUR = "report runs/a", "plan conf=megatron_1t_6x8x64"
LORA: dict[str, object] = {"model.lora.rank": 4}
WEIGHTS: dict[str, object] = {"model.weights": "/w"}
PAIRS: dict[str, object] = {"data.name": "pairs", "data.path": "a.jsonl"}
# fmt: off
ROWS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "the library": ({}, ("generate runs/a --prompt 'def '", REPORT, TOUR)),
    "text": ({"data.name": "text", "data.path": "a.txt"}, ("generate runs/a --prompt 'The '", REPORT)),
    "ids": ({"data.name": "tokens", "data.path": "a.bin", "model.vocab": 50304},
        ("generate runs/a --tokenizer PATH --prompt 'The '", REPORT)),
    "ids of bytes": ({"data.name": "tokens", "data.path": "a.bin"}, ("generate runs/a --prompt 'The '", REPORT)),
    "random ids": ({"data.name": "synthetic"}, (REPORT,)),
    "prompts": (PAIRS, ("generate runs/a --prompt 'Who are you?'", REPORT)),
    "chats": ({**PAIRS, "data.tokenizer": "CONFIG"}, ("generate runs/a --chat --prompt 'Who are you?'", REPORT)),
    "chats by a file": ({**PAIRS, "data.tokenizer": "FILE/tokenizer.json"}, ("generate runs/a --chat --prompt 'Who are you?'", REPORT)),
    "no template": ({**PAIRS, "data.tokenizer": "NONE"}, ("generate runs/a --prompt 'Who are you?'", REPORT)),
    "fine-tuned": ({**PAIRS, **WEIGHTS}, ("export runs/a runs/a_hf", "generate runs/a --prompt 'Who are you?'", REPORT)),
    "LoRA": ({**WEIGHTS, **LORA},
        ("export runs/a runs/a_hf", "export runs/a runs/a_adapter --adapter", "generate runs/a --prompt 'def '", REPORT)),
}
# fmt: on


def quickstart(folder: Path, changes: dict[str, object]) -> Run:
    """Return the quickstart's run with changes; a tokenizer's path is in the folder."""
    tokenizer = changes.get("data.tokenizer")
    paths = {"data.tokenizer": str(folder / str(tokenizer))} if tokenizer else {}
    return with_changes(load_recipe("quickstart"), {**changes, **paths}.items())


@pytest.mark.parametrize("name", ROWS)
def test_the_next_commands_fit_the_run(name: str, tmp_path: Path) -> None:
    for folder, file, text in (
        ("CONFIG", "tokenizer_config.json", '{"chat_template": "x"}'),
        ("FILE", "chat_template.jinja", "x"),
        ("NONE", "tokenizer_config.json", "{}"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
    changes, wanted = ROWS[name]
    run = quickstart(tmp_path, changes)
    assert next_commands(run, "runs/a", has_checkpoint=True) == wanted
    assert next_commands(run, "runs/a", has_checkpoint=False) == tuple(
        each for each in wanted if not each.startswith(("export", "generate"))
    )


def test_a_folder_with_spaces_is_quoted() -> None:
    run = with_changes(load_recipe("quickstart"), [("model.weights", "/w")])
    commands = next_commands(run, "my runs/a", has_checkpoint=True)
    assert commands[:2] == ("export 'my runs/a' 'my runs/a_hf'", "generate 'my runs/a' --prompt 'def '")
