"""The commands that a run's end offers: they fit its data and its model."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from ...trainer.spec.run import Run

_CONFIG_BYTES = 1 << 24  # at most, of a tokenizer_config.json


def next_commands(run: Run, folder: str, *, has_checkpoint: bool) -> tuple[str, ...]:
    """Return the commands, without the program's name, that may follow a run in a folder: of fine-tuned weights the export first."""
    name, commands = quote(folder), list[str]()
    if has_checkpoint and run.model.weights is not None:
        commands.append(f"export {name} {quote(f'{folder}_hf')}")
        if run.model.lora.rank:
            commands.append(f"export {name} {quote(f'{folder}_adapter')} --adapter")
    if has_checkpoint and (options := _generate_options(run)):
        commands.append(f"generate {name} {options}")
    commands.append(f"report {name}")
    if run.data.name == "stdlib" and run.model.weights is None:
        commands.append("plan conf=megatron_1t_6x8x64")
    return tuple(commands)


def _generate_options(run: Run) -> str:
    """Return the options of a prompt like what the run has read; "" where its ids are no text."""
    if run.data.name == "stdlib":
        return "--prompt 'def '"
    if run.data.has_prompts:
        return f"{'--chat ' if _has_chat_template(run.data.tokenizer) else ''}--prompt 'Who are you?'"
    if run.data.name == "synthetic":
        return ""
    no_tokenizer = run.data.name == "tokens" and run.data.tokenizer == "bytes" and run.model.vocab != 256
    return f"{'--tokenizer PATH ' if no_tokenizer else ''}--prompt 'The '"


def _has_chat_template(tokenizer: str) -> bool:
    """Whether the folder of data.tokenizer has a chat template."""
    path = Path(tokenizer).expanduser()
    folder = path if path.is_dir() else path.parent
    if tokenizer == "bytes":
        return False
    try:
        with (folder / "tokenizer_config.json").open("rb") as file:
            named = b'"chat_template"' in file.read(_CONFIG_BYTES)
    except OSError:
        named = False
    return named or (folder / "chat_template.jinja").is_file()
